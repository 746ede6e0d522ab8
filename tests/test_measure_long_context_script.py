"""scripts/measure_long_context.py: its model, and that pieces set the memory of a prefill."""

import json
import sys

import measure_long_context as script
import pytest
import torch
from conftest import plain_greedy


def test_the_toy_continues_a_cut_prompt_as_a_whole_one():
    target, draft = script.make_pair()
    ids = torch.randint(4, 512, (1, 50))
    for piece in (50, 7):
        text = draft.generate(ids, target=target, max_new_tokens=12, do_sample=False, prefill_chunk_size=piece)
        assert torch.equal(text, plain_greedy(target, ids, 12))


def test_pieces_set_the_memory_of_a_prefill(tmp_path, monkeypatch, capsys):
    out, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    sizes = "--prompts 8192 --pieces 512 0 --contexts 64 512 --loop-contexts 64 --batches 2".split()
    monkeypatch.setattr(sys, "argv", ["measure_long_context.py", *sizes, "--json", str(out), "--plot", str(plot)])
    script.main()
    figures = json.loads(out.read_text())
    (prefill,) = figures["prefill"]
    # One piece holds at least the features and one layer's activations of every token.
    assert prefill["one piece"] > 8192 * (3 * 128 + 2 * 512) * 4 / 2**20
    assert prefill["pieces of 512"] < prefill["one piece"] / 3
    assert [row["context"] for row in figures["append"]] == [64, 512]
    (loop,) = figures["loop"]
    assert loop["target"] > 0 and loop["draft"] > 0 and 0 < loop["outside, %"] < 100
    assert plot.stat().st_size > 1000
    assert "| prompt | pieces of 512 | one piece |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [(["--contexts", "0"], r"--contexts \[0\]"), (["--pieces", "-1"], r"--pieces \[-1\]")],
)
def test_wrong_sizes_are_named(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure_long_context.py", *options])
    with pytest.raises(SystemExit):
        script.main()
    assert message.replace("\\", "") in capsys.readouterr().err
