"""Measure what a long context costs: memory of the prefill, the draft's cache, and a round of the loop.

    python scripts/measure_long_context.py

- prefill: peak memory of processing prompts of 4K to 256K tokens beyond what is held afterwards, in pieces of several
  sizes and in one piece, each in a fresh process;
- append: time to write 8 tokens of context at 1K, 64K and 1M tokens, in place and at a growth of the buffers;
- loop: what a round spends outside the forwards of target and draft, at batch 1 and 8 and at 1K and 64K tokens.

The target is a small random Qwen3 whose attention is a running mean: full attention's own mask, `[piece, context]`,
would hide what the loop needs. With `--full-size`, a draft of the published size with random weights in bfloat16 is
timed instead, at 1K, 16K and 64K tokens, beside reading its weights and its context once (9 GB of memory).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from benchmark import describe, machine, now, timing
from common import ROOT, TINY_DRAFT, check_matplotlib, root_class, root_module
from measure_memory import ALLOCATOR, peak_memory
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

ATTENTION = "running-mean"
POSITIONS = 2**20
ONE_PIECE = 0
ONE_PIECE_LIMIT = 65536  # beyond, one piece takes gigabytes even of so small a model
CPU = torch.device("cpu")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    sizes = {"type": int, "nargs": "+", "metavar": "N"}
    add("--prompts", **sizes, default=[4096, 16384, 65536, 262144], help="tokens of the prompts")
    add("--pieces", **sizes, default=[4096, 16384, ONE_PIECE], help="tokens a piece; 0: all at once, up to 64K")
    add("--contexts", **sizes, default=[1024, 65536, POSITIONS - 4096], help="tokens of context to append to")
    add("--loop-contexts", **sizes, default=[1024, 65536], help="tokens of context for the loop")
    add("--batches", **sizes, default=[1, 8], help="rows for the loop")
    add("--full-size", action="store_true", help="time a draft of the published size instead")
    add("--full-contexts", **sizes, default=[1024, 16384, 65536], help="tokens of its context")
    add("--plot", type=Path, metavar="FILE", help="draw the memory of the prefill (PNG)")
    add("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    add("--one", type=int, nargs=2, metavar=("PROMPT", "PIECE"), help=argparse.SUPPRESS)  # what fresh processes run
    arguments = parser.parse_args()
    lists = (name for name in ("prompts", "contexts", "loop_contexts", "batches", "full_contexts"))
    wrong = [name for name in lists if min(getattr(arguments, name)) < 1 or max(getattr(arguments, name)) > POSITIONS]
    if wrong:
        parser.error(f"--{wrong[0].replace('_', '-')} {getattr(arguments, wrong[0])}: expected 1 to {POSITIONS}")
    if min(arguments.pieces) < 0:
        parser.error(f"--pieces {arguments.pieces}: expected 1 or more, or 0 for one piece")
    if arguments.plot is not None:
        check_matplotlib()
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.one is not None:
        print(json.dumps(prefill_memory(*arguments.one)))
        return
    figures = {"machine": machine()}
    print(describe(figures["machine"]))
    if arguments.full_size:
        figures["full_size"] = time_full_size(arguments.full_contexts)
        report("A draft of the published size, random weights, bfloat16", figures["full_size"])
    else:
        figures["prefill"] = measure_prefill(arguments.prompts, arguments.pieces)
        report("Prefill: memory beyond what is held afterwards, MiB", figures["prefill"])
        figures["append"] = time_appends(arguments.contexts)
        report("Writing 8 tokens of context", figures["append"])
        figures["loop"] = [time_loop(batch, size) for batch in arguments.batches for size in arguments.loop_contexts]
        report("A round of the loop, ms", figures["loop"])
        if arguments.plot is not None:
            draw(figures["prefill"], arguments.plot)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def report(title: str, rows: list[dict]) -> None:
    """Print rows as a Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(rows[0])} |\n|{'--:|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(cell, row.values()))} |", flush=True)


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


# The models


def running_mean(module, query, key, value, attention_mask, scaling, **options):
    """Attention with all scores equal: each query gets the mean of the values up to its own. It costs no more than a
    pass over them, in time and in memory, and is exact however a prompt is cut."""
    width, length = query.shape[2], key.shape[2]
    before = value[:, :, : length - width].sum(dim=2, keepdim=True)
    counts = torch.arange(length - width + 1, length + 1, device=value.device)[:, None]
    mean = (before + value[:, :, length - width :].cumsum(dim=2)) / counts
    return mean.repeat_interleave(module.num_key_value_groups, dim=1).transpose(1, 2), None


def make_pair():
    """A small random target, whose activations take far more than what it keeps of a token, and a draft for it."""
    AttentionInterface.register(ATTENTION, running_mean)
    AttentionMaskInterface.register(ATTENTION, lambda *arguments, **options: None)
    torch.manual_seed(0)
    shape = dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=2,
    )
    config = Qwen3Config(num_hidden_layers=3, **shape)
    config._attn_implementation = ATTENTION
    target = Qwen3ForCausalLM(config).eval()
    return target, make_draft(**dict(shape, num_hidden_layers=1), num_target_layers=3, taps=[0, 1, 2])


