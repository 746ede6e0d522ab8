"""The configuration: published values, both spellings of RoPE, saving, and every rule with a message that helps."""

import copy
import json

import pytest
import torch
from conftest import ROOT
from dspark.configuration_dspark import SERVING_COPIES, DSparkConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
SPELLINGS = {
    "rope_theta and rope_scaling": {"rope_theta": 10000.0, "rope_scaling": YARN},
    "old key name": {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536},
    },
    "theta inside rope_scaling": {"rope_scaling": {**YARN, "rope_theta": 10000.0}},
    "rope_parameters": {"rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "rope_parameters with theta outside": {"rope_theta": 10000.0, "rope_parameters": YARN},
    "both": {"rope_theta": 10000.0, "rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "whole numbers": {"rope_theta": 10000, "rope_scaling": {**YARN, "factor": 16}},
}


def published(nested=None, without=(), **changes):
    """The fields of the shipped config.json with some changed, some nested values changed and some fields left out;
    without the copies for the serving engines, which say nothing new."""
    fields = json.loads((ROOT / "config.json").read_text())
    fields = {name: value for name, value in fields.items() if name not in SERVING_COPIES}
    fields.update(copy.deepcopy(changes))
    fields["dflash_config"].update(nested or {})
    for name in without:
        (fields["dflash_config"] if name in fields["dflash_config"] else fields).pop(name)
    return fields


def table(config):
    rotary = Qwen3RotaryEmbedding(config)
    return rotary.inv_freq, rotary.attention_scaling


def test_shipped_file_is_the_published_configuration():
    config = DSparkConfig.from_pretrained(ROOT)
    assert config.architectures == ["DSparkDraftModel"] and config.model_type == "qwen3"
    assert config.dtype == torch.bfloat16
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (7168, 14336, 163840)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (5, 64, 16)
    assert (config.head_dim, config.block_size, config.num_target_layers) == (64, 7, 93)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)
    assert config.rms_norm_eps == 1e-5 and config.max_position_embeddings == 1048576
    assert config.hidden_act == "silu" and not config.attention_bias and not config.tie_word_embeddings
    assert config.layer_types == ["full_attention"] * 5
    assert (config.projector_type, config.attention_mode) == ("dspark", "gqa")
    assert config.target_layer_ids == [7, 23, 51, 67, 83] and config.mask_token_id == 163824
    assert (config.markov_rank, config.markov_head_type) == (256, "vanilla")
    assert config.enable_confidence_head is True and config.confidence_head_with_markov is True
    assert config.confidence_head_alpha == 1.0
    assert config.auto_map == {
        "AutoConfig": "configuration_dspark.DSparkConfig",
        "AutoModel": "modeling_dspark.DSparkDraftModel",
    }


def test_defaults_are_the_published_configuration():
    shipped = DSparkConfig.from_pretrained(ROOT).to_dict()
    del shipped["auto_map"]
    assert DSparkConfig().to_dict() == shipped


def test_saved_file_keeps_every_published_field(tmp_path):
    DSparkConfig.from_pretrained(ROOT).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved[name] for name in published()} == published()
    assert DSparkConfig.from_pretrained(tmp_path).to_dict() == DSparkConfig.from_pretrained(ROOT).to_dict()


def test_nested_values_are_saved_twice_only_for_the_serving_engines(tmp_path):
    config = DSparkConfig(**published(mask_token_id=163824))
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert config.mask_token_id == 163824
    assert saved.keys() & published()["dflash_config"].keys() == set(SERVING_COPIES)
    assert all(saved[name] == saved["dflash_config"][name] for name in SERVING_COPIES)


