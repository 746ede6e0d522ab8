"""Calibrate a DSpark draft's confidence head by Sequential Temperature Scaling (arXiv 2607.05147, section 3.2).

    python scripts/calibrate.py

The confidence of draft token j estimates P(accepted | all before it accepted). The product of the first j confidences
is the survival of a prefix, by which `verify_width="auto"` chooses how many draft tokens to verify. Each position gets
a temperature that its logit is divided by. They are chosen from left to right, each as the one that makes the expected
calibration error of the product up to there lowest, with the positions before it as they are.

Rounds are verified at full width. Whether token j was accepted is known only if all before it were; that the first j
were all accepted, which is what their product estimates, is known of every round. So every round counts at every
position, as verification judged it.

The questions are dealt out alternately: the temperatures are fitted to one half, and the errors of the other half are
reported, before and after. `--save` writes them into the draft's config.json, as `confidence_temperatures`. Acceptance
differs between greedy decoding and sampling, and so do the temperatures: fit them at the temperature you decode at.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from common import (
    HELD_OUT_PROMPTS,
    TINY_DRAFT,
    TINY_TARGET,
    encode_prompt,
    is_tiny,
    load_draft,
    load_target,
    read_prompts,
    root_module,
)
from evaluate import BINS, derived_seed, table
from tqdm import tqdm

# What is tried for each position: 1 first, so that it stays where nothing else is better.
TEMPERATURES = sorted((2.0 ** (step / 20) for step in range(-60, 61)), key=lambda value: abs(math.log(value)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TINY_TARGET, help="folder or Hub id (default: the tiny Kimi K3)")
    parser.add_argument("--draft", help="DSpark draft, a folder or a Hub id (default: the one in examples/)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", default=HELD_OUT_PROMPTS, help="JSONL file whose lines hold `turns`"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N questions only")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to write at most (default: 128)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 for greedy decoding (default), else sampling at it"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--save", action="store_true", help="write the temperatures into the draft's config.json")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    arguments = parser.parse_args()
    check_options(parser, arguments)
    try:
        arguments.texts = [question["turns"][0] for question in read_prompts(arguments.prompts)][: arguments.limit]
    except (OSError, ValueError) as error:
        parser.error(f"--prompts: {error}")
    if len(arguments.texts) < 2:
        parser.error(f"{len(arguments.texts)} question of --prompts {arguments.prompts}, expected 2: fit and test")
    return arguments


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a message about the first option whose value cannot be right."""
    if not (arguments.temperature >= 0 and math.isfinite(arguments.temperature)):
        parser.error(f"--temperature is {arguments.temperature}, expected 0 (greedy) or more")
    for name, least in (("limit", 2), ("max_new_tokens", 2)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}, expected at least {least}")
    if not is_tiny(arguments.target) and arguments.draft is None:
        parser.error("--target is given without --draft: a draft belongs to its target, name both")
    if arguments.save and not config_file(arguments).is_file():
        parser.error(f"--save writes to {config_file(arguments)}, which is no file: --draft must be a local folder")
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
        parser.error(f"--json is {arguments.json}, expected a file in a folder that exists")


def config_file(arguments: argparse.Namespace) -> Path:
    return Path(arguments.draft or TINY_DRAFT) / "config.json"


def main() -> None:
    arguments = parse_arguments()
    target, tokenizer = load_target(arguments.target)
    draft = load_draft(arguments.draft, target)
    if draft.confidence_head is None:
        raise SystemExit("The draft has no confidence head (`enable_confidence_head` is False): nothing to calibrate.")
    prompts = [encode_prompt(tokenizer, text) for text in arguments.texts]
    halves = [collect(draft, target, prompts[start::2], arguments, start) for start in (0, 1)]
    if min(len(accepted) for _, accepted in halves) == 0:
        raise SystemExit("One half of the questions has no verify round: see --prompts and --max-new-tokens.")
    figures = calibrate(*halves)
    print(report(figures))
    if arguments.save:
        save(draft, config_file(arguments), figures["temperatures"])
        print(f"\nSaved in {config_file(arguments)}.")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def collect(draft, target, prompts: list, arguments: argparse.Namespace, half: int) -> tuple:
    """The rounds of all prompts `[1, P]`: confidence logits `[rounds, K]` and accepted draft tokens `[rounds]`."""
    torch.manual_seed(derived_seed(arguments.seed, half))
    sampling = {"do_sample": arguments.temperature > 0}
    if arguments.temperature > 0:  # transformers' own default is the 50 likeliest tokens
        sampling |= {"temperature": arguments.temperature, "top_k": 0, "top_p": 1.0}
    options = {"return_dict_in_generate": True, "output_rounds": True, "max_new_tokens": arguments.max_new_tokens}
    rounds = []
    for prompt in tqdm(prompts, unit="question", desc=("fit", "test")[half], file=sys.stderr):
        prompt = prompt.to(target.device)
        mask = torch.ones_like(prompt)
        rounds += draft.generate(prompt, target=target, attention_mask=mask, **options, **sampling).rounds
    logits = [step.confidence.cpu() for step in rounds] or [torch.zeros(0, draft.config.block_size)]
    return torch.cat(logits), torch.tensor([step.accepted for step in rounds])


