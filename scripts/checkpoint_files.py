"""What the checkpoint scripts share: safetensors files as headers and ranges of bytes, the tensors a configuration asks
for, and the layouts a draft's `config.json` comes in.

A safetensors file is an 8-byte length, a JSON header padded with spaces to a multiple of 8, then the data. The header
has each tensor's dtype, shape and range of bytes in the data, so nearly all there is to know of a checkpoint is read
from its first few kilobytes.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import root_class, root_module

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
BYTES_PER_VALUE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
BYTES_PER_VALUE |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
METADATA = "__metadata__"
LONGEST_HEADER = 100_000_000  # as safetensors itself has it
CHUNK = 2**24  # bytes of a tensor in memory at once


class HeaderError(ValueError):
    """A file that is not a whole safetensors file; the message says what is wrong with it."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as a safetensors header states it: dtype name (`BF16`, `F32`, ...) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return BYTES_PER_VALUE[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are: `file[start:end]`."""

    file: Path
    start: int
    end: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes, at most CHUNK at once."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            left = self.end - self.start
            while left:
                chunk = file.read(min(left, CHUNK))
                if not chunk:
                    raise HeaderError(f"{self.file} ends {left:,} bytes before its header says: fetch it anew.")
                left -= len(chunk)
                yield chunk


@dataclass
class Weights:
    """The tensors of a checkpoint, from its headers.

    Attributes:
        tensors: dtype and shape by name.
        places: where each is; empty for a checkpoint that was not downloaded.
        sizes: bytes of each file, by name.
        problems: what is wrong with the files, a sentence each.
    """

    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        return count_parameters(self.tensors)


def count_parameters(tensors: dict[str, TensorSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in tensors.values())


def make_header(tensors: dict[str, TensorSpec]) -> bytes:
    """All that stands before the data of the file transformers writes for these tensors of one dtype.

    The data follows in the order of the names, without gaps.
    """
    header: dict[str, dict] = {METADATA: {"format": "pt"}}
    end = 0
    for name, spec in sorted(tensors.items()):
        start, end = end, end + spec.nbytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    # As safetensors spells it: no spaces, and no escapes beyond those JSON needs.
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def expected_size(tensors: dict[str, TensorSpec]) -> int:
    """Bytes of the file that transformers writes for these tensors of one dtype."""
    return len(make_header(tensors)) + sum(spec.nbytes for spec in tensors.values())


def read_header(path: Path) -> tuple[dict[str, TensorSpec], dict[str, Place]]:
    """The tensors of a safetensors file and where they are; nothing but the header is read.

    Raises HeaderError if the header cannot be read, contradicts itself, or promises more or less data than there is.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, LONGEST_HEADER):
            raise HeaderError(
                f"{path.name} has {size:,} bytes and no whole header: it is cut short, or it is not a safetensors file."
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop(METADATA, None)
        entries = {name: _read_entry(name, entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise HeaderError(f"{path.name} has a header that cannot be read ({error}): it is corrupt.") from None
    end = 0
    for name, (spec, start, stop) in sorted(entries.items(), key=lambda item: item[1][1:]):
        if start != end or stop - start != spec.nbytes:
            raise HeaderError(
                f"{path.name}: the header puts {name}, {spec} of {spec.nbytes:,} bytes, at {start:,} to {stop:,}, "
                f"where {end:,} to {end + spec.nbytes:,} was expected: it is corrupt."
            )
        end = stop
    data = 8 + length
    if size != data + end:
        raise HeaderError(
            f"{path.name} has {size:,} bytes where its header promises {data + end:,}: "
            f"{'it is cut short' if size < data + end else 'something was added to it'}."
        )
    places = {name: Place(path, data + start, data + stop) for name, (_, start, stop) in entries.items()}
    return {name: spec for name, (spec, *_) in entries.items()}, places


def _read_entry(name: str, entry: dict) -> tuple[TensorSpec, int, int]:
    spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
    if spec.dtype not in BYTES_PER_VALUE:
        raise ValueError(f"{name} has dtype {spec.dtype!r}")
    start, stop = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*spec.shape, start, stop)):
        raise ValueError(f"{name} has shape {entry['shape']} and data_offsets {entry['data_offsets']}")
    return spec, start, stop


def read_weights(folder: Path) -> Weights:
    """The checkpoint in `folder`, one file or several with an index. What is wrong with it goes into `problems`."""
    weights = Weights()
    if (folder / WEIGHTS).is_file():
        _add_file(weights, folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        _read_shards(weights, folder)
    else:
        weights.problems.append(f"There is neither {WEIGHTS} nor {INDEX}.")
    return weights


def _add_file(weights: Weights, path: Path) -> list[str]:
    """Read one more file into `weights`; the names of its tensors."""
    weights.sizes[path.name] = path.stat().st_size
    try:
        tensors, places = read_header(path)
    except HeaderError as error:
        weights.problems.append(str(error))
        return []
    for name in sorted(tensors.keys() & weights.tensors.keys()):
        weights.problems.append(f"{name} is in {path.name} and in {weights.places[name].file.name}: keep one.")
    weights.tensors |= tensors
    weights.places |= places
    return list(tensors)


def _read_shards(weights: Weights, folder: Path) -> None:
    try:
        weight_map = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
        # An index names files beside it, and nothing else.
        if not files or any(Path(file).name != file for file in files):
            raise ValueError(f"weight_map names the files {files}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        weights.problems.append(f"{INDEX} cannot be read ({error}): it is corrupt.")
        return
    for file in files:
        if not (folder / file).is_file():
            weights.problems.append(f"{file} is named in {INDEX} and is not there.")
            continue
        found = set(_add_file(weights, folder / file))
        listed = {name for name, place in weight_map.items() if place == file}
        if not found:
            continue
        for name in sorted(listed - found):
            weights.problems.append(f"{name} is not in {file}, where {INDEX} puts it.")
        for name in sorted(found - listed):
            weights.problems.append(f"{name} is in {file}, and {INDEX} does not say so.")


@functools.cache
def draft_class() -> type:
    """The draft class of this repository; kept, because finding it means comparing files every time."""
    return root_class()


def build_config(fields: dict):
    """The `DSparkConfig` of a parsed config.json. Raises ValueError, naming the field, for what it refuses."""
    return draft_class().config_class.from_dict(fields)


def dtype_name(config) -> str | None:
    """The config's dtype as safetensors names it; None if it has none."""
    if config.dtype is None:
        return None
    # A string where the config did not come through from_pretrained.
    dtype = getattr(torch, str(config.dtype).removeprefix("torch."), None)
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"DSparkConfig: `dtype` is {config.dtype!r}. Use one of bfloat16, float16 and float32.")
    return DTYPE_NAMES[dtype]


