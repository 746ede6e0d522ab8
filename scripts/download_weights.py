"""Fetch the published draft weights (`model.safetensors`, 4.5 GB) into this folder and check them.

    python scripts/download_weights.py [--folder DIR] [--repo-id ID] [--revision REV]

The file is downloaded into a staging folder beside its destination, checked there, and only then moved into place, so
an interrupted or wrong download never stands where `from_pretrained` would read it. Running the script again resumes.
What the file must hold (names, shapes, dtype, size in bytes) follows from the model that `config.json` describes.

Exit codes: 0 the weights are in place and complete, 1 they could not be fetched, 2 bad arguments, 3 the file that came
is not the one this configuration needs, 130 interrupted.
"""

import argparse
import errno
import os
import shutil
import sys
from pathlib import Path

import checkpoint_files
from checkpoint_files import WEIGHTS as FILENAME
from checkpoint_files import TensorSpec, expected_size, tensor_differences
from common import ROOT
from huggingface_hub import hf_hub_download, logging
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open

REPO_ID = "RadixArk/Kimi-K3-DSpark"
STAGING = ".weights-download"
MAX_LISTED = 5

NOT_FETCHED, BAD_ARGUMENTS, NOT_THE_FILE, INTERRUPTED = 1, 2, 3, 130


class WeightsError(Exception):
    """What went wrong and what to do about it, in words for the person at the terminal."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def expected_tensors(root: Path) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of the weights of the draft that `root/config.json` describes; nothing is allocated."""
    return checkpoint_files.expected_tensors(checkpoint_files.build_config(checkpoint_files.read_config(root)))