def make_draft(taps: list[int], **shape):
    """A random draft of this shape, with the tiny draft's configuration for the rest."""
    config = json.loads((TINY_DRAFT / "config.json").read_text("utf-8"))
    config |= dict(shape, layer_types=["full_attention"] * shape["num_hidden_layers"], markov_rank=16)
    nested = {"attention_mode": "mha", "target_layer_ids": taps, "mask_token_id": 3, "markov_rank": 16}
    config["dflash_config"] |= nested
    draft_class = root_class()
    return draft_class(draft_class.config_class(**config)).eval()


# Prefill


def measure_prefill(prompts: list[int], pieces: list[int]) -> list[dict]:
    """A row for each prompt, with the peak of each size of pieces; None where one piece is left out."""
    rows = []
    for prompt in prompts:
        row = {"prompt": prompt}
        for piece in pieces:
            name = "one piece" if piece == ONE_PIECE else f"pieces of {piece:,}"
            left_out = piece == ONE_PIECE and prompt > ONE_PIECE_LIMIT
            row[name] = None if left_out else run_one(prompt, piece or prompt)
        rows.append(row)
    return rows


def run_one(prompt: int, piece: int) -> float:
    command = [sys.executable, __file__, "--one", str(prompt), str(piece)]
    environment = os.environ | ALLOCATOR
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def prefill_memory(prompt: int, piece: int) -> float:
    """MiB by which a prefill raises this process' peak over what it held before and what is held of the prompt after
    it."""
    target, draft = make_pair()
    options = dict(target=target, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    draft.generate(torch.randint(4, 512, (1, 64)), prefill_chunk_size=32, **options)  # what comes once
    ids = torch.randint(4, 512, (1, prompt))
    before = peak_memory()
    past = draft.generate(ids, prefill_chunk_size=piece, **options).cache
    held = [past.memory.slots.mask, *past.context.keys, *past.context.values, *past.memory.state.tensors()]
    return peak_memory() - before - sum(tensor.nbytes for tensor in held) / 2**20


# The draft's cache


@torch.inference_mode()
def time_appends(contexts: list[int], width: int = 8, repeats: int = 100) -> list[dict]:
    """A row for each context: microseconds of writing `width` tokens behind it; the contexts take turns."""
    _, draft = make_pair()
    features, caches = torch.randn(1, width, draft.fc.in_features), []
    for context in contexts:
        cache = draft.new_cache()
        cache.reserve(context + (repeats + 1) * width)
        chunk = torch.randn(1, 4096, draft.fc.in_features)
        for start in range(0, context, 4096):
            piece = chunk[:, : context - start]
            draft.write_context(piece, torch.arange(start, start + piece.shape[1])[None], cache)
        caches.append(cache)
    times: list[list[float]] = [[] for _ in caches]
    for _ in range(repeats + 1):
        for cache, seconds in zip(caches, times):
            positions = torch.arange(cache.length, cache.length + width)[None]
            start = time.perf_counter()
            draft.write_context(features, positions, cache)
            seconds.append(time.perf_counter() - start)
    quartiles = [statistics.quantiles(seconds[1:], n=4) for seconds in times]
    names = ("quarter", "median", "three quarters")
    return [
        {"context": context, **{f"{name}, us": 1e6 * value for name, value in zip(names, values)}}
        for context, values in zip(contexts, quartiles)
    ]


# The loop


def time_loop(batch: int, context: int, new_tokens: int = 32) -> dict:
    """Milliseconds a round of target, draft, and the rest, in a further turn on `context` tokens: without a prefill."""
    target, draft = make_pair()
    verifiable = root_module(type(draft), "target_kimi_k3").VerifiableTarget
    options = dict(target=target, do_sample=False, return_dict_in_generate=True)
    ids = torch.randint(4, 512, (batch, context))
    output = draft.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **options)
    ids = torch.cat([output.sequences, ids[:, :1]], dim=1)
    places = [
        (target, "forward", "target"),
        (draft, "draft_block", "draft"),
        (draft, "write_context", "draft"),
        (verifiable, "commit", "rollback"),
    ]
    with timing(places, CPU) as seconds:
        start = now(CPU)
        output = draft.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=output.cache,
            max_new_tokens=new_tokens,
            **options,
        )
        total = now(CPU) - start
    outside, rounds = total - seconds["target"] - seconds["draft"], output.num_target_forwards
    parts = {"target": seconds["target"], "draft": seconds["draft"], "outside": outside}
    return {
        "batch": batch,
        "context": context,
        **{name: 1e3 * value / rounds for name, value in parts.items()},
        "of which rollback": 1e3 * seconds["rollback"] / rounds,
        "outside, %": 100 * outside / total,
    }


