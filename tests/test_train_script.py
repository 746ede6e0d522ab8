"""scripts/train.py: what it saves loads and drafts, runs repeat and resume exactly, and mistakes are named."""

import json
import os
import subprocess
import sys

import pytest
import torch
import train
from accelerate.state import AcceleratorState, GradientState
from common import TINY_TARGET, load_target, plain_greedy, root_class
from safetensors.torch import load_file
from transformers import AutoModel

BLOCK = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts of random tokens and a one-layer draft for the tiny Kimi K3."""
    folder = tmp_path_factory.mktemp("training")
    generator = torch.Generator().manual_seed(0)
    with (folder / "texts.jsonl").open("w") as out:
        for length in (24, 24, 24, 24, 24, 24, 30, 18):
            ids = torch.randint(0, 2000, (length,), generator=generator).tolist()
            out.write(json.dumps({"input_ids": ids, "prompt_length": 8}) + "\n")
    config = json.loads((train.TINY_DRAFT / "config.json").read_text())
    config.update(num_hidden_layers=1, layer_types=["full_attention"], intermediate_size=64)
    (folder / "draft.json").write_text(json.dumps(config))
    return folder


def command_line(folder, out, *options, data="texts.jsonl"):
    arguments = ["--draft-config", folder / "draft.json", "--data", folder / data, "--out", out, "--batch-size", 2]
    arguments += ["--steps", 4, "--anchors", 6, "--save-every", 2, "--warmup-steps", 1, "--learning-rate", 0.002]
    return [*map(str, [*arguments, *options])]


@pytest.fixture
def run_train(folder):
    """Run the script in this process."""

    def run(out, *options, **files):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        train.main(command_line(folder, out, *options, **files))
        return read_log(out)

    return run


def read_log(out):
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    for record in records:
        del record["seconds"]
    return records


def interrupt_at(step, monkeypatch):
    """Let the training step after `step` done ones end as Ctrl-C does."""
    whole_step = train.train_step

    def interrupted(run, batches, number):
        if number == step:
            raise KeyboardInterrupt
        return whole_step(run, batches, number)

    monkeypatch.setattr(train, "train_step", interrupted)


def test_a_saved_draft_loads_and_holds_only_draft_tensors(run_train, tmp_path):
    log = run_train(tmp_path)
    assert [record["step"] for record in log] == [1, 2, 3, 4]
    assert log[-1]["loss"] == pytest.approx(0.1 * log[-1]["ce"] + 0.9 * log[-1]["l1"] + log[-1]["bce"], rel=1e-5)
    assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "modeling_dspark.py", "curves.png"}
    assert not (tmp_path / "checkpoint").exists()

    draft = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert load_file(tmp_path / "model.safetensors").keys() == draft.state_dict().keys()
    target, tokenizer = load_target(TINY_TARGET)
    prompt = tokenizer("def main():", return_tensors="pt").input_ids
    written = draft.eval().generate(prompt, target=target, max_new_tokens=12, do_sample=False)
    assert torch.equal(written, plain_greedy(target, prompt, 12))


@pytest.mark.parametrize(
    "extra", [[], ["--gradient-accumulation", 2, "--schedule", "constant", "--optimizer", "adamw"]]
)
def test_a_resumed_run_repeats_the_unbroken_one(run_train, tmp_path, monkeypatch, extra):
    whole = run_train(tmp_path / "whole", *extra)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        interrupt_at(3, broken)
        run_train(tmp_path / "broken", *extra)
    assert len(read_log(tmp_path / "broken")) == 3  # one more than the checkpoint has
    assert run_train(tmp_path / "broken", *extra, "--resume") == whole
    weights, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_the_progress_bar_shows_loss_acceptance_by_position_and_expected_length(run_train, tmp_path, capsys):
    (*_, last) = run_train(tmp_path / "run")
    acceptance = " ".join(f"{rate:.2f}" for rate in last["acceptance"])
    assert len(last["acceptance"]) == 7
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert f"loss {last['loss']:.3f}, acceptance {acceptance}, expected length {last['expected_length']:.2f}" in shown


def test_resuming_with_another_recipe_is_refused(run_train, tmp_path, monkeypatch):
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        interrupt_at(2, broken)
        run_train(tmp_path)
    with pytest.raises(ValueError, match="--learning-rate is 0.5, but the checkpoint .* was made with 0.002"):
        run_train(tmp_path, "--resume", "--learning-rate", 0.5)


def test_resuming_without_a_checkpoint_is_refused(run_train, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_train(tmp_path, "--resume")
    assert "is no folder: start without --resume" in capsys.readouterr().err


def test_accumulated_gradients_are_those_of_one_large_batch(run_train, tmp_path):
    # Texts 0 to 3 are equally long and every position is an anchor, so all rows weigh the same either way.
    options = ("--steps", 1, "--anchors", 512, "--seed", seed_with_equal_texts_first())
    large = run_train(tmp_path / "large", *options, "--batch-size", 4)
    accumulated = run_train(tmp_path / "accumulated", *options, "--gradient-accumulation", 2)
    for name in ("loss", "ce", "l1", "bce", "grad_norm", "expected_length"):
        assert accumulated[0][name] == pytest.approx(large[0][name], rel=1e-4), name


def seed_with_equal_texts_first():
    """A seed whose first four texts are all among the six of equal length."""
    return next(
        seed for seed in range(100) if torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:4].max() < 6
    )


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "DSparkLayer",
}


@pytest.mark.parametrize("settings", [{}, FSDP], ids=["replicated", "sharded"])
def test_two_processes_do_what_one_does_in_two_forwards(folder, run_train, tmp_path, settings):
    """Settings of accelerate alone decide how a run is distributed; here they come from the environment."""
    options = ("--optimizer", "adamw", "--steps", 3)
    alone = run_train(tmp_path / "alone", *options, "--gradient-accumulation", 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", train.__file__]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **settings}
    command += command_line(folder, tmp_path / "two", *options)
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    for together, expected in zip(read_log(tmp_path / "two"), alone, strict=True):
        for name in ("loss", "ce", "l1", "bce", "grad_norm", "acceptance"):
            assert together[name] == pytest.approx(expected[name], rel=1e-4, nan_ok=True), name
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "alone"))
    assert weights.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(weights[name], expected[name], atol=1e-4), name


def test_schedules(run_train, tmp_path):
    cosine = [record["learning_rate"] for record in run_train(tmp_path / "a")]
    constant = [record["learning_rate"] for record in run_train(tmp_path / "b", "--schedule", "constant")]
    assert cosine == pytest.approx([0.0, 0.002, 0.0015, 0.0005])
    assert constant == pytest.approx([0.0, 0.002, 0.002, 0.002])


def test_bf16_autocast_follows_float32(run_train, tmp_path):
    full, half = (run_train(tmp_path / kind, "--steps", 2, "--mixed-precision", kind) for kind in ("no", "bf16"))
    assert half[1]["loss"] != full[1]["loss"]
    assert half[1]["loss"] == pytest.approx(full[1]["loss"], rel=0.02)
    weights = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_weights_are_saved_in_the_dtype_of_the_config(tmp_path):
    draft_class = root_class()
    fields = json.loads((train.TINY_DRAFT / "config.json").read_text())
    draft = draft_class(draft_class.config_class(**{**fields, "dtype": "bfloat16"})).float()
    train.save_draft(draft, {f"draft.{name}": tensor for name, tensor in draft.state_dict().items()}, tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_links_in_the_output_folder_are_not_written_through(run_train, tmp_path):
    source = tmp_path / "source.py"
    source.write_text("the repository's own")
    (tmp_path / "out").mkdir()
    os.symlink(source, tmp_path / "out" / "modeling_dspark.py")
    run_train(tmp_path / "out", "--steps", 1)
    assert source.read_text() == "the repository's own"


@pytest.mark.parametrize(
    "line",
    ["{", "[1, 2]", '{"input_ids": [1, 2]}', '{"input_ids": "text", "prompt_length": 1}', '{"turns": ["a"]}'],
)
def test_lines_that_are_no_text_are_named(folder, run_train, tmp_path, line):
    good = (folder / "texts.jsonl").read_text().splitlines()[0]
    (folder / "bad.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2 is .* as scripts/regenerate.py writes it"):
        run_train(tmp_path / "out", data="bad.jsonl")
    assert not (tmp_path / "out").exists()


def test_data_without_a_continuation_is_refused(run_train, tmp_path):
    with pytest.raises(ValueError, match="no text with a continuation within --max-length 8"):
        run_train(tmp_path, "--max-length", 8)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--steps", "0"], "--steps is 0, expected at least 1"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0"),
        (["--draft-config", "nowhere.json"], "--draft-config nowhere.json is not a file"),
        (["--data", "nowhere.jsonl"], "--data nowhere.jsonl is not a file; scripts/regenerate.py makes one"),
    ],
)
def test_wrong_options_are_named(run_train, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit):
        run_train(tmp_path, *options)
    assert message in capsys.readouterr().err


def test_another_target_needs_its_own_data(capsys):
    with pytest.raises(SystemExit):
        train.main(["--target", "some/other", "--draft-config", str(__file__)])
    assert "--target is given without --data" in capsys.readouterr().err


def test_rows_of_a_batch():
    batch = train.collate([(torch.arange(5), 2), (torch.arange(3), 1)])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, False, True, True, True], [False, True, True, False, False]]
