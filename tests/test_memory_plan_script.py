"""scripts/memory_plan.py against models on the meta device, a small model that runs, and the published figures."""

import json

import memory_plan
import pytest
import torch
import transformers
from checkpoint_files import build_config, read_config
from conftest import ROOT, make_target, random_ids
from dspark.modeling_dspark import DSparkCache, DSparkDraftModel


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def run(tmp_path, *options) -> dict:
    out = tmp_path / "plan.json"
    assert memory_plan.main([*options, "--json", str(out)]) == 0
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def published():
    return build_config(read_config(ROOT))


def test_the_published_figures(tmp_path, capsys):
    figures = run(tmp_path)
    fixed, longest = figures["shapes"], figures["plans"]["1048576"]
    assert list(figures["plans"]) == ["4096", "65536", "262144", "1048576"]
    # What is said of Kimi K3: 2.78 trillion parameters, in files of 1.56 TB.
    assert round(fixed["target parameters"] / 1e9) == 2779
    assert round(fixed["target weights, routed experts in MXFP4"] / 1e9) == 1560
    assert fixed["recurrent states of a sequence"] == 69 * 96 * 128 * 128 * 4 == 434_110_464
    assert fixed["draft parameters"] == 2_249_289_601
    assert fixed["draft keys and values of a token"] == 20_480 and fixed["features of a token"] == 71_680
    assert fixed["target keys and values of a token"] == 24 * 96 * (192 + 128) * 2
    assert fixed["the same as a latent, in serving engines"] == 24 * 576 * 2
    assert longest["draft keys and values"] == 20_480 * 2**20
    assert longest["recurrent states and windows, before and after a round"] > 2 * 434_110_464
    parts = [number for row, number in longest.items() if row != "all but the target's weights"]
    assert longest["all but the target's weights"] == sum(parts)
    printed = capsys.readouterr().out
    assert "| recurrent states of a sequence | 434,110,464 B (434.1 MB) |" in printed
    assert "| draft keys and values | 83.89 MB | 1.342 GB | 5.369 GB | 21.47 GB |" in printed


def test_the_full_size_draft_on_the_meta_device(published):
    fixed = memory_plan.shapes(memory_plan.KIMI_K3, published)
    with torch.device("meta"):
        draft = DSparkDraftModel(published).to(torch.bfloat16)
    assert nbytes(draft.parameters()) == fixed["draft weights"]
    assert draft.fc.in_features * 2 == fixed["features of a token"]
    cache = DSparkCache(published, 3, torch.bfloat16, torch.device("meta"))
    cache.reserve(65536)
    held = nbytes(cache.keys) + nbytes(cache.values)
    assert held == memory_plan.plan(fixed, 65536, 3)["draft keys and values"]


def cache_of(target, batch: int, length: int):
    """The cache that the attention layers of `target` leave after `length` tokens, all on the meta device."""
    from tiny_kimi_k3.modeling_kimi_k3 import KimiDynamicCache

    cache = KimiDynamicCache(target.config)
    inputs = torch.empty(batch, length, target.config.hidden_size, dtype=torch.bfloat16, device="meta")
    for layer in target.model.layers:
        mask = None if layer.is_kda else inputs.new_zeros(1, 1, length, length)
        layer.self_attn(inputs, mask, past_key_values=cache)
    return cache