def read_header(path: Path, size: int) -> dict[str, TensorSpec]:
    """The tensors that the file at `path` holds; the expected `size` is quoted when the file cannot be read."""
    try:
        with safe_open(str(path), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: TensorSpec(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise WeightsError(
            f"{FILENAME} has {path.stat().st_size:,} bytes where {size:,} were expected, and cannot be read ({error}): "
            "it is cut short, or it is not a safetensors file. Run this script again to fetch it anew.",
            NOT_THE_FILE,
        ) from error


def check_file(path: Path, expected: dict[str, TensorSpec]) -> None:
    """Raise WeightsError unless the file holds exactly the expected tensors in exactly the expected number of bytes."""
    size = expected_size(expected)
    differences = tensor_differences(read_header(path, size), expected)
    if differences:
        listed = "; ".join(differences[:MAX_LISTED])
        more = f"; and {len(differences) - MAX_LISTED} more" if len(differences) > MAX_LISTED else ""
        raise WeightsError(
            f"{FILENAME} does not hold the weights that config.json describes: {listed}{more}. "
            "Give the repository and the revision that belong to this configuration (--repo-id, --revision).",
            NOT_THE_FILE,
        )
    if path.stat().st_size != size:
        raise WeightsError(
            f"{FILENAME} has {path.stat().st_size:,} bytes where {size:,} were expected, though its tensors are right: "
            "its header is not the published one. Give the published repository or revision (--repo-id, --revision).",
            NOT_THE_FILE,
        )


def partial_bytes(staging: Path) -> int:
    """Bytes that an earlier, interrupted download left in the staging folder."""
    return sum(path.stat().st_size for path in staging.rglob("*.incomplete"))


def check_disk_space(folder: Path, size: int) -> None:
    """Raise WeightsError when `size` bytes, less what is already there of them, do not fit on the folder's disk."""
    needed = size - partial_bytes(folder / STAGING)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise WeightsError(
            f"The weights need {needed:,} more bytes on the disk that holds {folder}, and {free:,} are free. "
            "Free some space there, or give a folder on another disk (--folder).",
            NOT_FETCHED,
        )


def explain_failure(error: Exception, repo_id: str, revision: str | None) -> str:
    """A sentence or two for what `hf_hub_download` raised. Subclasses come before the classes they belong to."""
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        return (
            "The Hugging Face Hub did not answer: there is no network, or HF_HUB_OFFLINE is set, or the Hub is down. "
            "Run this script again when there is a connection."
        )
    if isinstance(error, GatedRepoError):
        return f"{repo_id} asks for its conditions to be accepted. Accept them on its page and log in (hf auth login)."
    if isinstance(error, RepositoryNotFoundError):
        return f"The Hub has no public repository {repo_id}. Check --repo-id; log in (hf auth login) if it is private."
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}. Give an existing branch, tag or commit with --revision."
    if isinstance(error, EntryNotFoundError):
        return f"{repo_id} has no {FILENAME} at revision {revision or 'main'!r}. Check --repo-id and --revision."
    if isinstance(error, HFValidationError):
        return f"{repo_id!r} is not a repository name: OWNER/NAME was expected ({error})."
    if isinstance(error, HfHubHTTPError):
        return f"The Hub refused the request ({error}). Run this script again later: what was fetched is kept."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "The disk ran full. Free some space or give another --folder, and run this script again: it resumes."
    return f"The download stopped ({type(error).__name__}: {error}). Run this script again: it resumes."


def drop_if_nothing_to_resume(staging: Path) -> None:
    """Remove the staging folder, unless it holds the beginning of a download."""
    if partial_bytes(staging) == 0:
        shutil.rmtree(staging, ignore_errors=True)


def fetch(staging: Path, repo_id: str, revision: str | None) -> Path:
    """Download the file into `staging`, or go on where an earlier download stopped; returns its path there."""
    logging.set_verbosity_error()  # the hub client tells every retry in full; the outcome is told once, below
    try:
        return Path(hf_hub_download(repo_id, FILENAME, revision=revision, local_dir=str(staging)))
    except Exception as error:  # what a lost connection raises depends on the version of the hub client and its backend
        raise WeightsError(explain_failure(error, repo_id, revision), NOT_FETCHED) from error


def download(folder: Path, repo_id: str, revision: str | None, expected: dict[str, TensorSpec]) -> None:
    """Put a checked weights file into `folder`; whatever stood there before stays until then."""
    staging = folder / STAGING
    check_disk_space(folder, expected_size(expected))
    try:
        fetched = fetch(staging, repo_id, revision)
    except BaseException:
        drop_if_nothing_to_resume(staging)
        raise
    try:
        check_file(fetched, expected)
        os.replace(fetched, folder / FILENAME)
    finally:
        shutil.rmtree(staging)


def is_complete(path: Path, expected: dict[str, TensorSpec]) -> bool:
    """Whether a file that passes every check is already in place."""
    try:
        check_file(path, expected)
    except (WeightsError, FileNotFoundError):
        return False
    return True


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fetch the published draft weights and check them.")
    parser.add_argument("--folder", type=Path, default=ROOT, help=f"where {FILENAME} goes (default: this package)")
    parser.add_argument("--repo-id", default=REPO_ID, help=f"repository on the Hugging Face Hub (default: {REPO_ID})")
    parser.add_argument("--revision", help="branch, tag or commit (default: the repository's main branch)")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> None:
    """Fetch and check; prints what is in place. Raises WeightsError with the exit code otherwise."""
    if not arguments.folder.is_dir():
        raise WeightsError(f"{arguments.folder} is not a folder. Make it, or give another --folder.", BAD_ARGUMENTS)
    expected = expected_tensors(ROOT)
    destination = arguments.folder / FILENAME
    if arguments.revision is None and is_complete(destination, expected):
        print(f"{destination} is already complete: delete it to fetch it anew.")
    else:
        print(f"Fetching {FILENAME} of {arguments.repo_id}, {expected_size(expected):,} bytes ...", flush=True)
        download(arguments.folder, arguments.repo_id, arguments.revision, expected)
    print(f"{destination}: {destination.stat().st_size:,} bytes, {len(expected)} tensors, all as config.json has them.")


def main(argv: list[str] | None = None) -> int:
    try:
        run(parse_arguments(argv))
    except WeightsError as error:
        print(f"download_weights: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("download_weights: interrupted. Run this script again: it resumes.", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