# The published size


@torch.inference_mode()
def time_full_size(contexts: list[int], repeats: int = 3) -> list[dict]:
    """A row for each context: seconds a block, and of reading weights, head and context once at this machine's
    bandwidth."""
    bandwidth = memory_bandwidth()
    draft, target = make_full_size()
    cache = draft.new_cache()
    weights = sum(weight.nbytes for weight in draft.parameters() if weight is not draft.fc.weight)
    weights += target.lm_head.weight.nbytes + 6 * draft.markov_head.markov_w2.weight.nbytes  # read for each token
    weights -= draft.markov_head.markov_w1.weight.nbytes  # seven rows of it
    rows = []
    for context in sorted(contexts):
        fill(cache, context)
        draft.draft_block(torch.tensor([5]), cache, target)
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            draft.draft_block(torch.tensor([5]), cache, target)
            seconds.append(time.perf_counter() - start)
        held = sum(2 * buffer[:, :, :context].nbytes for buffer in cache.keys)
        block, reading = statistics.median(seconds), (weights + held) / bandwidth
        rows.append(
            {
                "context": context,
                "context, MB": held / 1e6,
                "block, s": block,
                "reading once, s": reading,
                "block / reading": block / reading,
                "bandwidth, GB/s": bandwidth / 1e9,
                "peak memory, GB": peak_memory() * 2**20 / 1e9,
            }
        )
    return rows


def memory_bandwidth() -> float:
    """Bytes a second at which a product with one vector reads a matrix larger than any cache."""
    matrix, vector, seconds = torch.ones(14336, 7168), torch.ones(7168), []
    for _ in range(10):
        start = time.perf_counter()
        torch.mv(matrix, vector)
        seconds.append(time.perf_counter() - start)
    return matrix.nbytes / min(seconds)


def make_full_size():
    """A draft as published and the head it borrows, all weights random: repeats of a short noise, which is quick."""
    draft_class = root_class()
    config = draft_class.config_class.from_pretrained(ROOT)
    with torch.device("meta"):
        draft = draft_class(config)
        target = Qwen3ForCausalLM(  # one thin layer under the embedding, which serves as the head too
            Qwen3Config(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                tie_word_embeddings=True,
            )
        )
    noise = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    for model in (draft.to(torch.bfloat16), target.to(torch.bfloat16)):
        model.to_empty(device="cpu")
        model.tie_weights()
        for weight in model.parameters():
            flat = weight.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                flat[start : start + noise.numel()] = noise[: flat.numel() - start]
    return draft.eval(), target.eval()


def fill(cache, context: int) -> None:
    """Bring the cache to `context` positions of random keys and values."""
    width = context - cache.length
    cache.reserve(width + 7)
    shape = (1, cache.keys[0].shape[1], width, cache.keys[0].shape[3])
    for layer in range(len(cache.keys)):
        cache.place(layer, torch.randn(shape), torch.randn(shape))
    cache.keep([width], cache.next_position)


def draw(rows: list[dict], path: Path) -> None:
    """Peak memory over the length of the prompt, a line for each size of pieces."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name in list(rows[0])[1:]:
        known = [row for row in rows if row[name] is not None]
        axes.plot([row["prompt"] for row in known], [row[name] for row in known], marker="o", label=name)
    axes.set(xscale="log", ylim=(0, None), xlabel="tokens of the prompt", ylabel="MiB beyond what is held afterwards")
    axes.set_xticks([row["prompt"] for row in rows], [f"{row['prompt'] // 1024}K" for row in rows], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
