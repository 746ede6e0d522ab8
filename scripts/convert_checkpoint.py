"""Convert a DSpark draft of another framework to the layout of this repository: `config.json` with a nested
`dflash_config`, one `model.safetensors`, and the code that AutoModel needs.

    python scripts/convert_checkpoint.py SOURCE --out DIR [--draft-config C] [--num-target-layers N] [--force]

Read are, told apart by the configuration:

- SpecForge: an exported folder, or `training_state.pt` as it saves while training, which needs `--draft-config`.
  Prefixes of training wrappers are taken off, and heads under the early name `logit_head.` get today's.
- DeepSpec: everything at the top level of `config.json`; its copies of the target's embedding and head are left out.
- speculators: `transformer_layer_config` within the configuration. It numbers the outputs of layers from 1, and has no
  number of target layers (`--num-target-layers`). A vocabulary smaller than the target's is refused.

Tensors keep their bytes: they are copied file to file a piece at a time, so that memory does not depend on their size.
The result is checked by its headers and moved into place as a whole.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from check_checkpoint import check
from checkpoint_files import (
    CHUNK,
    CONFIG,
    DTYPE_NAMES,
    INDEX,
    WEIGHTS,
    TensorSpec,
    build_config,
    current_name,
    expected_size,
    layout_of,
    make_header,
    meta_draft,
    read_config,
    read_weights,
)
from common import BUILD, TINY_DRAFT
from transformers import Qwen3Config
from transformers.dynamic_module_utils import custom_object_save

STATE = "training_state.pt"
# Put before a parameter's name by FSDP, torch.compile and activation checkpointing, anywhere in it; and by modules that
# hold the draft together with its loss, at the beginning.
WRAPPERS = re.compile(r"(?<![^.])(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
OWNERS = re.compile(r"^(?:(?:module|draft_model|draft|model)\.)+")
# The target's own tensors, and tables that are computed: never part of a draft's file.
LEFT_OUT = {
    "embed_tokens.weight",
    "lm_head.weight",
    "target_embed_tokens.weight",
    "target_lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "rotary_emb.inv_freq",
    "rotary_emb.original_inv_freq",
}
VOCABULARY_TABLES = {"d2t", "t2d"}
# What a configuration says of the code and the training that wrote it.
OF_THE_WRITER = {
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "num_anchors",
    "torch_dtype",
    "transformers_version",
    "_attn_implementation",
    "_name_or_path",
}
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# What speculators leaves out of a configuration is the default of its classes.
SPECULATORS_HEADS = dict(zip(HEADS, (256, "vanilla", True, True)))
BACKBONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "attention_bias",
    "attention_dropout",
    "max_position_embeddings",
)


class ConversionError(ValueError):
    """Why a checkpoint cannot be converted, and what to do about it."""


class Bytes(Protocol):
    """A tensor's bytes, wherever they are."""

    def chunks(self) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class LoadedTensor:
    """A tensor of a PyTorch file, mapped into memory."""

    tensor: torch.Tensor

    def chunks(self) -> Iterator[bytes]:
        values = self.tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(values), CHUNK):
            yield values[start : start + CHUNK].numpy().tobytes()


@dataclass
class Source:
    """A checkpoint to convert: its configuration, and its tensors by the names it gives them."""

    layout: str
    fields: dict
    tensors: dict[str, TensorSpec]
    data: dict[str, Bytes]


def open_source(path: Path, draft_config: Path | None) -> Source:
    """Read the configuration of a checkpoint and the headers of its tensors."""
    folder = path if path.is_dir() else path.parent
    state = path if path.is_file() else path / STATE
    try:
        fields = read_config(folder) if draft_config is None else json.loads(draft_config.read_text("utf-8"))
    except ValueError as error:
        remedy = " Give the JSON file the draft was trained with as --draft-config." if draft_config is None else ""
        raise ConversionError(f"{draft_config or folder}: {error}{remedy}") from None
    layout = layout_of(fields)
    if layout is None:
        raise ConversionError(
            f"{draft_config or folder / CONFIG} has architectures {fields.get('architectures')!r}, and none of the "
            "keys by which a DSpark draft is known: `dflash_config` (SpecForge), `target_layer_ids` with "
            "`mask_token_id` and `markov_rank` (DeepSpec), `speculators_model_type` (speculators)."
        )
    if path.is_file() or (state.is_file() and not any((folder / name).is_file() for name in (WEIGHTS, INDEX))):
        return Source(layout, fields, *read_training_state(state))
    weights = read_weights(folder)
    if weights.problems:
        raise ConversionError(f"{folder}: {' '.join(weights.problems)}")
    return Source(layout, fields, weights.tensors, weights.places)


