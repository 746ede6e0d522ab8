"""`scripts/measure_widths.py`: the arithmetic of its figures, the texts it takes, and a run of all of it."""

import argparse
import json
import sys
from collections import Counter

import measure_widths as script
import pytest
import torch
from conftest import follow, make_scripted_draft, make_target, plain_greedy, random_ids


def test_rates_and_ratios():
    ways = [1, 2, "auto"]
    tokens = {("easy", 1): 10, ("easy", 2): 10, ("easy", "auto"): 10}
    tokens |= {("hard", 1): 20, ("hard", 2): 30, ("hard", "auto"): 20}
    seconds = {("easy", 1): 5.0, ("easy", 2): 2.0, ("easy", "auto"): 2.5}
    seconds |= {("hard", 1): 5.0, ("hard", 2): 15.0, ("hard", "auto"): 4.0}
    first = script.rates(tokens, seconds, ways)
    assert first["easy"] == {1: 2.0, 2: 5.0, "auto": 4.0} and first["hard"] == {1: 4.0, 2: 2.0, "auto": 5.0}
    assert first["both"] == pytest.approx({1: 30 / 10, 2: 40 / 17, "auto": 30 / 6.5})
    second = {kind: {way: 2 * speed for way, speed in speeds.items()} for kind, speeds in first.items()}
    histograms = {"easy": torch.tensor([0, 3]), "hard": torch.tensor([3, 1])}
    widths = Counter({("easy", 2): 3, ("easy", 1): 1, ("hard", 1): 2})
    figures = script.summarize([first, second], ways, histograms, widths)
    assert figures["easy"]["tokens/s"]["2"] == {"median": 7.5, "lowest": 5.0, "highest": 10.0}
    assert [figures[kind]["best fixed width"] for kind in ("easy", "hard", "both")] == [2, 1, 1]
    assert figures["easy"]["auto over the best fixed width"]["median"] == pytest.approx(0.8)
    assert figures["hard"]["auto over the full width"]["median"] == pytest.approx(2.5)
    assert figures["easy"]["mean width of auto"] == 1.75 and figures["easy"]["accepted + 1 at full width"] == 2.0
    assert "mean width of auto" not in figures["both"] and figures["hard"]["accepted + 1 at full width"] == 1.25


def test_the_texts_are_the_best_and_the_worst_drafted():
    target = make_target("text")
    prompts = [random_ids(length) for length in (4, 5, 6)]
    texts = {prompt.shape[1]: plain_greedy(target, prompt, 30) for prompt in prompts}
    right = {4: 2, 5: 7, 6: 0}
    scripts = {length: follow(text, lambda length=length: right[length]) for length, text in texts.items()}

    def propose(ids):
        length = next(n for n, text in texts.items() if torch.equal(ids[:, : n + 1], text[:, : n + 1]))
        return scripts[length](ids)

    arguments = argparse.Namespace(max_new_tokens=16, limit=1)
    chosen = script.choose_texts(target, make_scripted_draft(target, propose), prompts, arguments)
    assert torch.equal(chosen["easy"][0], prompts[1]) and torch.equal(chosen["hard"][0], prompts[2])


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_widths.py", *arguments])
    script.main()


def test_the_whole_script(tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures.json"
    options = ("--limit", "1", "--repeats", "1", "--max-new-tokens", "40", "--json", str(out))
    run_main(monkeypatch, *options)
    figures = json.loads(out.read_text("utf-8"))
    assert figures["settings"] == {"limit": 1, "repeats": 1, "max_new_tokens": 40}
    costs = figures["seconds by width"]
    assert len(costs) == 8 and 0 < costs[0] and costs == sorted(costs)
    for kind in ("easy", "hard", "both"):
        assert list(figures["texts"][kind]["tokens/s"]) == [*"12345678", "auto"]
    assert (
        figures["texts"]["easy"]["accepted + 1 at full width"] > figures["texts"]["hard"]["accepted + 1 at full width"]
    )
    shown = capsys.readouterr().out
    assert "| auto " in shown and "easy: auto is" in shown and f"take {1e3 * costs[0]:.1f}, " in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--limit", "0"), "--limit is 0"),
        (("--repeats", "0"), "--repeats is 0"),
        (("--max-new-tokens", "15"), "--max-new-tokens is 15, expected at least 16"),
        (("--target", "elsewhere"), "--target is given without --draft"),
        (("--prompts", "/dev/null"), "/dev/null holds 0 questions, expected 12"),
        (("--json", "/nowhere/out.json"), "--json is /nowhere/out.json"),
    ],
)
def test_bad_arguments_end_with_a_message(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, *arguments)
    assert message in capsys.readouterr().err
