"""Upload this repository to the Hugging Face Hub as the model package it is.

    python scripts/push_to_hub.py [--repo-id OWNER/NAME] [--push] [--json OUT]

Without `--push` nothing is sent: it lists the files that would be, and their sizes. These are the files git tracks,
so that a clone from the Hub can do all the README says, and `model.safetensors` if it is there. Every checkpoint among
them is checked by its headers before, and one that does not fit is not pushed. Whom the Hub takes you for is
huggingface_hub's matter: log in with `hf auth login`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from check_checkpoint import check, compare, show
from checkpoint_files import WEIGHTS, Weights, read_config
from common import ROOT, TINY_DRAFT
from download_weights import REPO_ID
from huggingface_hub import HfApi


class PushError(Exception):
    """Why nothing can be pushed, and what to do about it."""


def package_files(root: Path) -> dict[str, int]:
    """The files to upload, as paths within `root`, and their sizes in bytes; links count as what they point to."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        raise PushError(f"{root} is no git repository, and only what git tracks is pushed: {listed.stderr.strip()}")
    names = [name for name in listed.stdout.split("\0") if name]
    if (root / WEIGHTS).is_file() and WEIGHTS not in names:
        names.append(WEIGHTS)
    gone = [name for name in names if not (root / name).is_file()]
    if gone:
        raise PushError(f"Tracked, but not there: {', '.join(gone)}. Restore or `git rm` what is missing.")
    return {name: (root / name).stat().st_size for name in sorted(names)}


def check_package(root: Path) -> None:
    """Raise PushError unless every checkpoint of the package fits; without weights, its configuration alone."""
    for folder in (root, root / TINY_DRAFT.relative_to(ROOT)):
        try:
            there = (folder / WEIGHTS).is_file()
            report = check(folder) if there else compare(str(folder), read_config(folder), Weights())
        except ValueError as error:
            raise PushError(f"{folder}: {error}") from error
        if report.problems:
            raise PushError(f"Not pushed, because a checkpoint does not fit.\n{show(report)}")


def push(root: Path, repo_id: str, names: list[str]) -> str:
    """Upload, making the repository if there is none; the address of the commit."""
    api = HfApi()
    api.create_repo(repo_id, exist_ok=True)
    # Paths are patterns that match themselves only.
    commit = api.upload_folder(
        repo_id=repo_id, folder_path=root, allow_patterns=names, commit_message="Update the model package"
    )
    return commit.commit_url


def show_files(files: dict[str, int]) -> str:
    lines = ["| file | bytes |", "|---|--:|", *(f"| {name} | {size:,} |" for name, size in files.items())]
    lines += [f"| {len(files)} files | {sum(files.values()):,} |", ""]
    if WEIGHTS not in files:
        lines.append(f"{WEIGHTS} is not here, so the weights on the Hub stay as they are.")
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo-id", default=REPO_ID, metavar="OWNER/NAME", help=f"default: {REPO_ID}")
    parser.add_argument("--push", action="store_true", help="do it; without, only say what would be done")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the list to this file too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        files = package_files(ROOT)
        check_package(ROOT)
    except PushError as error:
        print(f"push_to_hub: {error}", file=sys.stderr)
        return 1
    print(show_files(files))
    if arguments.json is not None:
        figures = {"repo_id": arguments.repo_id, "pushed": arguments.push, "files": files}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    if not arguments.push:
        print(f"Nothing was sent. With --push these files go to {arguments.repo_id}.")
        return 0
    try:
        print(f"Pushed: {push(ROOT, arguments.repo_id, list(files))}")
    except Exception as error:  # what the Hub's client raises depends on its version and its transport
        print(f"push_to_hub: the Hub did not take it ({type(error).__name__}): {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
