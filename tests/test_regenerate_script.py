"""scripts/regenerate.py: the target's own continuations, token for token, cut at its stop tokens."""

import json

import pytest
import regenerate
import torch
from common import TINY_TARGET, load_target, plain_greedy, read_prompts, stop_ids


@pytest.fixture(scope="module")
def target():
    return load_target(TINY_TARGET)[0]


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(*options):
        arguments = ["--out", tmp_path / "texts.jsonl", "--max-new-tokens", 6, *options]
        monkeypatch.setattr("sys.argv", ["regenerate.py", *map(str, arguments)])
        regenerate.main()
        return [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]

    return run


def test_greedy_texts_are_what_the_target_writes(run, target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    turns = ["import os\nimport sys\n", "def main():\n", "def mean():\n", "class Tree:\n    pass\n"]
    prompts.write_text("".join(json.dumps({"turns": [turn, "never read"]}) + "\n" for turn in turns))
    rows = run("--prompts", prompts, "--temperatures", 0)
    assert len(rows) == len(turns)
    for row in rows:
        prompt = torch.tensor([row["input_ids"][: row["prompt_length"]]])
        assert row["input_ids"] == plain_greedy(target, prompt, 6, stop_ids(target))[0].tolist()


def test_temperatures_take_turns_and_a_seed_repeats_the_texts(run):
    first = run("--samples", 8, "--batch-size", 4)
    assert [row["prompt_length"] for row in first] == [regenerate.PASSAGE] * 8
    assert run("--samples", 8, "--batch-size", 4) == first
    hot = run("--samples", 8, "--batch-size", 4, "--temperatures", 0, 9)
    assert hot[:4] == first[:4] and hot[4:] != first[4:]


def test_texts_end_at_the_stop_token():
    assert regenerate.up_to_stop([9, 1, 2, 9, 3], prompt_length=2, stops=(9,)) == [9, 1, 2, 9]
    assert regenerate.up_to_stop([9, 1, 2], prompt_length=1, stops=(9,)) == [9, 1, 2]


def test_batches_hold_one_length_each():
    prompts = [torch.full((length,), i) for i, length in enumerate([3, 2, 3, 3, 2])]
    batches = list(regenerate.batches_of_one_length(prompts, size=2))
    assert [batch[:, 0].tolist() for batch in batches] == [[1, 4], [0, 2], [3]]


def test_held_out_prompts_come_from_files_the_target_never_saw(tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    monkeypatch.setattr("sys.argv", ["regenerate.py", "--held-out", str(prompts)])
    regenerate.main()
    questions = read_prompts(prompts)
    assert len(questions) == regenerate.HELD_OUT_PASSAGES
    held_out = "".join(regenerate.read(path) for path in regenerate.split_files()[1])
    # A token may end in the middle of a letter that is written in several bytes.
    assert sum(question["turns"][0] in held_out for question in questions) >= 0.95 * len(questions)


def test_an_interrupted_run_leaves_no_file(run, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(regenerate, "plain_batch", stop)
    with pytest.raises(KeyboardInterrupt):
        run("--samples", 2)
    assert not (tmp_path / "texts.jsonl").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--samples", 0], "--samples is 0, expected at least 1"),
        (["--temperatures", 0, -1], "--temperatures are"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl is not a file"),
        (["--target", "some/other"], "--target is given without --prompts"),
    ],
)
def test_wrong_options_are_named(run, capsys, options, message):
    with pytest.raises(SystemExit):
        run(*options)
    assert message in capsys.readouterr().err
