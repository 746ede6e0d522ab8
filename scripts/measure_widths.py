"""Measure what choosing the verify width is worth: tokens/s at each fixed width and with `verify_width="auto"`.

    python scripts/measure_widths.py

Two kinds of text, so that no fixed width suits both. Three times as many prompts as are used are first answered
greedily, and ranked by the acceptance length at full width:

- easy: those with the highest, decoded greedily (many of these answers end in a loop);
- hard: those with the lowest, sampled at temperature 1.

All in one run: the ways take turns, prompt by prompt, and every figure is the median over repeats, with the lowest and
the highest beside it. Times are of whole calls, prefill included. `both` is all tokens over all seconds: what someone
gets who cannot choose the width to suit the text. "auto" measures what rounds cost in a call of its own before.
"""

import argparse
import json
import statistics
import sys
from collections import Counter

import torch
from benchmark import describe, machine, now, parse_timing_arguments, spread
from common import (
    encode_prompt,
    load_draft,
    load_target,
    root_module,
)
from evaluate import acceptance_length, derived_seed, table
from tqdm import tqdm

KINDS = {"easy": {"do_sample": False}, "hard": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}}
AUTO = "auto"


def main() -> None:
    arguments = parse_timing_arguments(__doc__, "prompts of each kind", limit=6, most=3, fewest=2)
    target, tokenizer = load_target(arguments.target)
    draft = load_draft(arguments.draft, target)
    if draft.confidence_head is None:
        raise SystemExit("The draft has no confidence head (`enable_confidence_head` is False), which 'auto' goes by.")
    prompts = [encode_prompt(tokenizer, text).to(target.device) for text in arguments.texts]
    figures = {"machine": machine(), "settings": {name: getattr(arguments, name) for name in ("limit", "repeats")}}
    figures["settings"]["max_new_tokens"] = arguments.max_new_tokens
    figures |= measure(target, draft, prompts, arguments)
    print(f"{describe(figures['machine'])}\n\n{report(figures)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


# Measuring


@torch.inference_mode()
def measure(target, draft, prompts: list[torch.Tensor], arguments: argparse.Namespace) -> dict:
    """The figures of all ways on easy and hard text, from more prompts `[1, P]` than are used."""
    kinds = choose_texts(target, draft, prompts, arguments)
    ways = [*range(1, draft.config.block_size + 2), AUTO]
    costs = measure_costs(target, draft, [*kinds["hard"], *kinds["easy"]], arguments.max_new_tokens)  # also warms up
    repeats, histograms, widths = [], Counter(), Counter()
    for number in tqdm(range(arguments.repeats), unit="repeat", file=sys.stderr):
        tokens, seconds = Counter(), Counter()
        for kind, chosen in kinds.items():
            for place, prompt in enumerate(chosen):
                first = (place + number) % len(ways)
                for way in ways[first:] + ways[:first]:
                    torch.manual_seed(derived_seed(kind, place, number))
                    begun = now(target.device)
                    output = write(target, draft, prompt, way, arguments.max_new_tokens, KINDS[kind])
                    seconds[kind, way] += now(target.device) - begun
                    tokens[kind, way] += output.sequences.shape[1] - prompt.shape[1]
                    if way == ways[-2]:
                        histograms[kind] += output.acceptance_histogram[0]
                    if way == AUTO:
                        widths.update((kind, step.width) for step in output.rounds)
        repeats.append(rates(tokens, seconds, ways))
    return {"seconds by width": costs, "texts": summarize(repeats, ways, histograms, widths)}


def measure_costs(target, draft, prompts: list[torch.Tensor], length: int) -> list[float]:
    """Seconds of a round by width, from the first rounds of "auto"."""
    measured = root_module(type(draft), "schedule_dspark").measured_costs(draft, target)
    for prompt in prompts * 24:  # each width is measured three times, so one round a prompt would do
        write(target, draft, prompt, AUTO, length, KINDS["hard"])
        if all(costs.next_width() is None for costs in measured.values()):
            return next(iter(measured.values())).by_width()
    raise SystemExit("The answers are too short to measure what rounds of each width take: see --prompts.")


def choose_texts(target, draft, prompts: list[torch.Tensor], arguments: argparse.Namespace) -> dict:
    """The prompts with the highest and those with the lowest acceptance length in greedy decoding."""
    lengths = []
    for prompt in tqdm(prompts, unit="prompt", desc="ranking", file=sys.stderr):
        output = write(target, draft, prompt, draft.config.block_size + 1, arguments.max_new_tokens, KINDS["easy"])
        lengths.append(acceptance_length(output.acceptance_histogram[0].tolist()) or 0.0)
    ranked = [prompts[place] for place in sorted(range(len(prompts)), key=lengths.__getitem__, reverse=True)]
    return {"easy": ranked[: arguments.limit], "hard": ranked[-arguments.limit :]}


def write(target, draft, prompt: torch.Tensor, way: int | str, length: int, sampling: dict):
    """An answer of up to `length` tokens with this verify width."""
    return draft.generate(
        prompt,
        target=target,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=length,
        verify_width=way,
        return_dict_in_generate=True,
        output_rounds=way == AUTO,
        **sampling,
    )


# Figures


def rates(tokens: dict, seconds: dict, ways: list) -> dict:
    """One repeat's tokens/s, by kind of text and way."""
    found = {kind: {way: tokens[kind, way] / seconds[kind, way] for way in ways} for kind in KINDS}
    all_tokens, all_seconds = (
        {way: sum(counts[kind, way] for kind in KINDS) for way in ways} for counts in (tokens, seconds)
    )
    return {**found, "both": {way: all_tokens[way] / all_seconds[way] for way in ways}}


def summarize(repeats: list[dict], ways: list, histograms: dict, widths: Counter) -> dict:
    """Medians and spreads of the repeats, and how auto compares with the fixed width that is best in the median."""
    figures = {}
    for kind in repeats[0]:
        speeds = {way: spread([repeat[kind][way] for repeat in repeats]) for way in ways}
        best = max(ways[:-1], key=lambda way: speeds[way]["median"])
        figures[kind] = {
            "tokens/s": {str(way): speed for way, speed in speeds.items()},
            "best fixed width": best,
            "auto over the best fixed width": spread([repeat[kind][AUTO] / repeat[kind][best] for repeat in repeats]),
            "auto over the full width": spread([repeat[kind][AUTO] / repeat[kind][ways[-2]] for repeat in repeats]),
        }
    for kind in KINDS:
        figures[kind]["accepted + 1 at full width"] = acceptance_length(histograms[kind].tolist())
        chosen = [width for (text, width), count in widths.items() if text == kind for _ in range(count)]
        figures[kind]["mean width of auto"] = statistics.fmean(chosen) if chosen else None
    return figures


def report(figures: dict) -> str:
    texts = figures["texts"]
    rows = [(way, *(shown(texts[kind]["tokens/s"][way], 0) for kind in texts)) for way in texts["both"]["tokens/s"]]
    costs = ", ".join(f"{1e3 * seconds:.1f}" for seconds in figures["seconds by width"])
    lines = [f"Rounds of width 1 to {len(figures['seconds by width'])} take {costs} ms, the draft included."]
    lines += [table(("Verify width", *(f"{kind}, tokens/s" for kind in texts)), rows)]
    for kind, found in texts.items():
        best, full = (shown(found[f"auto over the {name} width"], 2) for name in ("best fixed", "full"))
        line = f"{kind}: auto is {best} times as fast as the best fixed width, {found['best fixed width']}, and {full} "
        line += "times as fast as the full width"
        if kind in KINDS:
            line += f"; accepted drafts + 1 at full width: {found['accepted + 1 at full width'] or 0:.2f}"
            line += f"; mean width of auto: {found['mean width of auto'] or 0:.1f}"
        lines.append(line + ".")
    return "\n\n".join(lines)


def shown(found: dict, digits: int) -> str:
    return f"{found['median']:.{digits}f} ({found['lowest']:.{digits}f}–{found['highest']:.{digits}f})"


if __name__ == "__main__":
    main()
