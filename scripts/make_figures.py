"""Remake the figures of the model card.

    python scripts/make_figures.py

Acceptance by position and reliability come from a run of scripts/evaluate.py over the held-out passages, which takes
some minutes. The training curves come from figures/training.jsonl, the log of the run that trained the small draft,
thinned to a line for each 50 steps; `--training-log` makes that file anew from the log of a new run.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, check_matplotlib
from train import draw_curves, read_log, thin

FIGURES = ROOT / "figures"
EVALUATED = ("acceptance_by_position.png", "reliability.png")
CURVES = "training.png"
TRAINING_LOG = "training.jsonl"
STEPS_A_LINE = 50


def parse_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder to draw into (default: figures/)")
    parser.add_argument(
        "--training-log", type=Path, metavar="LOG", help="log.jsonl of scripts/train.py (default: the thinned one)"
    )
    parser.add_argument("--quick", action="store_true", help="evaluate two short answers only, to try the script")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the evaluation's figures to this file too")
    arguments = parser.parse_args(command_line)
    if arguments.training_log is not None and not arguments.training_log.is_file():
        parser.error(f"--training-log {arguments.training_log} is not a file; scripts/train.py leaves one in its --out")
    if arguments.training_log is not None and len(read_log(arguments.training_log)) < STEPS_A_LINE:
        parser.error(f"--training-log {arguments.training_log} has fewer than {STEPS_A_LINE} steps, too few for curves")
    if arguments.training_log is None and not (FIGURES / TRAINING_LOG).is_file():
        parser.error(
            f"{FIGURES / TRAINING_LOG} is missing: give the log.jsonl of the small draft's training as --training-log"
        )
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out is {arguments.out}, expected a folder, and this is a file")
    return arguments


def main(command_line: list[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    check_matplotlib()
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw_training(arguments)
    draw_evaluation(arguments)
    for name in (*EVALUATED, CURVES):
        print(arguments.out / name)


def draw_training(arguments: argparse.Namespace) -> None:
    """Draw the training curves; from a whole log by way of the thinned one, which is saved beside them."""
    if arguments.training_log is None:
        records = read_log(FIGURES / TRAINING_LOG)
    else:
        records = [rounded(record) for record in thin(read_log(arguments.training_log), STEPS_A_LINE)]
        lines = [json.dumps(record) + "\n" for record in records]
        (arguments.out / TRAINING_LOG).write_text("".join(lines), "utf-8")
    draw_curves(records, arguments.out / CURVES)


def rounded(record: dict) -> dict:
    """The record with four digits, more than a curve shows."""
    return {
        name: [round(number, 4) for number in value] if isinstance(value, list) else round(value, 4)
        for name, value in record.items()
    }


def draw_evaluation(arguments: argparse.Namespace) -> None:
    """Let scripts/evaluate.py measure and draw, and keep what the card shows of its figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("evaluate.py")), "--plot", folder]
        command += ["--limit", "2", "--max-new-tokens", "16"] if arguments.quick else []
        command += [] if arguments.json is None else ["--json", str(arguments.json)]
        subprocess.run(command, check=True)
        for name in EVALUATED:
            shutil.copy(Path(folder) / name, arguments.out / name)


if __name__ == "__main__":
    main()