def test_copies_for_the_serving_engines_state_what_absent_keys_mean(tmp_path):
    """Read by the trainer's rule, not by an engine's default."""
    absent = ["markov_head_type", "enable_confidence_head", "confidence_head_with_markov"]
    DSparkConfig(**published(without=absent)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not saved["dflash_config"].keys() & set(absent)
    assert [saved[name] for name in SERVING_COPIES] == [256, "vanilla", True, False]


def test_absent_nested_keys_mean_what_the_trainer_means():
    taps_and_mask = {"target_layer_ids": [1, 2], "mask_token_id": 5}
    config = DSparkConfig(**published(dflash_config=taps_and_mask))
    assert (config.projector_type, config.attention_mode) == ("dspark", "gqa")
    assert (config.markov_rank, config.markov_head_type, config.confidence_head_with_markov) == (0, "vanilla", False)
    assert (config.confidence_head_alpha, config.enable_confidence_head) == (0.0, False)
    assert config.dflash_config == taps_and_mask
    trained = published({"confidence_head_alpha": 0.5}, without=["enable_confidence_head"])
    assert DSparkConfig(**trained).enable_confidence_head is True


def test_caller_keeps_its_dictionary():
    fields = published()
    DSparkConfig(**fields)
    DSparkConfig.from_dict(fields, block_size=5)
    assert fields == published()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_rope_gives_yarn_16(spelling):
    config = DSparkConfig(**published(without=["rope_theta", "rope_scaling"]), **SPELLINGS[spelling])
    frequencies, factor = table(config)
    expected, _ = table(DSparkConfig())
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert torch.equal(frequencies, expected) and not torch.allclose(frequencies, plain)
    assert factor == pytest.approx(1.27726, abs=1e-5)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_saved_rope_is_read_by_plain_qwen3_too(spelling, tmp_path):
    DSparkConfig(**published(without=["rope_theta", "rope_scaling"]), **SPELLINGS[spelling]).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_theta"] == 10000.0 and saved["rope_scaling"] == YARN and "rope_parameters" not in saved
    for config_class in (DSparkConfig, Qwen3Config):
        assert torch.equal(table(config_class.from_pretrained(tmp_path))[0], table(DSparkConfig())[0])


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}])
def test_plain_rope(scaling, tmp_path):
    DSparkConfig(**published(rope_scaling=scaling, rope_theta=5e5)).save_pretrained(tmp_path)
    frequencies, factor = table(DSparkConfig.from_pretrained(tmp_path))
    assert torch.allclose(frequencies, 5e5 ** (-torch.arange(0, 64, 2) / 64)) and factor == 1.0


def test_multi_head_attention_and_several_ends_are_fine():
    config = DSparkConfig(**published({"attention_mode": "mha"}, num_key_value_heads=64, eos_token_id=[163586, 163585]))
    assert config.attention_mode == "mha"


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("with_markov", [True, False])
def test_no_markov_head_needs_a_confidence_head_that_does_without(confident, with_markov):
    heads = {"markov_rank": 0, "enable_confidence_head": confident, "confidence_head_with_markov": with_markov}
    fields = published(heads)
    if confident and with_markov:
        with pytest.raises(ValueError, match="confidence_head_with_markov` is True.*`markov_rank` is 0"):
            DSparkConfig(**fields)
    else:
        assert DSparkConfig(**fields).enable_confidence_head is confident


