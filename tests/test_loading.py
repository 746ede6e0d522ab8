"""Loading as a stranger does: from a copy in an odd place, in a new process, without a modules cache, and resaved."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch
import transformers
from common import TINY_TARGET
from conftest import ROOT, make_draft, make_target, plain_greedy

ROOT_MODULES = {
    "configuration_dspark.py",
    "modeling_dspark.py",
    "generation_dspark.py",
    "processors_dspark.py",
    "request_dspark.py",
    "schedule_dspark.py",
    "target_kimi_k3.py",
    "target_state.py",
}
FIRST_FREQUENCY = 1.0  # YaRN and plain RoPE agree on the fastest channel; garbage from meta initialisation does not

# What a loaded draft computes from fixed input, with embedding and head of its own: enough to tell two drafts apart.
FINGERPRINT = """
import hashlib, torch
def fingerprint(draft):
    torch.manual_seed(0)
    config, cache = draft.config, draft.new_cache()
    width = len(config.target_layer_ids) * config.hidden_size
    block = torch.randn(1, config.block_size, config.hidden_size)
    draft.write_context(torch.randn(1, 5, width), torch.arange(5)[None], cache)
    hidden = draft(block.to(draft.dtype), torch.arange(5, 12)[None], cache)
    digest = hashlib.sha256()
    for name, tensor in sorted(draft.state_dict().items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    first = draft.rotary_emb.inv_freq[0].item()
    return [type(draft).__name__, str(draft.dtype), first, hidden.float().sum().item(), digest.hexdigest()]
"""


def run_python(code: str, cwd, cache) -> list:
    """Run `code` in a new process, offline, with its own modules cache; returns the JSON its last line prints."""
    environment = dict(os.environ, HF_MODULES_CACHE=str(cache), HF_HUB_OFFLINE="1", PYTHONPATH="", OMP_NUM_THREADS="1")
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def odd_copy(tmp_path_factory):
    """The root files, with a small draft's config and weights, in a folder whose name is no Python identifier."""
    folder = tmp_path_factory.mktemp("clone") / "kimi-k3.d-spark v1.0"
    folder.mkdir()
    for name in ROOT_MODULES:
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "custom_generate", folder / "custom_generate")
    torch.manual_seed(3)
    draft = make_draft(make_target("qwen3")).to(torch.bfloat16)
    draft.save_pretrained(folder)
    config = json.loads((ROOT / "config.json").read_text())
    small = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**small, "auto_map": config["auto_map"]}))
    return folder


def test_load_save_reload_reload_in_new_processes(odd_copy, tmp_path):
    """Each copy loads alone: the one it came from is gone, the modules cache is empty, there is no network."""
    load = (
        FINGERPRINT
        + "import json\nfrom transformers import AutoModel\n"
        + "draft = AutoModel.from_pretrained({source!r}, trust_remote_code=True, dtype='auto')\n"
    )
    save = "draft.save_pretrained({target!r})\n"
    tell = "print(json.dumps(fingerprint(draft)))\n"
    first, second, third = (str(tmp_path / name) for name in ("first copy", "second.copy", "third-copy"))
    shutil.copytree(odd_copy, first)
    told = []
    for number, (source, target) in enumerate(((first, second), (second, third), (third, str(tmp_path / "last")))):
        code = (load + save + tell).format(source=source, target=target)
        told.append(run_python(code, tmp_path, tmp_path / f"cache {number}"))
        shutil.rmtree(source)
        assert ROOT_MODULES <= {path.name for path in (tmp_path / target).iterdir()}
    assert told[0][:3] == ["DSparkDraftModel", "torch.bfloat16", FIRST_FREQUENCY]
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("spelling", [".", "./", "absolute/"])
def test_every_spelling_of_a_local_path(odd_copy, tmp_path, spelling):
    path = f"{odd_copy}/" if spelling == "absolute/" else spelling
    code = (
        f"{FINGERPRINT}import json, transformers\n"
        f"config = transformers.AutoConfig.from_pretrained({path!r}, trust_remote_code=True)\n"
        f"draft = transformers.AutoModel.from_pretrained({path!r}, trust_remote_code=True, dtype=torch.float32)\n"
        "print(json.dumps([type(config).__name__, config.target_layer_ids, *fingerprint(draft)[:3]]))"
    )
    told = run_python(code, odd_copy, tmp_path / "cache")
    assert told == ["DSparkConfig", [0, 2, 4], "DSparkDraftModel", "torch.float32", FIRST_FREQUENCY]


