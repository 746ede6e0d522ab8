"""Measure the peak memory of one training step, with anchors in chunks and in the naive way, each in a fresh process.

The naive way makes the target's logits of every position, `[S, V]`, and both models' logits of every row of every
block, `[A, K, V]`, at once. The models are small and random, the vocabulary is not: that is what the memory goes into.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
from common import TINY_DRAFT, root_class, root_module
from distillation import Distillation, sample_anchors, supervised_rows
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY, HIDDEN, LAYERS = 32768, 64, 4
# glibc gives large tensors back to the system when they are freed, so that the peak is that of live ones.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
NAIVE = 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=int, default=256, help="anchors in the text (default: 256)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the text (default: 1024)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32], help="anchors a chunk (default: 8 32)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    parser.add_argument("--one", type=int, metavar="CHUNK", help=argparse.SUPPRESS)  # what the fresh processes run
    arguments = parser.parse_args()
    if min(arguments.anchors, *arguments.chunks) < 1 or arguments.length < arguments.anchors + 2:
        parser.error(
            f"--anchors {arguments.anchors}, --chunks {arguments.chunks}, --length {arguments.length}: expected "
            "1 anchor or more, 1 or more a chunk, and a text longer than its anchors by 2"
        )
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.one is not None:
        print(json.dumps(step_memory(arguments.one, arguments.anchors, arguments.length)))
        return
    figures = {}
    for chunk in (NAIVE, *arguments.chunks):
        options = ["--one", chunk, "--anchors", arguments.anchors, "--length", arguments.length]
        command = [sys.executable, __file__, *map(str, options)]
        output = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | ALLOCATOR
        ).stdout
        figures["naive" if chunk == NAIVE else f"{chunk} anchors a chunk"] = json.loads(output)
    print(f"One step: {arguments.anchors} anchors in {arguments.length} tokens, vocabulary {VOCABULARY}, float32.\n")
    print("| way | peak memory of the step, MiB |\n|---|--:|")
    for way, mebibytes in figures.items():
        print(f"| {way} | {mebibytes:.0f} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"peak_mebibytes": figures}, indent=2) + "\n", "utf-8")


def step_memory(chunk: int, anchors_wanted: int, length: int) -> float:
    """MiB by which one forward and backward raise this process' peak over what it held before."""
    torch.manual_seed(0)
    target, draft = make_pair()
    ids = torch.randint(0, VOCABULARY, (1, length))
    loss_mask = torch.ones_like(ids, dtype=torch.bool)
    anchors, valid = sample_anchors(loss_mask, anchors_wanted)
    rows = supervised_rows(anchors, valid, loss_mask, draft.config.block_size)
    before = peak_memory()
    trace = target.observe(ids)
    if chunk == NAIVE:
        logits = target.head(trace.hidden)
    Distillation(draft, target, chunk or anchors_wanted)(trace, ids, anchors, rows).loss.backward()
    if chunk == NAIVE:
        del logits  # held through the step, as the naive way does
    return peak_memory() - before


def peak_memory() -> float:
    """MiB this process has held at most so far."""
    status = Path("/proc/self/status")
    if status.exists():  # `ru_maxrss` below would begin with what the process that started this one held
        return (
            int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) / 2**10
        )
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def make_pair():
    shape = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=LAYERS, **shape)).eval()
    config = json.loads((TINY_DRAFT / "config.json").read_text("utf-8"))
    config |= dict(shape, num_hidden_layers=1, layer_types=["full_attention"], num_target_layers=LAYERS, markov_rank=16)
    config["dflash_config"] |= {"target_layer_ids": [0, 1, 2], "mask_token_id": 3, "markov_rank": 16}
    draft_class = root_class()
    draft = draft_class(draft_class.config_class(**config)).train()
    return root_module(draft_class, "target_kimi_k3").VerifiableTarget(model, [0, 1, 2]), draft


if __name__ == "__main__":
    main()