@pytest.mark.parametrize(
    "field",
    ["block_size", "dflash_config", "head_dim", "hidden_size", "max_position_embeddings", "num_attention_heads"]
    + ["num_key_value_heads", "num_target_layers", "rms_norm_eps", "rope_theta", "vocab_size"]
    + ["mask_token_id", "target_layer_ids"],
)
def test_missing_field_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}` is None, but"):
        DSparkConfig(**published(without=[field]))


# What is changed, what of `dflash_config` is changed, and what the message must show: the field and what came.
REFUSED = [
    ({"block_size": 0}, {}, "`block_size` is 0"),
    ({"block_size": 7.5}, {}, "`block_size` is 7.5"),
    ({"vocab_size": True}, {}, "`vocab_size` is True"),
    ({"rms_norm_eps": 0}, {}, "`rms_norm_eps` is 0"),
    ({"dflash_config": [7]}, None, "`dflash_config` is [7]"),
    ({"model_type": "deepseek_v4"}, {}, "`model_type` is 'deepseek_v4'"),
    ({"hidden_act": "gelu"}, {}, "`hidden_act` is 'gelu'"),
    ({"head_dim": 63}, {}, "`head_dim` is 63"),
    ({"tie_word_embeddings": True}, {}, "`tie_word_embeddings` is True"),
    ({"num_key_value_heads": 24}, {}, "`num_key_value_heads` is 24"),
    ({"num_key_value_heads": 64}, {}, "`dflash_config.attention_mode` is 'gqa'"),
    ({}, {"attention_mode": "mha"}, "`dflash_config.attention_mode` is 'mha'"),
    ({}, {"attention_mode": "mla"}, "`dflash_config.attention_mode` is 'mla'"),
    ({}, {"projector_type": "dflash"}, "`dflash_config.projector_type` is 'dflash'"),
    # layouts of other drafts
    ({"layer_types": ["full_attention"] * 4}, {}, "`layer_types` is ['full_attention'"),
    ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, {}, "'sliding_attention']"),
    ({"use_sliding_window": True}, {}, "`use_sliding_window` is True"),
    ({"sliding_window": 2048}, {}, "`sliding_window` is 2048"),
    ({}, {"sliding_window": 2048}, "`dflash_config.sliding_window` is 2048"),
    ({"sample_from_anchor": False}, {}, "`sample_from_anchor` is False"),
    ({}, {"sample_from_anchor": False}, "`dflash_config.sample_from_anchor` is False"),
    ({}, {"causal": True}, "`dflash_config.causal` is True"),
    ({"partial_rotary_factor": 0.5}, {}, "`partial_rotary_factor` is 0.5"),
    ({}, {"tap_norms": True}, "`dflash_config.tap_norms` is True"),
    # target
    ({}, {"target_layer_ids": []}, "`dflash_config.target_layer_ids` is []"),
    ({}, {"target_layer_ids": 7}, "`dflash_config.target_layer_ids` is 7"),
    ({}, {"target_layer_ids": [7, "23"]}, "`dflash_config.target_layer_ids` is [7, '23']"),
    ({}, {"target_layer_ids": [7, 7]}, "`dflash_config.target_layer_ids` is [7, 7]"),
    ({}, {"target_layer_ids": [23, 7]}, "`dflash_config.target_layer_ids` is [23, 7]"),
    ({}, {"target_layer_ids": [-1, 7]}, "`dflash_config.target_layer_ids` is [-1, 7]"),
    ({}, {"target_layer_ids": [7, 93]}, "0-based and `num_target_layers` is 93"),
    ({"num_target_layers": 83}, {}, "`num_target_layers` is 83"),
    ({}, {"mask_token_id": -1}, "`dflash_config.mask_token_id` is -1"),
    ({}, {"mask_token_id": 163840}, "`dflash_config.mask_token_id` is 163840"),
    ({}, {"mask_token_id": 163839}, "`dflash_config.mask_token_id` is 163839, but `pad_token_id`"),
    ({}, {"mask_token_id": 163586}, "`dflash_config.mask_token_id` is 163586, but `eos_token_id`"),
    ({"eos_token_id": [1, 163824]}, {}, "`dflash_config.mask_token_id` is 163824, but `eos_token_id`"),
    # flat and nested
    ({"mask_token_id": 5}, {}, "`mask_token_id` is 5, but `dflash_config.mask_token_id` is 163824"),
    ({"markov_rank": 0}, {}, "`markov_rank` is 0, but `dflash_config.markov_rank` is 256"),
    ({"enable_confidence_head": False}, {}, "`enable_confidence_head` is False, but `dflash_config."),
    ({}, {"block_size": 8}, "`block_size` is 7, but `dflash_config.block_size` is 8"),
    # heads
    ({}, {"markov_rank": -1}, "`dflash_config.markov_rank` is -1"),
    ({}, {"markov_rank": 1.5}, "`dflash_config.markov_rank` is 1.5"),
    ({}, {"markov_head_type": "lstm"}, "`dflash_config.markov_head_type` is 'lstm'"),
    ({}, {"enable_confidence_head": "yes"}, "`dflash_config.enable_confidence_head` is 'yes'"),
    ({}, {"confidence_head_with_markov": 1}, "`dflash_config.confidence_head_with_markov` is 1"),
    ({}, {"confidence_head_alpha": -1.0}, "`dflash_config.confidence_head_alpha` is -1.0"),
    # RoPE
    ({"rope_theta": 0}, {}, "`rope_theta` is 0"),
    ({"rope_theta": 5e5, "rope_scaling": {**YARN, "rope_theta": 1e4}}, {}, "`rope_theta` is 500000.0"),
    ({"rope_parameters": {**YARN, "beta_fast": 16.0}}, {}, "`rope_scaling` is {'rope_type': 'yarn'"),
    ({"rope_scaling": "yarn"}, {}, "`rope_scaling` is 'yarn'"),
    ({"rope_scaling": {**YARN, "rope_type": "llama3"}}, {}, "`rope_scaling.rope_type` is 'llama3'"),
    ({"rope_scaling": {**YARN, "finetuned": True}}, {}, "`rope_scaling.finetuned` is True"),
    ({"rope_scaling": {"factor": 16.0}}, {}, "`rope_scaling.factor` is 16.0"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 16.0}}, {}, ".original_max_position_embeddings` is None"),
    ({"rope_scaling": {**YARN, "factor": 0.5}}, {}, "`rope_scaling.factor` is 0.5"),
]