# The fit


def calibrate(fit: tuple, test: tuple) -> dict:
    """Temperatures fitted to the rounds `fit`, and the calibration of the rounds `test` without and with them; both
    are logits `[rounds, K]` and accepted draft tokens `[rounds]`."""
    temperatures = fit_temperatures(*fit)
    plain = [1.0] * len(temperatures)
    before, after = calibration_errors(*test, plain), calibration_errors(*test, temperatures)
    return {
        "rounds": {"fit": len(fit[1]), "test": len(test[1])},
        "temperatures": temperatures,
        "expected_calibration_error": {
            "before": sum(before) / len(before),
            "after": sum(after) / len(after),
            "fit, before": sum(calibration_errors(*fit, plain)) / len(before),
            "fit, after": sum(calibration_errors(*fit, temperatures)) / len(before),
        },
        "by_position": [
            {"position": place + 1, "temperature": temperature, "before": old, "after": new, "survived": survived}
            for place, (temperature, old, new, survived) in enumerate(
                zip(temperatures, before, after, (labels(test[1], len(plain)).mean(dim=0)).tolist(), strict=True)
            )
        ],
    }


def fit_temperatures(logits: torch.Tensor, accepted: torch.Tensor) -> list[float]:
    """Sequential Temperature Scaling: a temperature for each position of `[rounds, K]`."""
    survived = labels(accepted, logits.shape[1])
    product, temperatures = torch.ones(len(logits), dtype=torch.float64), []
    for place in range(logits.shape[1]):
        products = [product * (logits[:, place].double() / value).sigmoid() for value in TEMPERATURES]
        errors = [calibration_error(estimate, survived[:, place]) for estimate in products]
        best = errors.index(min(errors))
        product = products[best]
        temperatures.append(round(TEMPERATURES[best], 4))
    return temperatures


def calibration_errors(logits: torch.Tensor, accepted: torch.Tensor, temperatures: list[float]) -> list[float]:
    """The expected calibration error of the survival of each position."""
    survival = (logits.double() / torch.tensor(temperatures)).sigmoid().cumprod(dim=1)
    survived = labels(accepted, logits.shape[1])
    return [calibration_error(*pair) for pair in zip(survival.unbind(1), survived.unbind(1))]


def labels(accepted: torch.Tensor, block_size: int) -> torch.Tensor:
    """Whether the first 1, 2, ... K draft tokens of each round were all accepted, `[rounds, K]`."""
    return (accepted[:, None] > torch.arange(block_size)).double()


def calibration_error(probabilities: torch.Tensor, outcomes: torch.Tensor) -> float:
    """Expected calibration error of `[rounds]` each: the sum over equally wide bins of their share of the rounds times
    |mean probability - share of true outcomes|."""
    bins = (probabilities * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, probabilities - outcomes)
    return float(gaps.abs().sum() / len(outcomes))


def save(draft, path: Path, temperatures: list[float]) -> None:
    """Write the temperatures into a config.json, all else as it was."""
    fields = {**json.loads(path.read_text("utf-8")), "confidence_temperatures": temperatures}
    root_module(type(draft), "configuration_dspark").DSparkConfig.from_dict(fields)  # checks them
    path.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def report(figures: dict) -> str:
    error, rounds = figures["expected_calibration_error"], figures["rounds"]
    rows = [
        (f"{row['position']}", *(f"{row[name]:.4f}" for name in ("survived", "temperature", "before", "after")))
        for row in figures["by_position"]
    ]
    return "\n\n".join(
        [
            f"Temperatures fitted to {rounds['fit']:,} rounds; expected calibration error of the survival over "
            f"{rounds['test']:,} other rounds ({BINS} bins)",
            table(("Position", "Survived", "Temperature", "ECE before", "ECE after"), rows),
            f"Mean of the positions: {error['before']:.4f} before, {error['after']:.4f} after (on the rounds they were "
            f"fitted to: {error['fit, before']:.4f} and {error['fit, after']:.4f}).",
        ]
    )


if __name__ == "__main__":
    main()
