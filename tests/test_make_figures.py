"""`scripts/make_figures.py`: it makes every figure that the model card links, with the scripts' own drawings."""

import json
import re

import make_figures as script
import pytest
import train
from conftest import ROOT
from matplotlib.image import imread


def write_log(path, steps: int = 400):
    """A log as scripts/train.py leaves it, whose curves move."""
    with path.open("w") as log:
        for step in range(1, steps + 1):
            record = {name: (k + 1) / step**0.5 for k, name in enumerate(train.CURVES)}
            acceptance = [0.9 - 1 / (step + k) for k in range(7)]
            log.write(json.dumps({"step": step, **record, "acceptance": acceptance, "seconds": 0.5}) + "\n")
    return path


def test_every_figure_of_the_readme_is_made(tmp_path, capsys):
    log, out, figures = write_log(tmp_path / "log.jsonl"), tmp_path / "figures", tmp_path / "figures.json"
    script.main(["--quick", "--training-log", str(log), "--out", str(out), "--json", str(figures)])
    linked = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text("utf-8"))
    assert linked and {f"figures/{path.name}" for path in out.glob("*.png")} == set(linked)
    assert all(len({*imread(path).ravel().tolist()}) > 10 for path in out.glob("*.png"))  # none is blank
    assert len(json.loads(figures.read_text("utf-8"))["questions"]) == 2
    assert [line for line in capsys.readouterr().out.splitlines() if line.endswith(".png")] == [
        str(out / name) for name in (*script.EVALUATED, script.CURVES)
    ]


def test_curves_of_a_thinned_log_are_those_of_the_whole(tmp_path, monkeypatch):
    log = write_log(tmp_path / "log.jsonl")
    train.plot_curves(log, tmp_path / "whole.png")
    monkeypatch.setattr(script, "draw_evaluation", lambda arguments: None)
    script.main(["--training-log", str(log), "--out", str(tmp_path)])
    monkeypatch.setattr(script, "FIGURES", tmp_path)  # the saved file alone is enough the next time
    script.main(["--out", str(tmp_path / "again")])
    first, again = (imread(folder / "training.png") for folder in (tmp_path, tmp_path / "again"))
    assert (first == again).all() and abs(first - imread(tmp_path / "whole.png")).mean() < 1e-3
    assert first.std() > 0.1 and len((tmp_path / "training.jsonl").read_text().splitlines()) == 8


def test_a_thinned_log_holds_means():
    records = [
        {"step": step, **dict.fromkeys(train.CURVES, float(step)), "acceptance": [step / 2, float("nan")]}
        for step in range(11, 16)
    ]
    records[1]["acceptance"][1] = 3.0
    thinned = train.thin(records, 2)
    assert [(record["step"], record["loss"], record["acceptance"][0]) for record in thinned] == [
        (12, 11.5, 5.75),
        (14, 13.5, 6.75),
    ]
    assert thinned[0]["acceptance"][1] == 3.0  # a position without rows is left out of the mean


@pytest.mark.parametrize(
    "options, message",
    [
        (["--training-log", "nowhere.jsonl"], "--training-log nowhere.jsonl is not a file; scripts/train.py leaves"),
        ([], "training.jsonl is missing: give the log.jsonl of the small draft's training as --training-log"),
        (["--training-log", "/dev/null"], "--training-log /dev/null is not a file"),
        (["--training-log", "{log}", "--out", "{log}"], "expected a folder, and this is a file"),
        (["--training-log", "{short}"], "short.jsonl has fewer than 50 steps, too few for curves"),
    ],
)
def test_wrong_options_are_named(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "FIGURES", tmp_path)
    files = {name: write_log(tmp_path / f"{name}.jsonl", steps) for name, steps in (("log", 50), ("short", 49))}
    options = [option.format(**files) for option in options]
    with pytest.raises(SystemExit, match="2"):
        script.main(options)
    assert message in capsys.readouterr().err
