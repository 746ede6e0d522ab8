"""`scripts/make_figures.py`: it makes every figure that the model card links, with the scripts' own drawings."""

import json
import re

import make_figures as script
import pytest
from conftest import ROOT
from matplotlib.image import imread


def write_log(path, steps: int = 400):
    """A log as scripts/train.py leaves it, whose curves move."""
    with path.open("w") as log:
        for step in range(1, steps + 1):
            names = ("loss", "ce", "l1", "bce", "expected_length")
            record = {name: (k + 1) / step**0.5 for k, name in enumerate(names)}
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
        str(out / name) for name in (*script.EVALUATED, script.MEMORY, script.CURVES)
    ]


def test_without_a_log_the_training_curves_stay(tmp_path, monkeypatch, capsys):
    for name in ("draw_evaluation", "draw_memory"):
        monkeypatch.setattr(script, name, lambda arguments: None)
    script.main(["--out", str(tmp_path)])
    assert not (tmp_path / script.CURVES).exists() and script.CURVES not in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--training-log", "nowhere.jsonl"], "--training-log nowhere.jsonl is not a file; scripts/train.py leaves"),
        (["--training-log", "/dev/null"], "--training-log /dev/null is not a file"),
        (["--training-log", "{log}", "--out", "{log}"], "expected a folder, and this is a file"),
    ],
)
def test_wrong_options_are_named(options, message, tmp_path, capsys):
    log = write_log(tmp_path / "log.jsonl", 50)
    with pytest.raises(SystemExit, match="2"):
        script.main([option.format(log=log) for option in options])
    assert message in capsys.readouterr().err
