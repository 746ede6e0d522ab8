"""Measure how much faster a target writes with a DSpark draft, and where the time goes.

    python scripts/benchmark.py

All in one run: plain greedy decoding and speculative decoding take turns, prompt by prompt, and every figure is the
median over repeats, with the lowest and the highest beside it.

- speed-up: tokens/s over tokens/s of plain decoding, whole calls, prefill included. Plain decoding is a bare loop over
  the target's forward, the fastest there is; `generate` is transformers' own, which most people call;
- outside: share of a call's wall time in neither a forward of the target nor one of the draft, rollback included;
- rollback: share of a call's wall time spent on taking rejected tokens out of the target's state;
- ideal: acc_len x t(1-wide) / (t(8-wide) + t(draft)), what the forwards alone would allow, and how much of it the
  tokens after the first reach.

Shares come from runs of their own, in which the calls are timed. Without arguments the pair in `examples/` is measured,
and then a Qwen3 toy beside transformers' prompt lookup (the first time the toy is made, which takes some minutes).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

import torch
import transformers
from common import (
    HELD_OUT_PROMPTS,
    TINY_TARGET,
    encode_prompt,
    forward_on,
    is_tiny,
    load_draft,
    load_target,
    plain_greedy,
    read_prompts,
    root_module,
    stop_ids,
)
from evaluate import acceptance_length
from tqdm import tqdm

LOOKUP_TOKENS = 10  # what transformers' documentation suggests for prompt lookup


def parse_arguments() -> argparse.Namespace:
    return parse_timing_arguments(__doc__, "take the first so many prompts", limit=10)


def parse_timing_arguments(
    description: str, limit_help: str, limit: int, most: int = 1, fewest: int = 0
) -> argparse.Namespace:
    """The arguments of a script that times a pair on prompts, with `texts`: the first `most` x `--limit` of them, and
    no fewer than `fewest` x `--limit`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TINY_TARGET, help="folder or Hub id (default: the tiny Kimi K3)")
    parser.add_argument("--draft", help="DSpark draft, a folder or a Hub id (default: the one in examples/)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", default=HELD_OUT_PROMPTS, help="JSONL file whose lines hold `turns`"
    )
    parser.add_argument("--limit", type=int, default=limit, help=f"{limit_help} (default: {limit})")
    parser.add_argument("--repeats", type=int, default=5, help="how often everything is measured (default: 5)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to write at most (default: 128)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    arguments = parser.parse_args()
    for name, least in (("limit", 1), ("repeats", 1), ("max_new_tokens", 16)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, expected at least {least}")
    if not is_tiny(arguments.target) and arguments.draft is None:
        parser.error("--target is given without --draft: a draft belongs to its target, name both")
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
        parser.error(f"--json is {arguments.json}, expected a file in a folder that exists")
    try:
        texts = [question["turns"][0] for question in read_prompts(arguments.prompts)]
    except (OSError, ValueError) as error:
        parser.error(f"--prompts: {error}")
    needed = max(1, fewest * arguments.limit)
    if len(texts) < needed:
        parser.error(f"--prompts {arguments.prompts} holds {len(texts)} questions, expected {needed} or more")
    arguments.texts = texts[: most * arguments.limit]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    figures = {"machine": machine(), "settings": settings(arguments)}
    print(describe(figures["machine"]))
    figures["pair"] = measure_pair(arguments.target, arguments.draft, arguments)
    print(report(f"\n{Path(arguments.target).name}", figures["pair"]))
    if is_tiny(arguments.target):
        from qwen3_toy import make_pair  # here, because the script can measure any pair without what training needs

        figures["qwen3"] = measure_pair(*make_pair(), arguments, lookup=True)
        print(report("\nQwen3 toy", figures["qwen3"]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def machine() -> dict:
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe(found: dict) -> str:
    where = found["gpu"] or f"{found['processor']}, {found['cores']} cores, {found['threads']} threads"
    return f"{where}; torch {found['torch']}, transformers {found['transformers']}"


def settings(arguments: argparse.Namespace) -> dict:
    return {
        "prompts": len(arguments.texts),
        "repeats": arguments.repeats,
        "max_new_tokens": arguments.max_new_tokens,
    }


# Measuring


def measure_pair(target_path, draft_path, arguments: argparse.Namespace, lookup: bool = False) -> dict:
    """All figures of one pair; with `lookup` also those of transformers' prompt lookup on the same target."""
    target, tokenizer = load_target(target_path)
    draft = load_draft(draft_path, target)
    prompts = [encode_prompt(tokenizer, text).to(target.device) for text in arguments.texts]
    return measure(target, draft, prompts, arguments.max_new_tokens, arguments.repeats, lookup)


@torch.inference_mode()  # makes plain and speculative decoding faster alike, by a tenth for the tiny pair
def measure(target, draft, prompts: list[torch.Tensor], length: int, count: int, lookup: bool) -> dict:
    """The figures of `count` repeats over `prompts` `[1, P]`, with up to `length` new tokens each."""
    decode = make_ways(target, draft, lookup)
    texts = {name: [way(prompt, length) for prompt in prompts] for name, way in decode.items()}  # also warms up
    if all(text.shape[1] <= prompt.shape[1] + 1 for text, prompt in zip(texts["plain"], prompts)):
        raise SystemExit(
            "The target ends every text with its first token, so there is nothing to measure: see --prompts."
        )
    followed = [plain_greedy(target, prompt, length) for prompt in prompts]  # stop tokens do not shorten these
    acc_len = pooled_acc_len(draft, target, prompts, length)
    repeats = []
    for _ in tqdm(range(count), unit="repeat", file=sys.stderr):
        seconds = time_ways(decode, prompts, length)
        shares = measure_shares(target, draft, prompts, length)
        forwards = time_forwards(target, draft, prompts, followed, round(acc_len))
        repeats.append(figures_of_repeat(seconds, shares, forwards, texts, prompts, acc_len))
    return {
        "acc_len": acc_len,
        "same_tokens_as_plain": {
            name: sum(same_text(mine, plain) for mine, plain in zip(written, texts["plain"]))
            for name, written in texts.items()
            if name != "plain"
        },
        "figures": {name: spread([repeat[name] for repeat in repeats]) for name in repeats[0]},
    }


def same_text(mine: torch.Tensor, plain: torch.Tensor) -> bool:
    """Whether a way wrote what plain decoding wrote; transformers 4.57's prompt lookup writes past its budget."""
    return torch.equal(mine[:, : plain.shape[1]], plain)


def pooled_acc_len(draft, target, prompts: list[torch.Tensor], length: int) -> float:
    """Mean of accepted draft tokens + 1 over all rounds of all prompts: every round takes the same time."""
    outputs = [write(draft, target, prompt, length, return_dict_in_generate=True) for prompt in prompts]
    rounds = sum(output.acceptance_histogram[0] for output in outputs).tolist()
    return acceptance_length(rounds)


def make_ways(target, draft, lookup: bool) -> dict[str, Callable]:
    """The ways to continue a prompt greedily that are compared: functions of prompt `[1, P]` and token budget."""
    ends = stop_ids(target)
    ways = {
        "plain": lambda prompt, length: plain_greedy(target, prompt, length, ends),
        "speculative": lambda prompt, length: write(draft, target, prompt, length),
    }
    own = {"generate": {}, "prompt_lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS}}
    for name, options in own.items():
        if hasattr(target, "generate") and (name == "generate" or lookup):
            ways[name] = lambda prompt, length, options=options: target.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False, **options
            )
    return ways


def write(draft, target, prompt: torch.Tensor, length: int, **options):
    """Speculative greedy decoding of up to `length` tokens."""
    return draft.generate(prompt, target=target, max_new_tokens=length, do_sample=False, **options)


def time_ways(decode: dict[str, Callable], prompts: list[torch.Tensor], length: int) -> dict[str, dict[str, float]]:
    """Seconds over all prompts of each way's `call` and of the `first` token alone; the ways take turns."""
    seconds = {name: Counter() for name in decode}
    for number, prompt in enumerate(prompts):
        names = list(decode)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for part, budget in (("first", 1), ("call", length)):
                start = now(prompt.device)
                decode[name](prompt, budget)
                seconds[name][part] += now(prompt.device) - start
    return seconds


def measure_shares(target, draft, prompts: list[torch.Tensor], length: int) -> dict[str, float]:
    """Shares of the wall time of speculative decoding: target forwards, draft forwards, rollback, and the rest."""
    verifiable = root_module(type(draft), "target_kimi_k3").VerifiableTarget
    places = [
        (target, "forward", "target"),
        (draft, "draft_block", "draft"),
        (draft, "write_context", "draft"),
        (verifiable, "commit", "rollback"),
    ]
    with timing(places, target.device) as seconds:
        start = now(target.device)
        for prompt in prompts:
            write(draft, target, prompt, length)
        total = now(target.device) - start
    shares = {label: seconds[label] / total for label in ("target", "draft", "rollback")}
    return {**shares, "outside": 1 - shares["target"] - shares["draft"]}


@contextmanager
def timing(places: list[tuple], device: torch.device):
    """Inside, calls of each `(owner, attribute, label)` add their seconds to the yielded counter, under the label."""
    seconds: Counter = Counter()

    def timed(call: Callable, label: str) -> Callable:
        @wraps(call)  # keeps the signature, which is looked at
        def run(*args, **kwargs):
            start = now(device)
            try:
                return call(*args, **kwargs)
            finally:
                seconds[label] += now(device) - start

        return run

    own = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
    try:
        for owner, name, label in places:
            setattr(owner, name, timed(getattr(owner, name), label))
        yield seconds
    finally:
        for owner, name, attribute in own:
            delattr(owner, name) if attribute is None else setattr(owner, name, attribute)


@torch.inference_mode()
def time_forwards(target, draft, prompts: list, texts: list, kept: int) -> dict[str, float]:
    """Mean seconds of a 1-wide and an 8-wide cached forward, and of a draft block with writing `kept` positions.

    The widths follow the target's own text. As in decoding, 1-wide forwards follow each other, and 8-wide forwards and
    the draft's take turns: what one leaves in the processor's caches is what the next one finds there.
    """
    width = draft.config.block_size + 1
    times: dict[str, list[float]] = {"1-wide": [], "8-wide": [], "draft": []}
    for prompt, text in zip(prompts, texts):
        steps = (text.shape[1] - prompt.shape[1]) // width
        step_once(target, text, prompt.shape[1], 1, steps * width, times["1-wide"])
        drafting = make_drafting(target, draft, prompt, kept)
        step_once(target, text, prompt.shape[1], width, steps, times["8-wide"], drafting, times["draft"])
    return {name: statistics.fmean(seconds) for name, seconds in times.items()}


def step_once(target, text, start: int, width: int, steps: int, times: list, between=None, between_times=None) -> None:
    """`steps` cached forwards of `width` tokens of `text` `[1, n]` from `start` on, timed; `between` after each."""
    output = target(input_ids=text[:, :start], attention_mask=torch.ones_like(text[:, :start]), use_cache=True)
    for place in range(start, start + steps * width, width):
        ids = text[:, place : place + width]
        begun = now(text.device)
        output = forward_on(target, output, ids, place + width)
        times.append(now(text.device) - begun)
        if between is not None:
            begun = now(text.device)
            between()
            between_times.append(now(text.device) - begun)


def make_drafting(target, draft, prompt: torch.Tensor, kept: int) -> Callable:
    """One round's work of the draft, to be called again and again: a block, and the context of `kept` positions."""
    verifiable_class = root_module(type(draft), "target_kimi_k3").VerifiableTarget
    with verifiable_class(target, draft.config.target_layer_ids) as verifiable:
        features = verifiable.prefill(prompt).features
    cache = draft.new_cache()
    draft.write_context(features, torch.arange(prompt.shape[1], device=draft.device)[None], cache)
    anchor = prompt[:, -1]

    def work():
        draft.draft_block(anchor, cache, verifiable)
        positions = torch.arange(cache.length, cache.length + kept, device=draft.device)[None]
        draft.write_context(features[:, :1].expand(-1, kept, -1), positions, cache)

    return work


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# Figures


def figures_of_repeat(seconds: dict, shares: dict, forwards: dict, texts: dict, prompts: list, acc_len: float) -> dict:
    """One repeat's figures, by the names they are reported under."""
    new_tokens = {
        name: sum(text.shape[1] - prompt.shape[1] for text, prompt in zip(written, prompts))
        for name, written in texts.items()
    }
    rates = {name: new_tokens[name] / part["call"] for name, part in seconds.items()}
    later = {name: (new_tokens[name] - len(prompts)) / (part["call"] - part["first"]) for name, part in seconds.items()}
    ideal = acc_len * forwards["1-wide"] / (forwards["8-wide"] + forwards["draft"])
    speed_up = {f"speed-up of {name}": rates[name] / rates["plain"] for name in rates if name != "plain"}
    if "generate" in rates:
        speed_up["speed-up over generate"] = rates["speculative"] / rates["generate"]
    return {
        **{f"tokens/s {name}": rate for name, rate in rates.items()},
        **speed_up,
        "speed-up after the first token": later["speculative"] / later["plain"],
        **{f"t({name}), ms": 1e3 * value for name, value in forwards.items()},
        "ideal speed-up": ideal,
        "share of the ideal reached": later["speculative"] / later["plain"] / ideal,
        **{f"share of wall time: {name}": share for name, share in shares.items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def report(title: str, figures: dict) -> str:
    """A Markdown table of one pair's figures."""
    lines = [f"{title}: acc_len {figures['acc_len']:.2f}", "", "| | median | lowest | highest |", "|---|--:|--:|--:|"]
    for name, values in figures["figures"].items():
        share = name.startswith("share")
        cells = [f"{100 * value:.1f} %" if share else f"{value:.2f}" for value in values.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, same in figures["same_tokens_as_plain"].items():
        lines.append(f"\nPrompts on which {name} wrote the same tokens as plain decoding: {same}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