def read_training_state(path: Path) -> tuple[dict[str, TensorSpec], dict[str, LoadedTensor]]:
    """The draft's tensors in a file SpecForge saves while training; only tensors and plain values are unpickled."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        tensors = state["draft_state_dict"]
        specs = {
            name: TensorSpec(DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
    except Exception as error:  # pickle, zip and torch each have their own
        raise ConversionError(
            f"{path} is not a training state of SpecForge: {type(error).__name__}: {error}"
        ) from error
    return specs, {name: LoadedTensor(tensor) for name, tensor in tensors.items()}


def convert_config(source: Source, num_target_layers: int | None):
    """The configuration in this repository's layout, with the dtype of the weights; everything is checked."""
    fields = {"SpecForge": dict, "DeepSpec": from_deepspec, "speculators": from_speculators}[source.layout](
        source.fields
    )
    fields = {name: value for name, value in fields.items() if name not in OF_THE_WRITER}
    if num_target_layers is not None:
        given = fields.setdefault("num_target_layers", num_target_layers)
        if given != num_target_layers:
            raise ConversionError(f"--num-target-layers is {num_target_layers}, but {CONFIG} has {given}.")
    elif "num_target_layers" not in fields:
        raise ConversionError(
            f"{CONFIG} of {source.layout} does not say how deep the target is: give --num-target-layers (Kimi K3: 93)."
        )
    fields |= {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "dtype": one_dtype(source.tensors)}
    return build_config(fields)


def from_deepspec(fields: dict) -> dict:
    """Nest what DeepSpec has at the top level."""
    architectures = fields.get("architectures")
    if architectures != ["Qwen3DSparkModel"]:
        raise ConversionError(
            f"The architectures of this DeepSpec draft are {architectures}, and only a Qwen3DSparkModel has the layers "
            "of this repository's draft."
        )
    moved = ("target_layer_ids", "mask_token_id", *HEADS, "confidence_head_alpha")
    nested = {name: fields[name] for name in moved if name in fields}
    # DeepSpec has no such key for a draft without the head.
    nested.setdefault("enable_confidence_head", False)
    return {
        **{name: value for name, value in fields.items() if name not in nested},
        "dflash_config": nest(fields, nested),
    }


def from_speculators(fields: dict) -> dict:
    """Take the layers out of speculators' configuration, and put the rest where this repository has it."""
    if fields["speculators_model_type"] != "dspark":
        raise ConversionError(
            f"speculators_model_type is {fields['speculators_model_type']!r}: only 'dspark' drafts as this repository."
        )
    layers = fields.get("transformer_layer_config") or {}
    if layers.get("model_type", "qwen3") != "qwen3":
        raise ConversionError(
            f"transformer_layer_config.model_type is {layers['model_type']!r}: the layers here are those of 'qwen3'."
        )
    # speculators saves what differs from the defaults of Qwen3Config.
    defaults = Qwen3Config().to_dict()
    layers = {**{name: defaults[name] for name in BACKBONE}, **layers}
    if not any("rope_theta" in (rope or {}) for rope in (layers, layers.get("rope_parameters"))):
        layers["rope_theta"] = 10000.0
    check_speculators(fields, layers)
    taps = fields.get("aux_hidden_state_layer_ids") or []
    # Number i is the output of the i-th layer, counted from 1 (0: the embeddings); here layers count from 0.
    nested = {"target_layer_ids": [tap - 1 for tap in taps], "mask_token_id": fields.get("mask_token_id")}
    nested |= {name: fields.get(name, default) for name, default in SPECULATORS_HEADS.items()}
    return {**layers, "block_size": fields.get("block_size", 8), "dflash_config": nest(layers, nested)}


def check_speculators(fields: dict, layers: dict) -> None:
    """Refuse what a draft of speculators may have and this repository's may not."""
    vocabulary = fields.get("draft_vocab_size", 32000)
    if vocabulary != layers["vocab_size"]:
        raise ConversionError(
            f"draft_vocab_size is {vocabulary}, the target's vocabulary {layers['vocab_size']}: a draft with a reduced "
            "vocabulary has an output head of its own, and drafts here through the target's. Train it on the whole one."
        )
    if fields.get("target_hidden_size") not in (None, layers["hidden_size"]):
        raise ConversionError(
            f"target_hidden_size is {fields['target_hidden_size']}, hidden_size {layers['hidden_size']}: here both are "
            "one, because embedding and head are the target's."
        )
    # Not defaulted: speculators takes an absent value for true and vLLM for false.
    if fields.get("sample_from_anchor") is not True:
        raise ConversionError(
            f"sample_from_anchor is {fields.get('sample_from_anchor')!r}, expected true: only then does the anchor's "
            "row predict the first token, as here. Write it into the configuration if the draft was trained so."
        )


def nest(backbone: dict, nested: dict) -> dict:
    """A whole `dflash_config`: with the draft's kind and that of its attention."""
    heads, kv_heads = backbone.get("num_attention_heads"), backbone.get("num_key_value_heads")
    return {"projector_type": "dspark", "attention_mode": "mha" if heads == kv_heads else "gqa", **nested}