def meta_draft(config):
    """The draft that `config` describes, without memory for its weights."""
    with torch.device("meta"):
        return draft_class()(config)


def expected_tensors(config, dtype: str | None = None) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of the weights of the draft that `config` describes; nothing is allocated."""
    dtype = dtype or dtype_name(config)
    return {name: TensorSpec(dtype, tuple(tensor.shape)) for name, tensor in meta_draft(config).state_dict().items()}


def tensor_differences(found: dict[str, TensorSpec], expected: dict[str, TensorSpec]) -> list[str]:
    """One phrase for every tensor that is missing, unexpected, or of another dtype or shape; empty when all agree."""
    missing = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    extra = [f"{name} is not a tensor of this model" for name in sorted(found.keys() - expected.keys())]
    changed = [
        f"{name} is {found[name]} where {expected[name]} was expected"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    return missing + extra + changed


def current_name(name: str) -> str:
    """A tensor's name today: early checkpoints keep both heads under `logit_head.`."""
    return name.removeprefix(root_module(draft_class(), "modeling_dspark").OLD_HEAD_PREFIX)


def read_config(folder: Path) -> dict:
    """The parsed config.json of `folder`. Raises ValueError if there is none or it is not a JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"There is no {CONFIG}.")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{CONFIG} is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{CONFIG} is not a JSON object.")
    return fields


def layout_of(fields: dict) -> str | None:
    """Who wrote a draft's config.json: "SpecForge" (this repository's layout too: a nested `dflash_config`), "DeepSpec"
    (all at the top level), "speculators" (a nested `transformer_layer_config`); None for anything else."""
    if "speculators_model_type" in fields:
        return "speculators"
    if "dflash_config" in fields:
        return "SpecForge"
    if {"target_layer_ids", "mask_token_id", "markov_rank"} <= fields.keys():
        return "DeepSpec"
    return None
