"""scripts/measure_memory.py: chunks need a fraction of the naive way's memory."""

import json
import sys

import measure_memory
import pytest


def test_chunks_need_a_fraction_of_the_naive_way(tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures.json"
    options = ["--anchors", "64", "--length", "512", "--chunks", "2", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["measure_memory.py", *options])
    measure_memory.main()
    peak = json.loads(out.read_text())["peak_mebibytes"]
    assert list(peak) == ["naive", "2 anchors a chunk"]
    # One model's logits of all blocks are 64 x 7 x 32768 float32; the naive way holds several of that size at once.
    assert peak["naive"] > 64 * 7 * 32768 * 4 / 2**20
    assert peak["2 anchors a chunk"] < peak["naive"] / 2
    assert f"| naive | {peak['naive']:.0f} |" in capsys.readouterr().out


def test_wrong_sizes_are_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure_memory.py", "--anchors", "32", "--length", "20"])
    with pytest.raises(SystemExit):
        measure_memory.main()
    assert "--anchors 32" in capsys.readouterr().err