def one_dtype(tensors: dict[str, TensorSpec]) -> str:
    """The dtype of the draft's tensors, as a config names it."""
    dtypes = sorted({spec.dtype for name, spec in tensors.items() if not is_left_out(name)})
    names = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPE_NAMES.items()}
    if len(dtypes) != 1 or dtypes[0] not in names:
        raise ConversionError(
            f"The tensors are of {' and '.join(dtypes) or 'no dtype: there are none'}, expected one of "
            f"{', '.join(names)} for all. Cast them before."
        )
    return names[dtypes[0]]


def draft_name(name: str) -> str:
    """A tensor's name in this repository's layout."""
    return current_name(OWNERS.sub("", WRAPPERS.sub("", name)))


def is_left_out(name: str) -> bool:
    return draft_name(name) in LEFT_OUT


def convert_names(names: list[str]) -> dict[str, str]:
    """Names in this repository's layout, and the source's names for them, without the tensors that are left out."""
    tables = sorted(name for name in names if draft_name(name) in VOCABULARY_TABLES)
    if tables:
        raise ConversionError(
            f"{' and '.join(tables)} map a reduced vocabulary to the target's: such a draft cannot be converted."
        )
    converted: dict[str, str] = {}
    for name in names:
        new = draft_name(name)
        if new in converted:
            raise ConversionError(f"{name} and {converted[new]} are both {new} here: remove one.")
        if new not in LEFT_OUT:
            converted[new] = name
    return converted


def write_weights(path: Path, tensors: dict[str, TensorSpec], data: dict[str, Bytes]) -> None:
    """Write a safetensors file as transformers does: the header first, then tensor after tensor, a piece at a time."""
    with path.open("wb") as file:
        file.write(make_header(tensors))
        for name in sorted(tensors):
            for chunk in data[name].chunks():
                file.write(chunk)


def convert(source: Source, out: Path, num_target_layers: int | None = None) -> dict:
    """Convert into the empty folder `out`; what was done, for people and programs.

    Raises ValueError if the configuration is refused or a tensor does not fit it; `out` is then to be thrown away.
    """
    names = convert_names(list(source.tensors))
    config = convert_config(source, num_target_layers)
    draft = meta_draft(config)
    custom_object_save(draft, out, config=config)
    config.save_pretrained(out)
    tensors = {new: source.tensors[old] for new, old in names.items()}
    write_weights(out / WEIGHTS, tensors, {new: source.data[old] for new, old in names.items()})
    report = check(out)
    if report.problems:
        raise ConversionError("\n- ".join(["The tensors do not fit the configuration:", *report.problems]))
    return {
        "layout": source.layout,
        "tensors": len(tensors),
        "bytes": expected_size(tensors),
        "renamed": {old: new for new, old in names.items() if new != old},
        "left_out": sorted(source.tensors.keys() - names.values()),
    }


def move_into_place(made: Path, out: Path) -> None:
    """Put the files of `made` where they belong, each at once. Links in `out` stay: code is often linked."""
    if not out.exists():
        made.rename(out)
        return
    for path in sorted(made.iterdir()):
        if not (out / path.name).is_symlink():
            os.replace(path, out / path.name)


def run(arguments: argparse.Namespace) -> dict:
    source, out = Path(arguments.source), arguments.out
    if not source.exists():
        raise ConversionError(f"{source} is neither a folder nor a file.")
    if out.exists() and not out.is_dir():
        raise ConversionError(f"--out {out} is a file, expected a folder.")
    if out.exists() and any(out.iterdir()) and not arguments.force:
        raise ConversionError(f"--out {out} is there already. Give another folder, or --force to replace its files.")
    opened = open_source(source, arguments.draft_config)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.unfinished-", dir=out.parent))
    try:
        made.chmod(0o755)  # mkdtemp's own is for its maker only
        done = convert(opened, made, arguments.num_target_layers)
        move_into_place(made, out)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return done


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", nargs="?", default=TINY_DRAFT, help=f"folder, or {STATE} (default: the draft in examples/)")
    add("--out", type=Path, default=BUILD / "converted-draft", help="folder to make (default: build/converted-draft)")
    add(
        "--draft-config", type=Path, metavar="C", help="JSON file to read instead of the config.json beside the weights"
    )
    add("--num-target-layers", type=int, metavar="N", help="depth of the target, where the configuration lacks it")
    add("--force", action="store_true", help="replace the files of --out")
    add("--json", type=Path, metavar="OUT", help="write what was done to this file too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        done = run(arguments)
    except (ValueError, OSError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.source} (layout of {done['layout']}) -> {arguments.out}")
    print(f"{done['tensors']} tensors, {done['bytes']:,} bytes; they fit {CONFIG}.")
    for old, new in done["renamed"].items():
        print(f"- {old} is now {new}")
    for name in done["left_out"]:
        print(f"- {name} is left out: it is the target's, or computed")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(done, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
