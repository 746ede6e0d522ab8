"""What Kimi K3 and its draft need in memory, from the shapes in their configurations.

    python scripts/memory_plan.py [--context N ...] [--batch B] [--target-config C] [--gpu-memory GiB] [--json OUT]

Counted is what is held through a generation: weights, the target's recurrent states and keys and values, the draft's
context, and the largest of the tensors that come and go with a round or a piece of the prompt. Activations inside
layers and the allocator's own overhead come on top; leave a tenth of each GPU for them. The draft's buffers grow by
half their size at a time, so they may be half as large again as the keys and values in them.

The target's shapes are those released with Kimi K3, or those of `--target-config`, a config.json of the same family.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from checkpoint_files import build_config, count_parameters, expected_tensors, read_config
from common import ROOT

# The text model as released; the sum is the published 2.78 trillion parameters. Layers are counted from 1, as there.
FULL_ATTENTION = [*range(4, 93, 4), 93]
KIMI_K3 = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "kda_layers": [layer for layer in range(1, 94) if layer not in FULL_ATTENTION],
        "full_attn_layers": FULL_ATTENTION,
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "num_experts": 896,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
}
BF16, FLOAT32 = 2, 4
# MXFP4, in which the routed experts are released: 4 bits a value, and an 8-bit scale for every 32 values.
MXFP4 = (4 + 8 / 32) / 8
VERIFY_WIDTH = 8
PREFILL_CHUNK = 4096  # what the README suggests for long prompts
CONTEXTS = (4096, 65536, 262144, 1048576)
GIB = 2**30
SPARE = 0.1  # of a GPU, for activations and the allocator


def target_parameters(text: dict) -> dict[str, int]:
    """Parameters of the target's text model by part; the vision tower, small beside them, is not counted."""
    hidden, linear = text["hidden_size"], text["linear_attn_config"]
    layers, dense = text["num_hidden_layers"], text["first_k_dense_replace"]
    heads, key = text["num_attention_heads"], text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    query_rank, latent, value = text["q_lora_rank"], text["kv_lora_rank"], heads * text["v_head_dim"]
    width, head_dim = linear["num_heads"] * linear["head_dim"], linear["head_dim"]
    # q, k, v, g and o; convolutions; decay (f_a, f_b, dt_bias, A_log); b; o_norm
    kda = 5 * hidden * width + 3 * width * linear["short_conv_kernel_size"]
    kda += hidden * head_dim + head_dim * width + width + linear["num_heads"] + hidden * linear["num_heads"] + head_dim
    # q_a, q_b and the norm between; kv_a, kv_b and theirs; g and o
    mla = hidden * query_rank + query_rank + query_rank * heads * key
    mla += hidden * (latent + text["qk_rope_head_dim"]) + latent
    mla += latent * (heads * text["qk_nope_head_dim"] + value) + 2 * hidden * value
    inner, expert_hidden = text["moe_intermediate_size"], text["routed_expert_hidden_size"]
    # router and its bias; down, up and the norm between; shared experts
    around = text["num_experts"] * (hidden + 1) + 2 * hidden * expert_hidden + expert_hidden
    around += 3 * hidden * inner * text["num_shared_experts"]
    return {
        "embedding and head": 2 * text["vocab_size"] * hidden,
        "KDA layers": len(linear["kda_layers"]) * kda,
        "MLA layers": len(linear["full_attn_layers"]) * mla,
        "dense feed-forward": dense * 3 * hidden * text["intermediate_size"],
        "router, shared experts, projections": (layers - dense) * around,
        "routed experts": (layers - dense) * text["num_experts"] * 3 * expert_hidden * inner,
        # two norms and two residual mixtures a layer; the last mixture and the last norm
        "norms and mixtures": 6 * hidden * layers + 3 * hidden,
    }


def recurrent_state_bytes(text: dict) -> int:
    """One sequence's recurrent states, float32."""
    linear = text["linear_attn_config"]
    return len(linear["kda_layers"]) * linear["num_heads"] * linear["head_dim"] ** 2 * FLOAT32


