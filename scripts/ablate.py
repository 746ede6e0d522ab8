"""Show what two parts of the recipe are worth: train the tiny draft without each, equally long, and measure alike.

- `no Markov head`: rows of a block do not know their neighbours' tokens.
- `output_hidden_states`: features are those that transformers hands out, Kimi K3's raw prefix sums, instead of the
  mixtures its layers read, both in training and in use.

The last rows take the draft that ships, which was trained ten times longer, and feed it the right taps, and
`output_hidden_states` in use only: the mistake that is easily made. Everything is written below `build/ablations/`; a
variant that is there is not trained again.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import evaluate
import torch
import train
from common import BUILD, HELD_OUT_PROMPTS, TINY_DRAFT, TINY_TARGET, load_draft, load_target, root_class, root_module

FOLDER = BUILD / "ablations"
COMPLETE, NO_MARKOV, HIDDEN_STATES = "complete", "no Markov head", "output_hidden_states"
SHIPPED, WRONG_IN_USE = "as shipped", "as shipped, output_hidden_states in use"
TRAINING = ["--save-every", "500"]  # options of scripts/train.py that all variants share
# Variant: which draft, and whether it is fed hidden states in use.
VARIANTS = {
    COMPLETE: (COMPLETE, False),
    NO_MARKOV: (NO_MARKOV, False),
    HIDDEN_STATES: (HIDDEN_STATES, True),
    SHIPPED: (SHIPPED, False),
    WRONG_IN_USE: (SHIPPED, True),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700, help="training steps of each variant (default: 700)")
    parser.add_argument("--limit", type=int, help="take the first questions only (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens a question (default: 128)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    arguments = parser.parse_args()
    for name in ("steps", "limit", "max_new_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}, expected at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    folders = {name: train_variant(name, arguments.steps) for name in (COMPLETE, NO_MARKOV, HIDDEN_STATES)}
    folders[SHIPPED] = TINY_DRAFT
    target, tokenizer = load_target(TINY_TARGET)
    figures = {}
    for variant, (trained, wrong_taps) in VARIANTS.items():
        draft = load_draft(folders[trained], target)
        with hidden_states_as_features(type(draft), wrong_taps):
            figures[variant] = [measure(draft, target, tokenizer, temperature, arguments) for temperature in (0.0, 1.0)]
    print(report(figures, arguments.steps))
    if arguments.json is not None:
        rows = {variant: {"greedy": greedy, "sampled": sampled} for variant, (greedy, sampled) in figures.items()}
        arguments.json.write_text(json.dumps({"steps": arguments.steps, "variants": rows}, indent=2) + "\n")


def train_variant(name: str, steps: int) -> Path:
    """Train the variant for `steps` unless it is there; the folder of its draft."""
    folder = FOLDER / f"{name.replace(' ', '_')}-{steps}"
    if (folder / "model.safetensors").exists() and not (folder / train.CHECKPOINT).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((TINY_DRAFT / "config.json").read_text())
    if name == NO_MARKOV:
        heads = {"markov_rank": 0, "confidence_head_with_markov": False}
        config |= heads | {"dflash_config": config["dflash_config"] | heads}
    (folder / "draft.json").write_text(json.dumps(config, indent=2))
    command_line = ["--draft-config", folder / "draft.json", "--out", folder, "--steps", steps, *TRAINING]
    command_line += ["--resume"] if (folder / train.CHECKPOINT).exists() else []
    print(f"Training the variant {name!r}")
    with hidden_states_as_features(root_class(), name == HIDDEN_STATES):
        train.main([*map(str, command_line)])
    return folder


@contextmanager
def hidden_states_as_features(draft_class: type, wanted: bool) -> Iterator[None]:
    """While open, and if `wanted`, targets of this class' package take features from `output_hidden_states`."""
    target_class = root_module(draft_class, "target_kimi_k3").VerifiableTarget
    tapped_forward = target_class._tapped_forward

    def forward(self, rows: int, **arguments):
        output, hidden, _ = tapped_forward(self, rows, output_hidden_states=True, **arguments)
        return output, hidden, torch.cat([output.hidden_states[tap_id + 1] for tap_id in self.tap_ids], dim=-1)

    if wanted:
        target_class._tapped_forward = forward
    try:
        yield
    finally:
        target_class._tapped_forward = tapped_forward


def measure(draft, target, tokenizer, temperature: float, arguments: argparse.Namespace) -> dict:
    """acc_len and acceptance by position of one draft, as scripts/evaluate.py measures them."""
    settings = SimpleNamespace(
        questions=evaluate.read_questions([HELD_OUT_PROMPTS], arguments.limit),
        finished={},
        json=None,
        multi_turn=False,
        max_new_tokens=arguments.max_new_tokens,
        temperature=temperature,
        verification="token",
        seed=0,
    )
    summary = evaluate.summarize(evaluate.ask_all(draft, target, tokenizer, settings))
    by_position = [row["accepted_given_before"] for row in summary["by_position"]]
    return {"acc_len": summary["acc_len"], "accepted_given_before": by_position}


def report(figures: dict, steps: int) -> str:
    """A table in Markdown, a row for each variant."""
    header = ("Draft", "acc_len, greedy", "acc_len, temperature 1", "Accepted given all before, greedy")
    rows = [
        (variant, f"{greedy['acc_len']:.2f}", f"{sampled['acc_len']:.2f}", positions(greedy["accepted_given_before"]))
        for variant, (greedy, sampled) in figures.items()
    ]
    return f"After {steps} training steps each, but for the draft that ships:\n\n{evaluate.table(header, rows)}"


def positions(rates: list[float | None]) -> str:
    return " ".join(evaluate.NOTHING if rate is None else f"{rate:.2f}" for rate in rates)


if __name__ == "__main__":
    main()
