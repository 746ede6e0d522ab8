"""scripts/convert_checkpoint.py: round trips through layouts built here, memory, refusals, what a crash leaves.

The foreign layouts are those of SpecForge 0.2.0, DeepSpec (`Qwen3DSparkModel`) and speculators 0.9.0.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check_checkpoint
import convert_checkpoint
import pytest
import torch
from checkpoint_files import build_config, expected_size, expected_tensors, make_header
from common import TINY_DRAFT
from conftest import ROOT, make_draft, make_target, plain_greedy
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen3Config

WEIGHTS, STATE = "model.safetensors", "training_state.pt"
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
NESTED = {"markov_head_type": "vanilla", "enable_confidence_head": True}  # written out, as foreign layouts have them
FREE = ("auto_map", "transformers_version")  # what a round trip may change: which code and version wrote it


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3")


@pytest.fixture(scope="module")
def ours(tmp_path_factory, target):
    """A small bfloat16 draft in this repository's layout."""
    folder = tmp_path_factory.mktemp("ours")
    make_draft(target, **NESTED).to(torch.bfloat16).save_pretrained(folder)
    return folder


def read(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)


def write(folder: Path, fields: dict, weights: dict[str, torch.Tensor], metadata=None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(weights, folder / WEIGHTS, metadata=metadata)
    return folder


def without(fields: dict, *names: str) -> dict:
    return {name: value for name, value in fields.items() if name not in names}


def target_s_own(fields: dict) -> dict[str, torch.Tensor]:
    size = fields["vocab_size"], fields["hidden_size"]
    return {f"{name}.weight": torch.randn(size, dtype=torch.bfloat16) for name in ("embed_tokens", "lm_head")}


def specforge_export(ours: Path, folder: Path) -> Path:
    """What `specforge export --to hf` writes, with both spellings of RoPE, and heads under their early name."""
    fields, weights = read(ours)
    fields |= {"auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "dtype": "bfloat16", "num_anchors": 512}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_theta"]}
    old = {("logit_head." + name if "_head." in name else name): tensor for name, tensor in weights.items()}
    return write(folder, fields, old)


def wrapped_training_state(ours: Path, folder: Path) -> Path:
    """A state saved while training, still under the names of the wrappers, with the target's tensors among them."""
    fields, weights = read(ours)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    wrapped = {
        "_fsdp_wrapped_module.draft_model." + re.sub(r"^(layers\.\d+)", r"\1._checkpoint_wrapped_module", name): tensor
        for name, tensor in weights.items()
    }
    own = {f"module.{name}": tensor for name, tensor in target_s_own(fields).items()}
    state = {"draft_state_dict": wrapped | own, "global_step": 7, "strategy": "dspark", "run_id": "run"}
    torch.save(state, folder / STATE)
    return folder / STATE


def deepspec(ours: Path, folder: Path) -> Path:
    fields, weights = read(ours)
    nested = fields["dflash_config"]
    flat = without(fields, "dflash_config", *FREE) | {
        **{name: nested[name] for name in ("target_layer_ids", "mask_token_id", *HEADS)},
        "architectures": ["Qwen3DSparkModel"],
        "num_anchors": 512,
    }
    return write(folder, flat, weights | target_s_own(fields), {"format": "pt"})


def speculators(ours: Path, folder: Path) -> Path:
    """Layers as `to_diff_dict` leaves them: without what equals the defaults of Qwen3Config."""
    fields, weights = read(ours)
    nested, defaults = fields["dflash_config"], Qwen3Config().to_dict()
    outside = ("dflash_config", "block_size", "num_target_layers", "architectures", "dtype", *FREE)
    layers = {name: value for name, value in without(fields, *outside).items() if defaults.get(name, ...) != value}
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "transformer_layer_config": without(layers, "rope_theta") | {"model_type": "qwen3"},
        "draft_vocab_size": fields["vocab_size"],
        "block_size": fields["block_size"],
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in nested["target_layer_ids"]],
        "mask_token_id": nested["mask_token_id"],
        "sliding_window_non_causal": False,
        "sample_from_anchor": True,
        **{name: nested[name] for name in HEADS},
        "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "somewhere"}},
    }
    return write(folder, config, weights | target_s_own(fields), {"format": "pt"})