def conv_window_bytes(text: dict) -> int:
    """One sequence's convolution windows: the last raw inputs of q, k and v, bfloat16."""
    linear = text["linear_attn_config"]
    width = linear["num_heads"] * linear["head_dim"]
    return len(linear["kda_layers"]) * 3 * width * linear["short_conv_kernel_size"] * BF16


def mla_token_bytes(text: dict) -> int:
    """One token's keys and values in the full-attention layers, bfloat16, a head each, as the remote code has them."""
    head = text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"]
    return len(text["linear_attn_config"]["full_attn_layers"]) * text["num_attention_heads"] * head * BF16


def mla_latent_token_bytes(text: dict) -> int:
    """The same token in serving engines: the latent and the shared key channels, from which all heads follow."""
    latent = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    return len(text["linear_attn_config"]["full_attn_layers"]) * latent * BF16


def draft_token_bytes(config) -> int:
    """One token of the draft's context: keys and values of every layer, bfloat16."""
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * BF16


def shapes(text: dict, config) -> dict[str, int]:
    """What does not depend on context or batch, in bytes unless it says parameters."""
    parts = target_parameters(text)
    parameters, experts = sum(parts.values()), parts["routed experts"]
    return {
        "target parameters": parameters,
        "target weights, bfloat16": parameters * BF16,
        "target weights, routed experts in MXFP4": (parameters - experts) * BF16 + int(experts * MXFP4),
        "embedding and head, bfloat16": parts["embedding and head"] * BF16,
        "largest layer, bfloat16": layer_bytes(parts, text, BF16),
        "largest layer, MXFP4": layer_bytes(parts, text, MXFP4),
        "draft parameters": count_parameters(expected_tensors(config)),
        "draft weights": sum(spec.nbytes for spec in expected_tensors(config).values()),
        "recurrent states of a sequence": recurrent_state_bytes(text),
        "convolution windows of a sequence": conv_window_bytes(text),
        "target keys and values of a token": mla_token_bytes(text),
        "the same as a latent, in serving engines": mla_latent_token_bytes(text),
        "draft keys and values of a token": draft_token_bytes(config),
        "logits of a verify forward, of a row": VERIFY_WIDTH * text["vocab_size"] * (BF16 + FLOAT32),
        "features of a token": len(config.target_layer_ids) * text["hidden_size"] * BF16,
    }


