"""scripts/ablate.py: the variant's features are what transformers hands out, and only while it is wanted."""

import json
import sys
from types import SimpleNamespace

import ablate
import pytest
import torch
from common import TINY_DRAFT, TINY_TARGET, load_draft, load_target, root_module


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = load_target(TINY_TARGET)
    return load_draft(TINY_DRAFT, target), target, tokenizer


def test_features_come_from_output_hidden_states_while_wanted(pair, no_grad):
    draft, target, _ = pair
    ids = torch.arange(12)[None]
    tap_ids = draft.config.target_layer_ids
    verifiable = root_module(type(draft), "target_kimi_k3").VerifiableTarget(target, tap_ids)
    taps = verifiable.observe(ids).features
    with ablate.hidden_states_as_features(type(draft), wanted=True):
        features = verifiable.observe(ids).features
    states = target(ids, output_hidden_states=True).hidden_states
    assert torch.allclose(features, torch.cat([states[tap_id + 1] for tap_id in tap_ids], dim=-1), atol=1e-5)
    assert not torch.allclose(features, taps, atol=0.1)
    with ablate.hidden_states_as_features(type(draft), wanted=False):
        assert torch.equal(verifiable.observe(ids).features, taps)
    assert torch.equal(verifiable.observe(ids).features, taps)


def test_generation_with_the_wrong_features_is_exact_and_accepts_less(pair):
    """The shipped draft, fed what it was not trained on: the text stays the target's, acceptance falls."""
    draft, target, tokenizer = pair
    options = {"target": target, "max_new_tokens": 60, "do_sample": False}
    settings = SimpleNamespace(limit=6, max_new_tokens=60)
    ids = torch.arange(300, 340)[None]
    texts, acc_lens = [], []
    for wrong in (False, True):
        with ablate.hidden_states_as_features(type(draft), wrong):
            texts.append(draft.generate(ids, **options))
            acc_lens.append(ablate.measure(draft, target, tokenizer, 0.0, settings)["acc_len"])
    assert torch.equal(*texts)
    assert acc_lens[0] > acc_lens[1] + 0.3


def test_all_variants_are_trained_once_and_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "FOLDER", tmp_path)
    for option, value in (("--data", tmp_path / "texts.jsonl"), ("--batch-size", 1), ("--anchors", 4)):
        monkeypatch.setattr(ablate, "TRAINING", [*ablate.TRAINING, option, str(value)])
    ids = torch.randint(0, 2000, (1, 24)).tolist()[0]
    (tmp_path / "texts.jsonl").write_text(json.dumps({"input_ids": ids, "prompt_length": 4}) + "\n")
    command_line = ["--steps", "2", "--limit", "1", "--max-new-tokens", "9", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["ablate.py", *command_line])
    ablate.main()
    first = capsys.readouterr().out
    assert first.count("Training the variant") == 3
    figures = json.loads((tmp_path / "out.json").read_text())
    assert list(figures["variants"]) == list(ablate.VARIANTS)
    for variant, row in figures["variants"].items():
        line = next(line for line in first.splitlines() if line.startswith(f"| {variant} "))
        assert f" {row['greedy']['acc_len']:.2f} |" in line and f" {row['sampled']['acc_len']:.2f} |" in line
        assert 1.0 <= row["greedy"]["acc_len"] <= 8.0 and 1.0 <= row["sampled"]["acc_len"] <= 8.0
    no_markov = json.loads((tmp_path / "no_Markov_head-2" / "config.json").read_text())
    assert no_markov["dflash_config"]["markov_rank"] == 0
    ablate.main()
    second = capsys.readouterr().out
    assert "Training the variant" not in second and second.strip() in first