LAYOUTS = [specforge_export, wrapped_training_state, deepspec, speculators]


def convert(source: Path, out: Path, *options: str) -> int:
    return convert_checkpoint.main([str(source), "--out", str(out), *options])


def drafts(folder: Path, target):
    """What a draft of this folder proposes for a fixed prompt, round by round, and the text."""
    draft = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    assert type(draft).__name__ == "DSparkDraftModel"
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    output = draft.generate(
        prompt, target=target, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_rounds=True
    )
    assert torch.equal(output.sequences, plain_greedy(target, prompt, 12))
    return [round.draft_tokens.tolist() for round in output.rounds]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(layout, ours, target, tmp_path, capsys):
    source, out = layout(ours, tmp_path / "foreign"), tmp_path / "back"
    depth = ["--num-target-layers", "5"] if layout is speculators else []
    assert convert(source, out, *depth) == 0, capsys.readouterr().err
    assert (out / WEIGHTS).read_bytes() == (ours / WEIGHTS).read_bytes()
    fields, back = read(ours)[0], read(out)[0]
    assert back["auto_map"]["AutoModel"] == "modeling_dspark.DSparkDraftModel"
    # Foreign layouts do not say how the confidence head was weighed in training, nor what is implied by the rest.
    for config in (fields, back):
        for name in FREE:
            del config[name]
        if layout in (deepspec, speculators):
            config["dflash_config"] = without(config["dflash_config"], "confidence_head_alpha", "attention_mode")
    if layout is speculators:  # it has no other fields of the layers than those that differ from the defaults
        fields = {name: value for name, value in fields.items() if name in back}
    assert back == fields
    assert check_checkpoint.main([str(out)]) == 0
    assert drafts(out, target) == drafts(ours, target)
    assert not list(tmp_path.glob(".*"))


def test_what_was_done_is_told(ours, tmp_path, capsys):
    out = tmp_path / "done.json"
    source = specforge_export(ours, tmp_path / "foreign")
    assert convert(source, tmp_path / "a", "--json", str(out)) == 0
    done = json.loads(out.read_text())
    assert done["layout"] == "SpecForge" and done["left_out"] == []
    assert done["renamed"]["logit_head.markov_head.markov_w1.weight"] == "markov_head.markov_w1.weight"
    assert len(done["renamed"]) == 4 and done["bytes"] == (tmp_path / "a" / WEIGHTS).stat().st_size
    assert "- logit_head.confidence_head.proj.bias is now confidence_head.proj.bias" in capsys.readouterr().out
    assert convert(deepspec(ours, tmp_path / "flat"), tmp_path / "b") == 0
    printed = capsys.readouterr().out
    assert "(layout of DeepSpec)" in printed and "- lm_head.weight is left out" in printed


def test_a_training_state_of_specforge_s_own_draft(ours, tmp_path, capsys):
    """The state as its trainer filters it, from its own class; the configuration is a file of another name."""
    name = "specforge.modeling.draft.dspark"
    reference = pytest.importorskip(name, reason="needs the test extra: pip install --no-deps specforge==0.2.0")
    from specforge.training.strategies.base import DSparkTrainStrategy

    fields, weights = read(ours)
    config = Qwen3Config(**without(fields, "rope_scaling"))
    config._attn_implementation = "eager"
    draft = reference.DSparkDraftModel(config).to(torch.bfloat16)
    draft.load_state_dict(weights)
    full = {f"draft_model.{name}": tensor for name, tensor in draft.state_dict().items()}
    full |= {f"target_{name}": tensor for name, tensor in target_s_own(fields).items()}
    filtered = DSparkTrainStrategy.checkpoint_state_filter(None, full)
    folder = tmp_path / "run-step7"
    folder.mkdir()
    torch.save({"draft_state_dict": filtered, "global_step": 7, "strategy": "dspark"}, folder / STATE)
    (tmp_path / "draft.json").write_text(json.dumps(fields))
    assert convert(folder, tmp_path / "out") == 1
    assert "--draft-config" in capsys.readouterr().err
    assert convert(folder, tmp_path / "out", "--draft-config", str(tmp_path / "draft.json")) == 0
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (ours / WEIGHTS).read_bytes()


