"""What SGLang 0.5.23 and vLLM 0.33.0 make of our config.json and of the names in our weights.

Each rule is restated here, from reading, as a few lines of our own, and each test names where the engines have it;
paths are those inside their wheels. The rules are run over every configuration that we ship or write, each as an engine
has it with `--trust-remote-code` (a `DSparkConfig`) and without (transformers' own `Qwen3Config`).
"""

import json
import math
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
import train
from common import TINY_DRAFT, TINY_TARGET
from conftest import ROOT
from dspark.configuration_dspark import SERVING_COPIES, DSparkConfig
from dspark.modeling_dspark import DSparkDraftModel, DSparkRotaryEmbedding
from safetensors import safe_open
from transformers import AutoConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

# What an engine must come to, written down apart from the files.
PUBLISHED = SimpleNamespace(
    depth=93, taps=[7, 23, 51, 67, 83], mask=163824, vocabulary=163840, hidden=7168, rank=256, tensors=62
)
TINY = SimpleNamespace(depth=9, taps=[1, 3, 5, 7, 8], mask=2027, vocabulary=2048, hidden=160, rank=128, tensors=40)
DRAFTS = 7
SOURCES = {"shipped": PUBLISHED, "saved": PUBLISHED, "example": TINY, "trained": TINY}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where each configuration is: the repository's, a saved copy of it, the example's, and one that the saving
    function of scripts/train.py wrote."""
    saved, trained = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("trained")
    DSparkConfig.from_pretrained(ROOT).save_pretrained(saved)
    draft = DSparkDraftModel(DSparkConfig.from_json_file(TINY_DRAFT / "config.json"))
    train.save_draft(draft, {f"draft.{name}": tensor for name, tensor in draft.state_dict().items()}, trained)
    return {"shipped": ROOT, "saved": saved, "example": TINY_DRAFT, "trained": trained}


@pytest.fixture(params=SOURCES)
def source(request):
    return request.param


@pytest.fixture
def expected(source):
    return SOURCES[source]


@pytest.fixture(params=[True, False], ids=["remote code", "no remote code"])
def config(request, source, folders):
    """The configuration as an engine holds it."""
    config = AutoConfig.from_pretrained(folders[source], trust_remote_code=request.param)
    assert type(config).__name__ == ("DSparkConfig" if request.param else "Qwen3Config")
    return config


@pytest.fixture
def weights(source, folders):
    return shapes_of(DSparkConfig.from_pretrained(folders[source]))


def shapes_of(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the weights that this package saves for the configuration; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DSparkDraftModel(config).state_dict().items()}


def nested_first(config, name, default=None):
    return config.dflash_config.get(name, getattr(config, name, default))


# -- which code an engine takes for the draft


def vllm_class(architectures: list[str], model_type: str) -> str | None:
    if "DSparkDraftModel" not in architectures:
        return None
    return "Qwen3DSparkModel" if model_type == "qwen3" else "DeepSeek-V4's"


def test_both_engines_take_their_dense_dspark_model(config):
    """SGLang: sglang/srt/models/dspark.py, `EntryClass`; the architecture's name is the class's.
    vLLM: vllm/config/speculative.py, `SpeculativeConfig.__post_init__`; the pair of architecture and model type.
    """
    assert config.architectures == ["DSparkDraftModel"]
    assert vllm_class(config.architectures, config.model_type) == "Qwen3DSparkModel"
    assert vllm_class(config.architectures, "dspark") == "DeepSeek-V4's"


def test_no_field_asks_an_engine_for_another_layout(source, folders):
    """Fields of other drafts that either engine would act on without asking.

    SGLang: sglang/srt/models/dflash.py, `DFlashAttention.__init__` and `_get_dflash_attention_type`;
    sglang/srt/speculative/dflash_utils.py, `parse_dflash_draft_config` and `_get_text_config`;
    sglang/srt/speculative/dspark_components/dspark_config.py, `parse_dspark_draft_config` (the `dspark_` fields) and
    `get_dspark_sample_from_anchor`.
    vLLM: vllm/model_executor/models/qwen3_dflash.py, `_resolve_layer_attention` and `DFlashQwen3DecoderLayer.__init__`;
    vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, `get_eagle3_aux_layers_from_config`;
    vllm/v1/worker/gpu/spec_decode/dspark/speculator.py, `DSparkSpeculator.__init__`.
    """
    fields = json.loads((folders[source] / "config.json").read_text())
    given = {name for group in (fields, fields["dflash_config"]) for name, value in group.items() if value is not None}
    acted_on = {"sample_from_anchor", "is_causal", "causal", "text_config", "eagle_config", "quantization_config"}
    acted_on |= {"use_swa", "swa_window_size", "sliding_window", "attention_sink_bias", "attention_value_scale"}
    acted_on |= {"is_neox_style", "rope_is_neox_style", "partial_rotary_factor", "use_gemma_norm", "logit_scale"}
    acted_on |= {"eagle_aux_hidden_state_layer_ids", "layer_ids", "target_hidden_size", "draft_vocab_size"}
    acted_on |= {"conv_kernel_size", "selector_rank", "output_multiplier", "final_logit_softcapping", "n_predict"}
    acted_on |= {"num_nextn_predict_layers", "use_aux_hidden_state"}
    assert not given & acted_on
    assert not [name for name in given if name.startswith("dspark_")]


# -- the block


def test_seven_drafts_and_an_eight_wide_verification(config):
    """SGLang: sglang/srt/speculative/dspark_components/dspark_config.py, `resolve_runtime_config`: drafts are
    `block_size` (nested first), the verify window is one wider; sglang/srt/arg_groups/speculative_hook.py,
    `_handle_dspark`, does the same for `--speculative-dspark-block-size`.
    vLLM: vllm/config/speculative.py, `SpeculativeConfig.__post_init__`: `num_speculative_tokens` is by default the flat
    `block_size`; vllm/v1/worker/gpu/spec_decode/dspark/speculator.py: the draft's block has as many rows, the anchor's
    among them.
    """
    sglang_drafts, vllm_drafts = nested_first(config, "block_size"), config.block_size
    assert sglang_drafts == vllm_drafts == DRAFTS
    assert sglang_drafts + 1 == 8


def test_mask_token(config, expected):
    """SGLang: sglang/srt/speculative/dspark_components/dspark_config.py, `parse_dspark_draft_config` (nested first) and
    `resolve_runtime_config` (it must lie below the target's vocabulary).
    vLLM: vllm/v1/worker/gpu/spec_decode/utils.py, `get_parallel_drafting_token_id` (nested first).
    """
    assert nested_first(config, "mask_token_id") == expected.mask < expected.vocabulary


def test_every_layer_attends_to_everything(config):
    """SGLang: sglang/srt/models/dflash.py, `_get_dflash_layer_attention_params`: a `full_attention` layer has no window
    and, unless `is_causal` says otherwise, no causal mask.
    vLLM: vllm/model_executor/models/qwen3_dflash.py, `_dflash_layer_causal`: the same from `layer_types`.
    """
    assert config.layer_types == ["full_attention"] * config.num_hidden_layers


# -- the target's features


def vllm_taps(config) -> list[int]:
    """Layers before which vLLM takes the stream."""
    return [layer + 1 for layer in config.dflash_config["target_layer_ids"]]


def sglang_taps(config) -> list[int]:
    """Layers after which SGLang takes the stream."""
    taps, depth = [int(layer) for layer in nested_first(config, "target_layer_ids")], config.num_target_layers
    if not all(0 <= layer < depth for layer in taps):
        raise ValueError(f"target_layer_ids {taps} out of range for {depth} layers")
    return taps


def test_both_engines_tap_what_the_next_layer_reads(config, expected):
    """SGLang: sglang/srt/speculative/dflash_utils.py, `resolve_target_layer_ids`, and sglang/srt/models/kimi_k3.py,
    `set_dspark_layers_to_capture` and `_dspark_capture_stream`: after layer i, the mixture that layer i+1 would form.
    vLLM: vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, `get_eagle3_aux_layers_from_config`, adds one to each
    id; vllm/models/kimi_k3/nvidia/model.py, `_capture_aux_hidden_stream`, takes the stream on leaving the layer before:
    the mixture if VLLM_KIMI_K3_AUX_ATTN_RES_STREAM is 1, else the bare prefix sum, on which the draft was not trained.
    """
    assert sglang_taps(config) == expected.taps and config.num_target_layers == expected.depth
    assert [layer + 1 for layer in sglang_taps(config)] == vllm_taps(config)


def test_vocabulary_is_the_targets(config, expected):
    """SGLang: sglang/srt/models/dspark.py, `attach_shared_modules` and `VanillaMarkov.configure_tp_shard`: embedding
    and head are the target's, of the draft's vocabulary.
    vLLM: vllm/v1/worker/gpu/spec_decode/dspark/utils.py, `load_dspark_model`: they are shared if the vocabularies are
    of one size; vllm/model_executor/models/qwen3_dspark.py, `load_weights`, wants them in the file otherwise.
    """
    assert config.vocab_size == expected.vocabulary and config.hidden_size == expected.hidden
    if expected is TINY:
        target = json.loads((TINY_TARGET / "config.json").read_text())
        assert target.get("text_config", target)["vocab_size"] == config.vocab_size


# -- the heads


def sglang_heads(config) -> dict[str, tuple[int, ...]]:
    rank, kind = getattr(config, "markov_rank", 0), getattr(config, "markov_head_type", "vanilla")
    if rank <= 0:
        raise ValueError(f"markov_rank is {rank}")
    shapes = {"markov_w1.weight": (config.vocab_size, rank), "markov_w2.weight": (config.vocab_size, rank)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (rank, config.hidden_size + rank), "gate_proj.bias": (rank,)}
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + config.hidden_size), "joint_proj.bias": (3 * rank,)}
    width = config.hidden_size + (rank if getattr(config, "confidence_head_with_markov", rank > 0) else 0)
    return _heads(shapes, width)


def vllm_heads(config) -> dict[str, tuple[int, ...]]:
    size = (config.vocab_size, config.markov_rank)
    shapes = {"markov_w1.weight": size, "markov_w2.weight": size}
    if not getattr(config, "enable_confidence_head", False):
        return _heads(shapes, None)
    with_markov = getattr(config, "confidence_head_with_markov", False)
    return _heads(shapes, config.hidden_size + (config.markov_rank if with_markov else 0))


def _heads(markov: dict[str, tuple[int, ...]], confidence_width: int | None) -> dict[str, tuple[int, ...]]:
    shapes = {f"markov_head.{name}": shape for name, shape in markov.items()}
    if confidence_width is not None:
        shapes |= {"confidence_head.proj.weight": (1, confidence_width), "confidence_head.proj.bias": (1,)}
    return shapes


def test_both_engines_build_the_heads_of_the_file(config, expected, weights):
    """Both read the heads' fields from the top level only.

    SGLang: sglang/srt/models/dspark.py, `build_markov_head` and `build_confidence_head`; the latter is called for when
    SGLANG_RAGGED_VERIFY_MODE is not "static", and does not ask `enable_confidence_head`.
    vLLM: vllm/model_executor/models/qwen3_dspark.py, `Qwen3DSparkModel.__init__`; it asks, and its Markov head is
    always the vanilla one.
    """
    held = {name: shape for name, shape in weights.items() if name.startswith(("markov_head.", "confidence_head."))}
    assert config.markov_rank == expected.rank and config.markov_head_type == "vanilla"
    assert held["confidence_head.proj.weight"] == (1, expected.hidden + expected.rank)
    assert sglang_heads(config) == vllm_heads(config) == held


def test_without_the_copies_an_engine_without_remote_code_would_fail_or_drop_a_head():
    """Why `config.json` has the heads' fields twice; sources as above."""
    fields = json.loads((ROOT / "config.json").read_text())
    bare = {name: value for name, value in fields.items() if name not in SERVING_COPIES}
    with pytest.raises(ValueError, match="markov_rank is 0"):
        sglang_heads(Qwen3Config(**bare))
    with pytest.raises(AttributeError, match="markov_rank"):
        vllm_heads(Qwen3Config(**bare))
    rank_only = vllm_heads(Qwen3Config(**bare, markov_rank=256))
    assert "confidence_head.proj.weight" not in rank_only


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_other_markov_heads_are_for_sglang_only(kind):
    """SGLang: sglang/srt/models/dspark.py, `build_markov_head`. vLLM: vllm/model_executor/models/qwen3_dspark.py,
    `Qwen3DSparkModel.__init__`, ignores `markov_head_type`; its loader then stumbles over the extra tensors."""
    nested = {**DSparkConfig().dflash_config, "markov_head_type": kind}
    config = DSparkConfig.from_pretrained(ROOT, dflash_config=nested)
    held = shapes_of(config)
    assert all(held[name] == shape for name, shape in sglang_heads(config).items())
    with pytest.raises(ValueError, match="no parameter for markov_head"):
        filled_by_vllm(held, config)


# -- the tensors' names

STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
STACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def backbone(config) -> dict[str, tuple[int, ...]]:
    """Parameters of the layers and the feature projection, which both engines name alike (vLLM under `model.`)."""
    hidden, head, mlp = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.qkv_proj.weight": (queries + 2 * keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_up_proj.weight": (2 * mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    shapes = {f"layers.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in layer.items()}
    shapes["fc.weight"] = (hidden, len(sglang_taps(config)) * hidden)
    return shapes | {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}


def stacked(name: str) -> str:
    """The engines' fused parameter that a tensor of the file is a part of; names that are not fused stay."""
    return re.sub(r"\.(\w+)\.weight$", lambda match: f".{STACKED.get(match[1], match[1])}.weight", name)


def filled_by_sglang(weights, config) -> dict[str, list[tuple[int, ...]]]:
    """What comes into each parameter. A tensor of the backbone without a parameter is passed over in silence."""
    parameters, filled = backbone(config) | sglang_heads(config), {}
    for name, shape in weights.items():
        fused = stacked(name) if not name.startswith(("markov_head.", "confidence_head.")) else name
        if fused in parameters:
            filled.setdefault(fused, []).append(shape)
        elif name.startswith(("markov_head.", "confidence_head.")):
            raise ValueError(f"no parameter for {name}")
    return filled


def filled_by_vllm(weights, config) -> dict[str, list[tuple[int, ...]]]:
    """What comes into each parameter; any other tensor is an error."""
    parameters, filled = backbone(config) | vllm_heads(config), {}
    for name, shape in weights.items():
        if stacked(name) not in parameters:
            raise ValueError(f"no parameter for {name}")
        filled.setdefault(stacked(name), []).append(shape)
    return filled


def test_every_tensor_finds_its_parameter_and_every_parameter_its_tensors(config, expected, weights):
    """SGLang: sglang/srt/models/dspark.py, `DSparkDraftMixin.load_weights` (heads, by their full names), and
    sglang/srt/models/dflash.py, `DFlashDraftModel.load_weights` (the rest, fused as in `stacked_params_mapping`).
    vLLM: vllm/model_executor/models/qwen3_dspark.py, `Qwen3DSparkForCausalLM.load_weights`, and
    vllm/model_executor/models/qwen3_dflash.py, `DFlashQwen3Model.hf_to_vllm_mapper`.
    """
    assert len(weights) == expected.tensors
    # Substrings that vLLM's loader takes for something else; names that SGLang's passes over.
    assert not [name for name in weights if re.search("lm_head|embed_tokens|t2d|d2t|mask_embedding|rotary_emb", name)]
    for filled, heads in ((filled_by_sglang, sglang_heads), (filled_by_vllm, vllm_heads)):
        parts = filled(weights, config)
        whole = {name: (sum(shape[0] for shape in shapes), *shapes[0][1:]) for name, shapes in parts.items()}
        assert whole == backbone(config) | heads(config)


def test_names_of_early_checkpoints_would_not_be_served(folders):
    """SGLang passes over `logit_head.` names, and its Markov head stays random; vLLM refuses them. Sources as above.
    So they are read here, but never written."""
    config = DSparkConfig.from_pretrained(ROOT)
    early = {re.sub("^(markov|confidence)_head", r"logit_head.\g<0>", name): (1,) for name in shapes_of(config)}
    assert not [name for name in filled_by_sglang(early, config) if "head" in name]
    with pytest.raises(ValueError, match="no parameter for logit_head"):
        filled_by_vllm(early, config)
    for folder in (folders["example"], folders["trained"]):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert set(file.keys()) == shapes_of(DSparkConfig.from_pretrained(folder)).keys()


# -- positions

SGLANG_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attn_factor", "extrapolation_factor"}
VLLM_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"}


def engine_rope(config) -> dict:
    """RoPE as the engines have it. They need transformers 5, whose configs hold `rope_parameters`; SGLang also reads
    the older pair."""
    given = getattr(config, "rope_parameters", None)
    return given or {"rope_theta": config.rope_theta, **config.rope_scaling}


def engine_yarn(rope: dict, head_dim: int, known: set[str]) -> tuple[torch.Tensor, float]:
    """Frequencies and magnitude of YaRN with those optional values that an engine knows."""
    given = {name: rope[name] for name in known & rope.keys()}
    factor, theta, original = rope["factor"], rope["rope_theta"], rope["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(given.get("beta_fast", 32)), channel(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    frequencies = []
    for i in range(head_dim // 2):
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(theta ** (-2 * i / head_dim) * (slowed / factor + 1 - slowed))
    magnitude = given.get("attention_factor", 0.1 * math.log(factor) + 1)
    return torch.tensor(frequencies), magnitude * given.get("attn_factor", 1.0)


def test_yarn_16_is_what_the_draft_computes_with(source, config, folders):
    """SGLang: sglang/srt/utils/hf_transformers/common.py, `get_rope_config`; sglang/srt/layers/rotary_embedding/
    factory.py, `get_rope`, and yarn.py, `YaRNScalingRotaryEmbedding`.
    vLLM: vllm/model_executor/layers/rotary_embedding/__init__.py, `get_rope`, and yarn_scaling_rope.py.
    """
    rope = engine_rope(config)
    assert {name: rope[name] for name in ("rope_type", "factor", "rope_theta", "original_max_position_embeddings")} == {
        "rope_type": "yarn",
        "factor": 16.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 65536,
    }
    ours = DSparkRotaryEmbedding(DSparkConfig.from_pretrained(folders[source]))
    for known in (SGLANG_YARN, VLLM_YARN):
        frequencies, magnitude = engine_yarn(rope, config.head_dim, known)
        assert torch.allclose(frequencies, ours.inv_freq, rtol=1e-6, atol=0)
        assert magnitude == pytest.approx(ours.attention_scaling) == pytest.approx(1.27726, abs=1e-5)


def test_no_configuration_sets_what_only_one_engine_reads(source, folders):
    """SGLang passes over `attention_factor`: its `get_rope` (sglang/srt/layers/rotary_embedding/factory.py) knows it as
    `attn_factor`; vLLM's (vllm/model_executor/layers/rotary_embedding/__init__.py) reads it."""
    rope = json.loads((folders[source] / "config.json").read_text())["rope_scaling"]
    assert not rope.keys() & (SGLANG_YARN ^ VLLM_YARN)
    (_, sglang), (_, vllm) = (
        engine_yarn({**rope, "rope_theta": 10000.0, "attention_factor": 1.5}, 64, known)
        for known in (SGLANG_YARN, VLLM_YARN)
    )
    assert vllm == 1.5 and sglang == pytest.approx(1.27726, abs=1e-5)


def test_context_of_a_million_tokens(config):
    """SGLang: sglang/srt/utils/hf_transformers/common.py, `get_context_length`: `max_position_embeddings`, not
    multiplied by the factor where `original_max_position_embeddings` is given.
    vLLM: vllm/config/model.py, `_get_and_verify_max_len`: the same for YaRN.
    Both keep a table of factor x original rows (`_compute_cos_sin_cache`).
    """
    rope = engine_rope(config)
    assert config.max_position_embeddings == rope["factor"] * rope["original_max_position_embeddings"] == 1048576


# -- the commands of the README


def command(first_words: str) -> list[str]:
    """The words of the README's command that begins so, its comments and line breaks left out."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if first_words in block]
    return shlex.split(block.replace("\\\n", " "), comments=True)


def test_sglang_command():
    """All 19 options exist: sglang/srt/arg_groups/fields/ (model.py, parallel.py, schedule.py, exec_.py, serving.py,
    spec.py), each field an option of its name."""
    words = command("sglang serve")
    options = [word for word in words if word.startswith("--")]
    known = "trust-remote-code model-path tp-size dcp-size mem-fraction-static max-mamba-cache-size"
    known += " max-running-requests cuda-graph-max-bs-decode reasoning-parser tool-call-parser host port"
    known += " speculative-algorithm speculative-draft-model-path speculative-dspark-block-size"
    known += " speculative-draft-attention-backend enable-linear-replayssm-spec context-length chunked-prefill-size"
    assert sorted(options) == sorted(f"--{name}" for name in known.split()) and len(options) == 19
    config = DSparkConfig.from_pretrained(ROOT)
    value = dict(zip(words, words[1:]))
    assert int(value["--speculative-dspark-block-size"]) == config.block_size
    assert int(value["--context-length"]) == config.max_position_embeddings
    assert value["--speculative-algorithm"] == "DSPARK"


def test_vllm_command():
    """Options: vllm/engine/arg_utils.py, `EngineArgs.add_cli_args`. Fields of the JSON: vllm/config/speculative.py,
    `SpeculativeConfig`. The variable: vllm/envs.py, read by vllm/models/kimi_k3/nvidia/model.py."""
    words = command("vllm serve")
    assert words[:3] == ["VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1", "vllm", "serve"]
    options = {word for word in words if word.startswith("--")}
    known = {"--trust-remote-code", "--tensor-parallel-size", "--max-model-len", "--speculative-config"}
    assert options <= known | {"--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"}
    value = dict(zip(words, words[1:]))
    config = DSparkConfig.from_pretrained(ROOT)
    assert json.loads(value["--speculative-config"]) == {
        "method": "dspark",
        "model": "RadixArk/Kimi-K3-DSpark",
        "num_speculative_tokens": config.block_size,
    }
    assert int(value["--max-model-len"]) == config.max_position_embeddings