def layer_bytes(parts: dict[str, int], text: dict, expert_bytes: float) -> int:
    """The largest decoder layer, which stays whole on one device: experts, what is around them, and attention."""
    linear, expert_layers = text["linear_attn_config"], text["num_hidden_layers"] - text["first_k_dense_replace"]
    kinds = (("KDA layers", "kda_layers"), ("MLA layers", "full_attn_layers"))
    attention = max(parts[part] // max(len(linear[layers]), 1) for part, layers in kinds)
    around = parts["router, shared experts, projections"] // expert_layers + attention + 6 * text["hidden_size"]
    return around * BF16 + int(parts["routed experts"] // expert_layers * expert_bytes)


def plan(fixed: dict[str, int], context: int, batch: int) -> dict[str, int]:
    """Bytes held at a context length in tokens, for `batch` sequences that long."""
    sequence = fixed["recurrent states of a sequence"] + fixed["convolution windows of a sequence"]
    rows = {
        # The states from before a round are kept until it is known how many drafts were accepted.
        "recurrent states and windows, before and after a round": 2 * batch * sequence,
        "target keys and values": batch * context * fixed["target keys and values of a token"],
        "draft weights": fixed["draft weights"],
        "draft keys and values": batch * context * fixed["draft keys and values of a token"],
        "logits of a verify forward": batch * fixed["logits of a verify forward, of a row"],
        "features of a piece of the prompt": batch * min(context, PREFILL_CHUNK) * fixed["features of a token"],
    }
    return {**rows, "all but the target's weights": sum(rows.values())}


def gpus_needed(fixed: dict[str, int], rows: dict[str, int], layers: int, gpu_bytes: float, weights: str) -> int | None:
    """GPUs, with whole layers on each and every layer with its share of the target's state; None if no layer fits.

    Embedding, head, the draft with its context, logits and features are given GPUs of their own.
    """
    usable = gpu_bytes * (1 - SPARE)
    ours = ("recurrent states and windows, before and after a round", "target keys and values")
    state = sum(rows[row] for row in ours)
    layer = fixed[f"largest layer, {weights}"] + state / layers
    if layer > usable:
        return None
    rest = rows["all but the target's weights"] - state + fixed["embedding and head, bfloat16"]
    return math.ceil(layers / (usable // layer)) + math.ceil(rest / usable)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--context", type=int, nargs="+", default=list(CONTEXTS), metavar="N", help="tokens (default: 4K to 1M)")
    add("--batch", type=int, default=1, metavar="B", help="sequences at once (default: 1)")
    add("--target-config", type=Path, metavar="C", help="config.json of a target (default: Kimi K3 as released)")
    add("--gpu-memory", type=float, metavar="GiB", help="memory of one GPU, to count how many are needed")
    add("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    arguments = parser.parse_args(argv)
    if min(arguments.context) < 1 or arguments.batch < 1:
        parser.error(f"--context {arguments.context}, --batch {arguments.batch}: expected at least 1 each")
    if arguments.gpu_memory is not None and arguments.gpu_memory <= 0:
        parser.error(f"--gpu-memory is {arguments.gpu_memory}, expected more than 0")
    return arguments


def read_target(path: Path | None) -> dict:
    """The text model's shapes. Raises ValueError, naming them, if fields of a Kimi K3 are missing."""
    if path is None:
        return KIMI_K3
    fields = json.loads(path.read_text("utf-8"))
    text = fields.get("text_config", fields)
    linear = text.get("linear_attn_config") or {}
    missing = sorted(KIMI_K3.keys() - text.keys())
    missing += [f"linear_attn_config.{name}" for name in sorted(KIMI_K3["linear_attn_config"].keys() - linear.keys())]
    if missing:
        raise ValueError(f"{path} is not the config.json of a Kimi K3: it has no {', '.join(missing)}.")
    return text


def show(figures: dict) -> str:
    """The figures for people."""
    parts, fixed, plans = figures["target_parameters"], figures["shapes"], figures["plans"]
    lines = ["| parameters of the target | |", "|---|--:|"]
    lines += [f"| {part} | {number:,} |" for part, number in parts.items()]
    lines += [f"| all | {fixed['target parameters']:,} |", "", "| of any context | |", "|---|--:|"]
    lines += [f"| {name} | {format_bytes(name, number)} |" for name, number in fixed.items()]
    batch = "one sequence" if figures["batch"] == 1 else f"{figures['batch']} sequences"
    lines += ["", f"| {batch}, context of | " + " | ".join(f"{int(context):,}" for context in plans) + " |"]
    lines.append("|---|" + "--:|" * len(plans))
    for row in next(iter(plans.values())):
        lines.append(f"| {row} | " + " | ".join(format_cell(row, each[row]) for each in plans.values()) + " |")
    return "\n".join(lines)


def format_bytes(name: str, number: int) -> str:
    return f"{number:,}" if "parameters" in name else f"{number:,} B ({format_size(number)})"


def format_cell(row: str, number: int | None) -> str:
    if row.startswith("GPUs"):
        return "no layer fits" if number is None else str(number)
    return format_size(number)


def format_size(number: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number} B"


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        text = read_target(arguments.target_config)
    except (ValueError, OSError) as error:
        print(f"memory_plan: {error}", file=sys.stderr)
        return 2
    fixed = shapes(text, build_config(read_config(ROOT)))
    plans = {}
    for context in arguments.context:
        rows = plan(fixed, context, arguments.batch)
        for weights in ("bfloat16", "MXFP4") if arguments.gpu_memory else ():
            gpu_bytes = arguments.gpu_memory * GIB
            needed = gpus_needed(fixed, rows, text["num_hidden_layers"], gpu_bytes, weights)
            rows[f"GPUs of {arguments.gpu_memory:g} GiB, {weights}"] = needed
        plans[str(context)] = rows
    figures = {"batch": arguments.batch, "target_parameters": target_parameters(text), "shapes": fixed, "plans": plans}
    print(show(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