@pytest.mark.parametrize("changes, nested, message", REFUSED, ids=[message for _, _, message in REFUSED])
def test_rule(changes, nested, message):
    fields = published(nested, **changes) if nested is not None else {**published(), **changes}
    with pytest.raises(ValueError) as refusal:
        DSparkConfig(**fields)
    assert message in str(refusal.value)


def test_yarn_lengths_that_disagree_are_all_three_named():
    with pytest.raises(ValueError) as refusal:
        DSparkConfig(**published(max_position_embeddings=524288))
    assert all(number in str(refusal.value) for number in ("16.0", "65536", "524288"))


def test_overrides_at_load_meet_the_same_rules():
    assert DSparkConfig.from_pretrained(ROOT, block_size=5).block_size == 5
    with pytest.raises(ValueError, match="`block_size` is 0"):
        DSparkConfig.from_pretrained(ROOT, block_size=0)
    with pytest.raises(ValueError, match="`mask_token_id` is 5, but `dflash_config.mask_token_id` is 163824"):
        DSparkConfig.from_pretrained(ROOT, mask_token_id=5)


def test_another_dflash_config_at_load_takes_the_copies_of_the_old_one_with_it():
    nested = {**published()["dflash_config"], "markov_rank": 64}
    assert DSparkConfig.from_pretrained(ROOT, dflash_config=nested).to_dict()["markov_rank"] == 64
    with pytest.raises(ValueError, match="`markov_rank` is 32, but `dflash_config.markov_rank` is 64"):
        DSparkConfig.from_pretrained(ROOT, dflash_config=nested, markov_rank=32)


def test_temperatures_of_the_confidence_survive_saving_and_are_absent_unless_given(tmp_path):
    temperatures = [1.5, 0.7, 1, 1.0, 2.0, 0.1, 3.0]
    assert DSparkConfig(**published()).confidence_temperatures is None
    config = DSparkConfig(**published(confidence_temperatures=temperatures))
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["confidence_temperatures"] == temperatures and "confidence_temperatures" not in saved["dflash_config"]
    assert DSparkConfig.from_pretrained(tmp_path).confidence_temperatures == temperatures
    other = DSparkConfig.from_pretrained(tmp_path, confidence_temperatures=None)
    assert other.confidence_temperatures is None
    with pytest.raises(ValueError, match="confidence_temperatures"):
        DSparkConfig.from_pretrained(tmp_path, confidence_temperatures=[1.0])


@pytest.mark.parametrize(
    "temperatures, message",
    [
        ([1.0] * 6, "confidence_temperatures.*`block_size` 7"),
        (2.0, "confidence_temperatures.*2.0"),
        (["1"] * 7, "confidence_temperatures.*7 numbers"),
        ([1.0] * 6 + [True], "confidence_temperatures.*7 numbers"),
        ([1.0] * 6 + [0.0], "confidence_temperatures.*above 0"),
        ([1.0] * 6 + [-1.0], "confidence_temperatures.*above 0"),
        ([1.0] * 6 + [float("inf")], "confidence_temperatures.*above 0"),
        ([1.0] * 6 + [float("nan")], "confidence_temperatures.*above 0"),
    ],
)
def test_wrong_temperatures_are_refused(temperatures, message):
    with pytest.raises(ValueError, match=message):
        DSparkConfig(**published(confidence_temperatures=temperatures))


def test_temperatures_without_a_confidence_head_are_refused():
    with pytest.raises(ValueError, match="confidence_temperatures.*no confidence head"):
        DSparkConfig(**published({"enable_confidence_head": False}, confidence_temperatures=[1.0] * 7))