def test_shards_and_gated_heads(tmp_path, target):
    """A sharded source of another kind of head, in float32."""
    made, source = tmp_path / "made", tmp_path / "source"
    make_draft(target, markov_head_type="rnn").save_pretrained(made)
    fields, weights = read(made)
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields))
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, source / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert convert(source, tmp_path / "out") == 0
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (made / WEIGHTS).read_bytes()
    assert read(tmp_path / "out")[0]["dtype"] == "float32"


MEASURE = """
import sys
from pathlib import Path
sys.path.insert(0, "scripts")
import convert_checkpoint
from checkpoint_files import build_config, meta_draft, read_config
from common import TINY_DRAFT
meta_draft(build_config(read_config(TINY_DRAFT)))  # whatever is imported on the way is there now

def memory(field):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field)).split()[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = memory("VmRSS")
assert convert_checkpoint.main(sys.argv[1:]) == 0
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to measure a peak anew")
def test_memory_stays_under_twice_the_largest_tensor(tmp_path):
    """Eight tensors of 64 MB, most of a file that is a hole on the disk."""
    fields = json.loads((TINY_DRAFT / "config.json").read_text())
    rows, rank = 2**17, 256
    fields |= {"vocab_size": rows, "dtype": "bfloat16", "hidden_size": 2048, "intermediate_size": 2**14}
    fields |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "markov_rank": rank}
    fields["dflash_config"] |= {"markov_rank": rank}
    config = build_config(fields)
    tensors = expected_tensors(config)
    largest = max(spec.nbytes for spec in tensors.values())
    assert largest == rows * rank * 2 == 2**26 and sum(spec.nbytes == largest for spec in tensors.values()) == 8
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields))
    with (source / WEIGHTS).open("wb") as file:
        file.write(make_header(tensors))
        file.truncate(expected_size(tensors))
    command = [sys.executable, "-c", MEASURE, str(source), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.splitlines()[-1]) * 1024
    assert 0 < grown < 2 * largest
    shutil.rmtree(tmp_path / "out")


def test_an_existing_output_is_not_overwritten_without_force(ours, tmp_path, capsys):
    source, out = specforge_export(ours, tmp_path / "foreign"), tmp_path / "out"
    out.mkdir()
    (out / WEIGHTS).write_text("precious")
    (out / "notes.txt").write_text("stay")
    assert convert(source, out) == 1
    assert "--force" in capsys.readouterr().err and (out / WEIGHTS).read_text() == "precious"
    assert sorted(path.name for path in out.iterdir()) == [WEIGHTS, "notes.txt"]
    assert convert(source, out, "--force") == 0
    assert (out / WEIGHTS).read_bytes() == (ours / WEIGHTS).read_bytes() and (out / "notes.txt").read_text() == "stay"
    assert convert(source, out / WEIGHTS) == 1
    assert "is a file, expected a folder" in capsys.readouterr().err


def test_a_draft_is_converted_in_its_own_place_and_links_stay(ours, tmp_path):
    source = specforge_export(ours, tmp_path / "foreign")
    code = tmp_path / "modeling_dspark.py"
    code.write_text("# elsewhere\n")
    (source / code.name).symlink_to(code)
    assert convert(source, source, "--force") == 0
    assert (source / WEIGHTS).read_bytes() == (ours / WEIGHTS).read_bytes()
    assert (source / code.name).is_symlink() and code.read_text() == "# elsewhere\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left"), RuntimeError("anything")])
def test_a_crash_leaves_nothing_behind(ours, tmp_path, monkeypatch, error):
    source, out = specforge_export(ours, tmp_path / "foreign"), tmp_path / "out"
    written = []

    def chunks(place):
        if len(written) == 3:
            raise error
        written.append(place)
        yield place.file.read_bytes()[place.start : place.end]

    monkeypatch.setattr("checkpoint_files.Place.chunks", chunks)
    if isinstance(error, OSError):
        assert convert(source, out) == 1
    else:
        with pytest.raises(error if isinstance(error, type) else type(error)):
            convert(source, out)
    assert len(written) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def change(**changes):
    return lambda fields, weights: fields.update(changes)


def drop(name: str):
    return lambda fields, weights: weights.pop(name)


def add(name: str, tensor: torch.Tensor):
    return lambda fields, weights: weights.update({name: tensor})


def change_layers(**changes):
    return lambda fields, weights: fields["transformer_layer_config"].update(changes)


def forget(*names: str):
    return lambda fields, weights: [fields.pop(name) for name in names]


HALF = torch.ones(4, dtype=torch.float16)


@pytest.mark.parametrize(
    "layout, spoil, words",
    [
        (specforge_export, forget("dflash_config"), "none of the keys by which a DSpark draft is known"),
        (specforge_export, change(num_target_layers=3), "`num_target_layers` is 3"),
        (specforge_export, change(dflash_config={"projector_type": "dflash"}), "dflash_config."),
        (specforge_export, drop("norm.weight"), "- norm.weight is missing."),
        (specforge_export, add("fc.bias", torch.ones(32, dtype=torch.bfloat16)), "- fc.bias is not a tensor"),
        (specforge_export, add("fc.weight", torch.ones(3, 4, dtype=torch.bfloat16)), "- fc.weight is BF16 [3, 4]"),
        (specforge_export, add("fc.bias", HALF), "The tensors are of BF16 and F16, expected one of"),
        (specforge_export, add("draft_model.norm.weight", HALF), "are both norm.weight here: remove one"),
        (deepspec, change(architectures=["Gemma4DSparkModel"]), "only a Qwen3DSparkModel"),
        (deepspec, change(target_layer_ids=[-1, 2]), "layer ids are 0-based"),
        (deepspec, forget("num_target_layers"), "give --num-target-layers"),
        (deepspec, change(layer_types=["sliding_attention"] * 2), "`layer_types` is"),
        (speculators, change(draft_vocab_size=6), "draft_vocab_size is 6, the target's vocabulary 12"),
        (speculators, forget("draft_vocab_size"), "draft_vocab_size is 32000"),
        (speculators, add("d2t", torch.ones(6, dtype=torch.long)), "d2t map a reduced vocabulary"),
        (speculators, change(speculators_model_type="eagle3"), "speculators_model_type is 'eagle3'"),
        (speculators, change_layers(model_type="llama"), "transformer_layer_config.model_type is 'llama'"),
        (speculators, change(target_hidden_size=64), "target_hidden_size is 64, hidden_size 32"),
        (speculators, change(sample_from_anchor=False), "sample_from_anchor is False, expected true"),
        (speculators, forget("sample_from_anchor"), "sample_from_anchor is None, expected true"),
        (speculators, change(aux_hidden_state_layer_ids=[0, 2]), "layer ids are 0-based"),
        (speculators, forget("mask_token_id"), "mask_token_id"),
        (speculators, change(), "give --num-target-layers (Kimi K3: 93)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(layout, spoil, words, ours, tmp_path, capsys):
    source = layout(ours, tmp_path / "foreign")
    fields, weights = read(source)
    spoil(fields, weights)
    write(source, fields, weights)
    depth = [] if "--num-target-layers" in words or layout is not speculators else ["--num-target-layers", "5"]
    assert convert(source, tmp_path / "out", *depth) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def test_sources_that_are_none(ours, tmp_path, capsys):
    assert convert(tmp_path / "nowhere", tmp_path / "out") == 1
    assert "nowhere is neither a folder nor a file" in capsys.readouterr().err
    source = specforge_export(ours, tmp_path / "foreign")
    os.truncate(source / WEIGHTS, 1000)
    assert convert(source, tmp_path / "out") == 1
    assert "no whole header" in capsys.readouterr().err
    (source / STATE).write_bytes(b"not a state")
    assert convert(source / STATE, tmp_path / "out") == 1
    assert "is not a training state of SpecForge" in capsys.readouterr().err
    assert convert(source, tmp_path / "out", "--draft-config", str(tmp_path / "none.json")) == 1
    assert "none.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_depth_that_contradicts_the_config(ours, tmp_path, capsys):
    assert convert(specforge_export(ours, tmp_path / "foreign"), tmp_path / "out", "--num-target-layers", "93") == 1
    assert "--num-target-layers is 93, but config.json has 5" in capsys.readouterr().err
