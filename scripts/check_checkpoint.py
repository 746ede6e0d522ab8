"""Check that a draft checkpoint is whole and is what its `config.json` says: tensor names, shapes, dtypes, parameter
count, file size; with `--full` also that every value is a number.

    python scripts/check_checkpoint.py [PATH_OR_REPO] [--full] [--json OUT]

PATH_OR_REPO is a folder, or a repository on the Hugging Face Hub. Of the weights only the headers are read, a few
kilobytes, wherever they are; `--full` reads them all (and downloads those of a repository first), a piece of a tensor
at a time. What there should be follows from the model that the checkpoint's own configuration describes, built here
without memory for its weights. No code of the checkpoint is run.

Exit codes: 0 it fits, 1 it does not, and every reason is listed, 2 there was nothing to check.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from checkpoint_files import (
    CONFIG,
    DTYPE_NAMES,
    INDEX,
    HeaderError,
    Place,
    TensorSpec,
    Weights,
    build_config,
    count_parameters,
    current_name,
    dtype_name,
    expected_size,
    expected_tensors,
    layout_of,
    read_config,
    read_weights,
    tensor_differences,
)
from common import TINY_DRAFT
from huggingface_hub import HfApi, get_safetensors_metadata, hf_hub_download, snapshot_download

FITS, DOES_NOT_FIT, NOTHING_TO_CHECK = 0, 1, 2
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
CONVERT = "scripts/convert_checkpoint.py"


@dataclass
class Report:
    """What a check found; `expected` is empty if the configuration describes no draft.

    `problems` has a sentence for each thing that does not fit; it fits if there are none.
    """

    name: str
    weights: Weights = field(default_factory=Weights)
    expected: dict[str, TensorSpec] = field(default_factory=dict)
    values_read: bool = False
    problems: list[str] = field(default_factory=list)

    def figures(self) -> dict:
        """What the table shows, for programs."""
        found, expected = self.weights.tensors, self.expected
        return {
            "name": self.name,
            "fits": not self.problems,
            "values_read": self.values_read,
            "files": self.weights.sizes,
            "found": {
                "tensors": len(found),
                "parameters": self.weights.parameters,
                "dtypes": sorted({spec.dtype for spec in found.values()}),
                "bytes": sum(self.weights.sizes.values()),
            },
            "expected": expected
            and {
                "tensors": len(expected),
                "parameters": count_parameters(expected),
                "dtypes": sorted({spec.dtype for spec in expected.values()}),
                "bytes": expected_size(expected),
            },
            "problems": self.problems,
        }


def check(folder: Path, full: bool = False) -> Report:
    """Check the checkpoint in `folder`."""
    weights = read_weights(folder)
    try:
        fields = read_config(folder)
    except ValueError as error:
        return Report(str(folder), weights, problems=[*weights.problems, str(error)])
    report = compare(str(folder), fields, weights)
    if full:
        report.values_read = True
        for name, place in sorted(weights.places.items()):
            report.problems += check_values(name, weights.tensors[name], place)
    return report


def check_repo(repo_id: str, full: bool = False) -> Report:
    """Check the checkpoint in a repository on the Hub. Raises what huggingface_hub raises if it cannot be reached."""
    if full:
        report = check(Path(snapshot_download(repo_id, allow_patterns=[CONFIG, "*.safetensors", INDEX])), full)
        report.name = repo_id
        return report
    fields = read_config(Path(hf_hub_download(repo_id, CONFIG)).parent)
    siblings = HfApi().model_info(repo_id, files_metadata=True).siblings
    sizes = {sibling.rfilename: sibling.size for sibling in siblings}
    weights = Weights()
    for file, header in get_safetensors_metadata(repo_id).files_metadata.items():
        weights.sizes[file] = sizes[file]
        end = max((info.data_offsets[1] for info in header.tensors.values()), default=0)
        if sizes[file] < 8 + end:
            weights.problems.append(f"{file} has {sizes[file]:,} bytes, its tensors alone {end:,}: it is cut short.")
        weights.tensors |= {name: TensorSpec(info.dtype, tuple(info.shape)) for name, info in header.tensors.items()}
    return compare(repo_id, fields, weights)


def check_any(checkpoint: str, full: bool) -> Report:
    """Check a folder or a repository. Raises ValueError if it is neither, or if the Hub does not hand it out."""
    path = Path(checkpoint)
    if path.is_dir():
        return check(path, full)
    if path.exists():
        raise ValueError(f"{path} is a file, expected the folder that holds {CONFIG} and the weights.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint):
        raise ValueError(f"{path} is neither a folder nor a repository OWNER/NAME.")
    try:
        return check_repo(checkpoint, full)
    except Exception as error:  # what the Hub's client raises depends on its version and its transport
        message = f"{checkpoint} is no folder, and could not be read from the Hub ({type(error).__name__}): {error}"
        raise ValueError(message) from error


def compare(name: str, fields: dict, weights: Weights) -> Report:
    """Hold the headers of a checkpoint against its configuration."""
    report = Report(name, weights, problems=list(weights.problems))
    layout = layout_of(fields)
    if layout is None:
        report.problems.append(f"{CONFIG} describes no DSpark draft; its architectures are {architectures(fields)}.")
        return report
    if layout != "SpecForge":
        report.problems.append(f"{CONFIG} is in the layout of {layout}, not of this repository: {CONVERT} converts it.")
        return report
    if architectures(fields) != ["DSparkDraftModel"]:
        report.problems.append(
            f"{CONFIG} has architectures {architectures(fields)}; serving engines look for ['DSparkDraftModel']."
        )
    try:
        config = build_config(fields)
        dtype = dtype_name(config)
    except ValueError as error:
        report.problems.append(str(error))
        return report
    if dtype is None:
        report.problems.append(f"{CONFIG} has no dtype: give that of the weights.")
    dtypes = sorted({spec.dtype for spec in weights.tensors.values()})
    report.expected = expected_tensors(config, dtype or (dtypes[0] if len(dtypes) == 1 else "BF16"))
    if weights.tensors:
        report.problems += describe_misfits(weights.tensors, report.expected, dtypes)
    return report


def architectures(fields: dict) -> list | None:
    return fields.get("architectures")


def describe_misfits(found: dict[str, TensorSpec], expected: dict[str, TensorSpec], dtypes: list[str]) -> list[str]:
    """A sentence for every tensor, and one for the dtypes, that does not fit; an old name counts for the new one."""
    (wanted,) = {spec.dtype for spec in expected.values()}
    problems, renamed = [], {}
    for name, spec in found.items():
        today = current_name(name)
        if today != name and today not in found:
            problems.append(
                f"{name} is an old name of {today}: AutoModel takes it, engines may not. {CONVERT} renames it."
            )
            name = today
        renamed[name] = spec
    if dtypes != [wanted]:
        each = ", ".join(f"{count(found, dtype)} of {dtype}" for dtype in dtypes)
        problems.append(f"The tensors are {each}, where {CONFIG} says {wanted} for all.")
        # Told once; shapes are compared below.
        renamed = {name: TensorSpec(wanted, spec.shape) for name, spec in renamed.items()}
    return sorted(problems) + [f"{difference}." for difference in tensor_differences(renamed, expected)]


def count(tensors: dict[str, TensorSpec], dtype: str) -> int:
    return sum(spec.dtype == dtype for spec in tensors.values())


def check_values(name: str, spec: TensorSpec, place: Place) -> list[str]:
    """A sentence if any value of the tensor is NaN or infinite."""
    if spec.dtype not in TORCH_DTYPES:
        return []
    nans = infinite = 0
    try:
        for chunk in place.chunks():
            values = torch.frombuffer(bytearray(chunk), dtype=TORCH_DTYPES[spec.dtype])
            nans += int(values.isnan().sum())
            infinite += int(values.isinf().sum())
    except HeaderError as error:
        return [str(error)]
    if not nans and not infinite:
        return []
    return [f"{name} has {nans:,} NaN and {infinite:,} infinite values of {spec.nbytes // values.itemsize:,}."]


def show(report: Report) -> str:
    """The report for people."""
    figures = report.figures()
    read = "every value was read" if report.values_read else "headers only; --full reads the values"
    files = len(report.weights.sizes)
    lines = [f"{report.name}: {files} {'file' if files == 1 else 'files'} of weights ({read}).", ""]
    lines += [f"| | found | {CONFIG} asks for |", "|---|--:|--:|"]
    for row, label in (("tensors", "tensors"), ("parameters", "parameters"), ("dtypes", "dtype"), ("bytes", "bytes")):
        cells = [format_cell(side[row]) if side else "" for side in (figures["found"], figures["expected"])]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    lines += ["", "It fits." if figures["fits"] else "It does not fit:"]
    return "\n".join(lines + [f"- {problem}" for problem in report.problems])


def format_cell(value: int | list[str]) -> str:
    return ", ".join(value) if isinstance(value, list) else f"{value:,}"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint", nargs="?", default=str(TINY_DRAFT), metavar="PATH_OR_REPO", help="default: the draft in examples/"
    )
    parser.add_argument("--full", action="store_true", help="read every value, and look for NaN and infinity")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        report = check_any(arguments.checkpoint, arguments.full)
    except ValueError as error:
        print(f"check_checkpoint: {error}", file=sys.stderr)
        return NOTHING_TO_CHECK
    print(show(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.figures(), indent=2) + "\n", "utf-8")
    return DOES_NOT_FIT if report.problems else FITS


if __name__ == "__main__":
    sys.exit(main())
