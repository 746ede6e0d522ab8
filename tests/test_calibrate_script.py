"""`scripts/calibrate.py`: the error it minimises, the fit, what it saves, and a run of all of it."""

import hashlib
import json
import shutil
import sys

import calibrate as script
import pytest
import torch
import transformers
from common import TINY_DRAFT
from evaluate import reliability

SHARP = torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5])


def overconfident(rounds: int, seed: int = 0):
    """Rounds whose true conditional acceptance is sigmoid(logits / SHARP)."""
    torch.manual_seed(seed)
    logits = 1 + 2 * torch.randn(rounds, 7)
    accepted = (torch.rand(rounds, 7) < (logits / SHARP).sigmoid()).long().cumprod(dim=1).sum(dim=1)
    return logits, accepted


def test_the_error_is_that_of_the_evaluation():
    probabilities, outcomes = torch.rand(500, dtype=torch.float64), torch.randint(0, 2, (500,)).double()
    probabilities[:3] = torch.tensor([0.0, 1.0, 0.3])
    expected = reliability(list(zip(probabilities.tolist(), outcomes.bool().tolist())))["expected_calibration_error"]
    assert script.calibration_error(probabilities, outcomes) == pytest.approx(expected)


def test_labels_of_a_prefix_are_known_of_every_round():
    assert script.labels(torch.tensor([0, 2, 3]), 3).tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_the_fit_finds_the_temperatures_and_lowers_the_error_of_other_rounds():
    fit, test = overconfident(20_000), overconfident(20_000, seed=1)
    figures = script.calibrate(fit, test)
    # Where few rounds are left the product is near 0 whatever the temperature.
    assert figures["temperatures"][:3] == pytest.approx(SHARP[:3].tolist(), rel=0.15)
    assert figures["temperatures"][3:5] == pytest.approx([1.0, 1.0], rel=0.4)
    error = figures["expected_calibration_error"]
    assert error["after"] < 0.012 < 0.03 < error["before"] and error["fit, after"] < error["fit, before"]
    assert figures["rounds"] == {"fit": 20_000, "test": 20_000}
    row = figures["by_position"][0]
    assert row["survived"] == pytest.approx((test[1] >= 1).double().mean().item())
    by_hand = list(zip(test[0][:, 0].double().sigmoid().tolist(), (test[1] >= 1).tolist()))
    assert row["before"] == pytest.approx(reliability(by_hand)["expected_calibration_error"])


def test_each_position_is_fitted_with_those_before_it_fixed():
    """What comes after a position changes nothing at it; and the best of the grid is found, by a slow search."""
    logits, accepted = overconfident(2_000)
    temperatures = script.fit_temperatures(logits, accepted)
    assert script.fit_temperatures(logits[:, :3], accepted.clamp(max=3)) == temperatures[:3]
    for place in (0, 2):
        errors = {}
        for value in script.TEMPERATURES:
            tried = torch.tensor([*temperatures[:place], value])
            survival = (logits[:, : place + 1].double() / tried).sigmoid().prod(dim=1)
            pairs = list(zip(survival.tolist(), (accepted > place).tolist()))
            errors[value] = reliability(pairs)["expected_calibration_error"]
        assert temperatures[place] == pytest.approx(min(errors, key=errors.get), abs=1e-4)


def test_a_position_that_says_nothing_keeps_its_logits():
    assert script.fit_temperatures(torch.zeros(50, 7), torch.zeros(50, dtype=torch.long)) == [1.0] * 7


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["calibrate.py", *arguments])
    script.main()


def test_the_whole_script(tmp_path, monkeypatch, capsys):
    """Nothing is written without --save; with it, config.json gets one more field, which loads and decides."""
    folder, out = tmp_path / "draft", tmp_path / "figures.json"
    shutil.copytree(TINY_DRAFT, folder)
    before = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    options = ("--draft", str(folder), "--limit", "4", "--max-new-tokens", "24", "--json", str(out))
    run_main(monkeypatch, *options)
    assert hashlib.sha256((folder / "config.json").read_bytes()).hexdigest() == before
    figures = json.loads(out.read_text("utf-8"))
    shown = capsys.readouterr().out
    assert min(figures["rounds"].values()) > 4 and len(figures["temperatures"]) == len(figures["by_position"]) == 7
    assert f"{figures['expected_calibration_error']['after']:.4f} after" in shown and "Saved" not in shown
    run_main(monkeypatch, *options, "--temperature", "1", "--save")
    sampled = json.loads(out.read_text("utf-8"))
    saved = json.loads((folder / "config.json").read_text("utf-8"))
    assert saved.pop("confidence_temperatures") == sampled["temperatures"] != figures["temperatures"]
    assert saved == json.loads((TINY_DRAFT / "config.json").read_text("utf-8"))
    assert "Saved in" in capsys.readouterr().out
    draft = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
    draft.save_pretrained(tmp_path / "again")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert again.confidence_temperatures == draft.config.confidence_temperatures == sampled["temperatures"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--temperature", "-1"), "--temperature is -1.0"),
        (("--limit", "1"), "--limit is 1, expected at least 2"),
        (("--max-new-tokens", "1"), "--max-new-tokens is 1"),
        (("--target", "elsewhere"), "--target is given without --draft"),
        (("--draft", "hub/id", "--save"), "--draft must be a local folder"),
        (("--prompts", "/dev/null"), "0 question of --prompts /dev/null"),
        (("--json", "/nowhere/out.json"), "--json is /nowhere/out.json"),
    ],
)
def test_bad_arguments_end_with_a_message(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, *arguments)
    assert message in capsys.readouterr().err
