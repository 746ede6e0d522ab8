"""`scripts/generate.py` on the pair that ships: what it prints, what it writes, and what it refuses."""

import json
import re
import subprocess
import sys

import generate as script
import pytest
from conftest import ROOT


def test_greedy_text_is_what_the_target_writes_alone(tmp_path):
    """As a stranger runs it: a new process, another folder, no arguments that matter."""
    out = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--max-new-tokens", "40", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd="/")
    assert result.returncode == 0, result.stderr[-2000:]
    figures = json.loads(out.read_text("utf-8"))
    assert figures["same_as_target_alone"] is True and "the same tokens" in result.stdout
    assert 1 <= figures["new_tokens"] <= 40
    rounds = figures["rounds"]
    assert sum(figures["acceptance_histogram"]) == rounds and 1.0 <= figures["acc_len"] <= 8.0
    # The streamed text is the returned text, and the closing line has its figures.
    assert figures["text"].strip() in result.stdout
    assert f"{figures['new_tokens']} tokens in {rounds} rounds, acc_len {figures['acc_len']:.2f}" in result.stdout


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    script.main()


def test_sampling_repeats_with_its_seed_and_reads_a_prompt_file(tmp_path, monkeypatch, capsys):
    prompt, out = tmp_path / "prompt.txt", tmp_path / "figures.json"
    prompt.write_text("import os\n", "utf-8")
    texts = []
    for seed in ("1", "1", "2"):
        options = ("--prompt-file", str(prompt), "--temperature", "1.0", "--max-new-tokens", "24", "--seed", seed)
        run_main(monkeypatch, *options, "--json", str(out))
        figures = json.loads(out.read_text("utf-8"))
        assert "import os\n" in capsys.readouterr().out and "same_as_target_alone" not in figures
        texts.append(figures["text"])
    assert texts[0] == texts[1] != texts[2]


def test_a_run_without_rounds_has_no_acceptance_length(tmp_path, monkeypatch):
    out = tmp_path / "figures.json"
    tiny = ROOT / "examples" / "tiny-kimi-k3"
    run_main(monkeypatch, "--target", str(tiny), "--max-new-tokens", "1", "--json", str(out))
    figures = json.loads(out.read_text("utf-8"))
    assert figures["rounds"] == 0 and figures["acc_len"] is None and figures["tokens_per_round"] is None


def test_drafts_are_shown_with_what_became_of_them(tmp_path, monkeypatch, capsys):
    out, greedy = tmp_path / "figures.json", ("--max-new-tokens", "24", "--json")
    run_main(monkeypatch, *greedy, str(out))
    text = json.loads(out.read_text("utf-8"))["text"]
    capsys.readouterr()
    run_main(monkeypatch, *greedy, str(out), "--show-drafts")
    figures, shown = json.loads(out.read_text("utf-8")), capsys.readouterr().out
    assert figures["same_as_target_alone"] is True and figures["text"] == text
    pieces = figures["pieces"]
    staying = [piece for piece in pieces if piece["kind"] not in ("prompt", "rejected")]
    assert "".join(piece["text"] for piece in staying) == text and len(staying) == figures["new_tokens"]
    assert {piece["round"] for piece in pieces} == {None, *range(1, figures["rounds"] + 1)}
    # Not a terminal, so in marks; taking the rejected ones and the marks out leaves the text.
    plain = re.sub(r"\[-.*?-\]", "", shown)
    for mark in ("{+", "+}", "⏎"):
        plain = plain.replace(mark, "")
    assert plain.startswith(script.PROMPT + text) and "[-draft, rejected-]" in shown


def test_showing_drafts_without_rich_ends_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, "--show-drafts")
    assert "rich, which is missing: pip install -r requirements-training.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--temperature", "-1"), "--temperature is -1.0"),
        (("--max-new-tokens", "0"), "--max-new-tokens is 0"),
        (("--target", "elsewhere"), "--target is given without --draft"),
        (("--prompt-file", "/nowhere/prompt.txt"), "--prompt-file /nowhere/prompt.txt is not a file"),
        (("--prompt", "a", "--prompt-file", "b"), "not allowed with"),
        (("--prompt", ""), "--prompt is empty"),
        (("--prompt-file", "/dev/null"), "--prompt-file /dev/null is not a file"),
    ],
)
def test_bad_arguments_end_with_a_message(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, *arguments)
    assert message in capsys.readouterr().err
