"""Remake the figures of the model card.

    python scripts/make_figures.py [--training-log LOG]

Acceptance by position and reliability come from a run of scripts/evaluate.py over the held-out passages, memory of long
prompts from one of scripts/measure_long_context.py; each takes some minutes. The training curves come from the log that
scripts/train.py leaves; without one they stay as they are.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, check_matplotlib
from train import plot_curves

FIGURES = ROOT / "figures"
EVALUATED = ("acceptance_by_position.png", "reliability.png")
MEMORY = "long_context.png"
CURVES = "training.png"


def parse_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder to draw into (default: figures/)")
    parser.add_argument("--training-log", type=Path, metavar="LOG", help="log.jsonl of scripts/train.py")
    parser.add_argument("--quick", action="store_true", help="measure on little text only, to try the script")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the evaluation's figures to this file too")
    arguments = parser.parse_args(command_line)
    if arguments.training_log is not None and not arguments.training_log.is_file():
        parser.error(f"--training-log {arguments.training_log} is not a file; scripts/train.py leaves one in its --out")
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out is {arguments.out}, expected a folder, and this is a file")
    return arguments


def main(command_line: list[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    check_matplotlib()
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw_evaluation(arguments)
    draw_memory(arguments)
    drawn = [*EVALUATED, MEMORY]
    if arguments.training_log is not None:
        plot_curves(arguments.training_log, arguments.out / CURVES)
        drawn.append(CURVES)
    for name in drawn:
        print(arguments.out / name)


def draw_evaluation(arguments: argparse.Namespace) -> None:
    """Let scripts/evaluate.py measure and draw, and keep what the card shows of its figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("evaluate.py")), "--plot", folder]
        command += ["--limit", "2", "--max-new-tokens", "16"] if arguments.quick else []
        command += [] if arguments.json is None else ["--json", str(arguments.json)]
        subprocess.run(command, check=True)
        for name in EVALUATED:
            shutil.copy(Path(folder) / name, arguments.out / name)


def draw_memory(arguments: argparse.Namespace) -> None:
    """Let scripts/measure_long_context.py measure and draw."""
    command = [sys.executable, str(Path(__file__).with_name("measure_long_context.py"))]
    command += ["--plot", str(arguments.out / MEMORY), "--contexts", "64", "--loop-contexts", "64", "--batches", "1"]
    command += ["--prompts", "64", "512", "--pieces", "64", "0"] if arguments.quick else []
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