def test_a_target_of_the_released_widths_on_the_meta_device(published, no_grad):
    """Two layers of 93, both kinds of attention and of feed-forward, and 64 experts of 896: the sums go by how many."""
    from tiny_kimi_k3.configuration_kimi_k3 import KimiLinearConfig
    from tiny_kimi_k3.modeling_kimi_k3 import KimiLinearForCausalLM

    linear = {**memory_plan.KIMI_K3["linear_attn_config"], "kda_layers": [2], "full_attn_layers": [1]}
    text = {**memory_plan.KIMI_K3, "num_hidden_layers": 2, "num_experts": 64, "linear_attn_config": linear}
    config = KimiLinearConfig(**{**text, "linear_attn_config": {**linear, "gate_lower_bound": -5.0}})
    with torch.device("meta"):
        target = KimiLinearForCausalLM(config).to(torch.bfloat16)
    parts = memory_plan.target_parameters(text)
    assert sum(parts.values()) == sum(parameter.numel() for parameter in target.parameters())
    experts = sum(p.numel() for name, p in target.named_parameters() if ".experts." in name)
    assert parts["routed experts"] == experts
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in target.model.layers)
    fixed = memory_plan.shapes(text, published)
    assert fixed["largest layer, bfloat16"] == 2 * largest

    batch, length = 2, 8
    cache, rows = cache_of(target, batch, length), memory_plan.plan(fixed, length, batch)
    states = nbytes(state for state in cache.recurrent_states if state is not None)
    windows = nbytes(window for windows in cache.conv_states if windows is not None for window in windows)
    assert 2 * (states + windows) == rows["recurrent states and windows, before and after a round"]
    keys_and_values = nbytes(t for t in cache.key_cache + cache.value_cache if t is not None)
    assert keys_and_values == rows["target keys and values"]
    # A layer's share of the whole model's is a layer here.
    assert memory_plan.recurrent_state_bytes(memory_plan.KIMI_K3) // 69 == states // batch


def test_a_small_target_that_runs(no_grad):
    """All of it from a forward of a float32 model: windows and keys take twice what they do in bfloat16."""
    target = make_target("text")
    text = target.config.to_dict()
    assert sum(memory_plan.target_parameters(text).values()) == sum(p.numel() for p in target.parameters())
    output = target(input_ids=random_ids(9))
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    states = [state for state in cache.recurrent_states if state is not None]
    windows = [window for windows in cache.conv_states if windows is not None for window in windows]
    keys_and_values = [tensor for tensor in cache.key_cache + cache.value_cache if tensor is not None]
    assert nbytes(states) == memory_plan.recurrent_state_bytes(text)
    assert nbytes(windows) == 2 * memory_plan.conv_window_bytes(text)
    assert nbytes(keys_and_values) == 2 * 9 * memory_plan.mla_token_bytes(text)


def test_gpus_hold_whole_layers(tmp_path, capsys):
    few = run(tmp_path, "--context", "4096", "--gpu-memory", "268")["plans"]["4096"]
    # 0.9 x 268 GiB hold 15 layers of 17 GB: 7 GPUs, and one for embedding, head and draft.
    assert few["GPUs of 268 GiB, MXFP4"] == 8
    assert few["GPUs of 268 GiB, bfloat16"] == 24 + 1
    small = run(tmp_path, "--context", "4096", "--gpu-memory", "48")["plans"]["4096"]
    assert small["GPUs of 48 GiB, bfloat16"] is None
    assert "no layer fits" in capsys.readouterr().out
    many = run(tmp_path, "--context", "65536", "--batch", "8", "--gpu-memory", "268")["plans"]["65536"]
    assert many["GPUs of 268 GiB, MXFP4"] > 8
    assert many["draft keys and values"] == 8 * 65536 * 20_480


def test_another_target_s_config(tmp_path):
    path = ROOT / "examples" / "tiny-kimi-k3" / "config.json"
    figures = run(tmp_path, "--target-config", str(path))
    text = transformers.AutoConfig.from_pretrained(path.parent, trust_remote_code=True).text_config
    linear = text.linear_attn_config
    state = len(linear["kda_layers"]) * linear["num_heads"] * linear["head_dim"] ** 2 * 4
    assert figures["shapes"]["recurrent states of a sequence"] == state
    assert figures["shapes"]["draft parameters"] == 2_249_289_601


@pytest.mark.parametrize(
    "options, words",
    [
        (["--context", "0"], "--context [0]"),
        (["--batch", "-1"], "--batch -1"),
        (["--gpu-memory", "0"], "--gpu-memory is 0.0"),
    ],
)
def test_impossible_sizes_are_named(options, words, capsys):
    with pytest.raises(SystemExit):
        memory_plan.main(options)
    assert words in capsys.readouterr().err


def test_a_config_of_another_family_is_refused_by_the_fields_it_lacks(capsys):
    assert memory_plan.main(["--target-config", str(ROOT / "config.json")]) == 2
    assert "it has no first_k_dense_replace, kv_lora_rank" in capsys.readouterr().err
    assert memory_plan.main(["--target-config", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err