def test_shipped_root_gives_the_draft_class_and_yarn_16(tmp_path):
    code = (
        "import json, torch, transformers\n"
        "config = transformers.AutoConfig.from_pretrained('.', trust_remote_code=True)\n"
        "with torch.device('meta'):\n"
        "    draft = transformers.AutoModel.from_config(config, trust_remote_code=True)\n"
        "print(json.dumps([type(draft).__name__, sum(p.numel() for p in draft.parameters()), config.block_size,"
        " config.mask_token_id, config.max_position_embeddings]))"
    )
    told = run_python(code, ROOT, tmp_path / "cache")
    assert told == ["DSparkDraftModel", 2_249_289_601, 7, 163824, 1048576]


def test_without_trust_the_native_class_loads_as_the_readme_warns(odd_copy):
    """Not what we want but what transformers does with `model_type` qwen3, so the README must say it."""
    model = transformers.AutoModel.from_pretrained(odd_copy)
    assert type(model).__name__ == "Qwen3Model" and not hasattr(model, "draft_block")
    # The layers' weights do arrive; what the native class has no place for (`fc`, the heads) is dropped.
    saved = safetensors.torch.load_file(odd_copy / "model.safetensors")
    name = "layers.0.self_attn.q_proj.weight"
    assert torch.equal(model.state_dict()[name].float(), saved[name].float()) and "fc.weight" not in model.state_dict()
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "trust_remote_code=True" in readme and "Qwen3Model" in readme


def test_custom_generate_is_the_same_door(odd_copy):
    target = make_target("qwen3")
    draft = transformers.AutoModel.from_pretrained(odd_copy, trust_remote_code=True, dtype=torch.float32)
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    door = {"custom_generate": str(odd_copy), "trust_remote_code": True, "do_sample": False, "max_new_tokens": 12}
    by_door = target.generate(prompt, draft_model=draft, return_dict_in_generate=True, **door)
    assert torch.equal(by_door.sequences, plain_greedy(target, prompt, 12)) and by_door.num_target_forwards > 0
    by_keyword = target.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), draft_model=draft, **door)
    assert torch.equal(by_keyword, by_door.sequences)
    narrow = target.generate(prompt, draft_model=draft, verify_width=1, return_dict_in_generate=True, **door)
    assert torch.equal(narrow.sequences, by_door.sequences) and narrow.num_target_forwards == 11
    for name, value in (("verify_width", 9), ("confidence_threshold", 2), ("verify_costs", [1])):
        with pytest.raises(ValueError, match=name):
            target.generate(prompt, draft_model=draft, **door, **{name: value})
    with pytest.raises(ValueError, match="draft_model.*Qwen3ForCausalLM"):
        target.generate(prompt, draft_model=target, **door)
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(prompt, draft_model=draft, num_beams=2, **door)


def test_the_text_generation_pipeline_takes_the_same_door(odd_copy):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_TARGET, trust_remote_code=True)
    target = make_target("qwen3", vocab_size=len(tokenizer))
    write = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)
    prompts, options = ["def merge(a, b):", "x ="], {"max_new_tokens": 12, "do_sample": False}
    door = {"custom_generate": str(odd_copy), "trust_remote_code": True, "draft_model": make_draft(target)}
    assert write(prompts, batch_size=2, **door, **options) == write(prompts, **options)


def test_custom_generate_loads_the_published_draft_once(odd_copy, monkeypatch):
    target = make_target("qwen3")
    draft = transformers.AutoModel.from_pretrained(odd_copy, trust_remote_code=True, dtype=torch.float32)
    loaded = []

    def from_pretrained(name, **options):
        loaded.append((name, options["trust_remote_code"], options["device_map"]))
        return draft

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", from_pretrained)
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    door = {"custom_generate": str(odd_copy), "trust_remote_code": True, "do_sample": False, "max_new_tokens": 12}
    for _ in range(2):
        assert torch.equal(target.generate(prompt, **door), plain_greedy(target, prompt, 12))
    assert loaded == [("RadixArk/Kimi-K3-DSpark", True, {"": torch.device("cpu")})]
