"""Configuration of the DSpark draft model.

The backbone's fields are Qwen3's, and `model_type` stays "qwen3": serving engines know a DSpark draft by that type and
the architecture name `DSparkDraftModel`. What makes it a DSpark draft sits in the nested `dflash_config`.

Every rule is checked once, while the configuration is built. The model trusts what it is given afterwards.
"""

import copy
import json
import math
from typing import Any, NoReturn

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

# The published checkpoint. `DSparkConfig()` without any argument, which transformers calls to learn a class's defaults,
# is this one; every other configuration states its own values.
PUBLISHED = {
    "architectures": ["DSparkDraftModel"],
    "dtype": "bfloat16",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536},
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "block_size": 7,
    "num_target_layers": 93,
    "dflash_config": {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "target_layer_ids": [7, 23, 51, 67, 83],
        "mask_token_id": 163824,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_head_alpha": 1.0,
    },
}

# Fields that fix the model's shape. None has a default: a wrong one would go unnoticed until drafts are never accepted.
COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "block_size",
    "num_target_layers",
)
REQUIRED = (*COUNTS, "rms_norm_eps", "dflash_config")

# What an absent key of `dflash_config` means to the trainer; None where the key is required.
NESTED_DEFAULTS = {
    "projector_type": "dspark",
    "attention_mode": "gqa",
    "target_layer_ids": None,
    "mask_token_id": None,
    "markov_rank": 0,
    "markov_head_type": "vanilla",
    "confidence_head_with_markov": False,
    "confidence_head_alpha": 0.0,
}
NESTED_ONLY = {*NESTED_DEFAULTS, "enable_confidence_head"}
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")

# Nested values that SGLang and vLLM read from the top level when they build the heads. A config.json has them in both
# places, so that it means the same to an engine whether or not that loads this class (tests/test_serving_contract.py).
SERVING_COPIES = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")

# Layout switches of related drafts and the one value implemented here, at the top level or in `dflash_config`.
ONLY_LAYOUT = {
    "sample_from_anchor": (True, "the anchor's row is the first prediction here"),
    "causal": (False, "a block attends to itself in full here"),
    "use_sliding_window": (False, "every layer attends to the whole context here"),
    "sliding_window": (None, "every layer attends to the whole context here"),
    "partial_rotary_factor": (1.0, "the whole head is rotated here"),
}

YARN_REQUIRED = {"factor", "original_max_position_embeddings"}
YARN_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}


class DSparkConfig(Qwen3Config):
    """Configuration of a DSpark draft: a Qwen3 backbone, the target it drafts for, and its two heads.

    Fields beside Qwen3's:
        block_size: tokens drafted per block (K).
        num_target_layers: depth of the target; tap ids are 0-based and lie below it.
        dflash_config: kept as given. Its values, or the trainer's defaults for absent keys, are readable as attributes:
            `target_layer_ids`, `mask_token_id`, `markov_rank` (0: no Markov head), `markov_head_type`,
            `confidence_head_alpha` (the confidence head's weight in the training loss), `enable_confidence_head`
            (absent: whether that weight is above 0), `confidence_head_with_markov`, `attention_mode`, `projector_type`.
        confidence_temperatures: what the confidence logits are divided by, a number for each of the K positions, where
            they decide how many draft tokens to verify; None: they are taken as they are. `scripts/calibrate.py` fits
            them.

    RoPE may be spelled `rope_theta` + `rope_scaling` or `rope_parameters` under any transformers version; it is saved
    in the first spelling, which every version reads. The heads' fields are saved at the top level as well, for the
    serving engines; a copy that contradicts `dflash_config` is refused.

    Raises:
        ValueError: a field is missing, contradicts another, or asks for a layout that is not implemented here.
    """

    def __init__(self, **fields: Any):
        fields = copy.deepcopy(fields or PUBLISHED)
        _check_required(fields)
        nested = _read_nested(fields)
        _check_layout(fields)
        _check_backbone(fields, nested)
        _check_target(fields, nested)
        _check_heads(nested)
        _check_temperatures(fields, nested)
        rope = _read_rope(fields)
        super().__init__(**fields, **_spell_rope(rope))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Build from a parsed `config.json`, with the fields among `kwargs` in place of the file's.

        Override: transformers assigns those fields after construction, past every check.
        """
        other = {"rope_parameters", "layer_types", "confidence_temperatures"}
        own = {*PUBLISHED, *NESTED_ONLY, *ONLY_LAYOUT, *other} - {"dtype"}
        replaced = {name: kwargs.pop(name) for name in own & kwargs.keys()}
        # With another `dflash_config`, the file's copies of the old one's values are out of date.
        stale = SERVING_COPIES if "dflash_config" in replaced else ()
        kept = {name: value for name, value in config_dict.items() if name not in stale}
        return super().from_dict({**kept, **replaced}, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Serialise. Override: RoPE leaves in the spelling that every transformers version reads, and the heads'
        fields also where the serving engines look for them."""
        output = super().to_dict()
        if "rope_parameters" in output:
            output.update(_spell_rope(output.pop("rope_parameters")))
        return {**output, **{name: getattr(self, name) for name in SERVING_COPIES}}

    def _nested(self, name: str) -> Any:
        return self.dflash_config.get(name, NESTED_DEFAULTS[name])

    @property
    def projector_type(self) -> str:
        return self._nested("projector_type")

    @property
    def attention_mode(self) -> str:
        return self._nested("attention_mode")

    @property
    def target_layer_ids(self) -> list[int]:
        return self._nested("target_layer_ids")

    @property
    def mask_token_id(self) -> int:
        return self._nested("mask_token_id")

    @property
    def markov_rank(self) -> int:
        return self._nested("markov_rank")

    @property
    def markov_head_type(self) -> str:
        return self._nested("markov_head_type")

    @property
    def confidence_head_alpha(self) -> float:
        return self._nested("confidence_head_alpha")

    @property
    def enable_confidence_head(self) -> bool:
        return self.dflash_config.get("enable_confidence_head", self.confidence_head_alpha > 0)

    @property
    def confidence_head_with_markov(self) -> bool:
        return self._nested("confidence_head_with_markov")


def _refuse(field: str, value: Any, why: str, remedy: str) -> NoReturn:
    raise ValueError(f"DSparkConfig: `{field}` is {value!r}, but {why}. {remedy}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_required(fields: dict[str, Any]) -> None:
    for name in REQUIRED:
        if fields.get(name) is None:
            _refuse(name, None, "it has no default", "Copy it from the config.json the draft was trained with")
    for name in COUNTS:
        if not _is_int(fields[name]) or fields[name] < 1:
            _refuse(name, fields[name], "it must be an integer of at least 1", "Use the trained value")
    if not _is_number(fields["rms_norm_eps"]) or fields["rms_norm_eps"] <= 0:
        _refuse("rms_norm_eps", fields["rms_norm_eps"], "it must be a number above 0", "The published draft has 1e-5")
    if not isinstance(fields["dflash_config"], dict):
        _refuse("dflash_config", fields["dflash_config"], "it must be a JSON object", "See the published config.json")


def _read_nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `dflash_config` completed with the trainer's defaults.

    A flat copy of a nested value must agree with it and is dropped from `fields`: the value lives in one place.
    """
    given = fields["dflash_config"]
    for name in given.keys() - {*NESTED_ONLY, *ONLY_LAYOUT, "block_size", "num_target_layers"}:
        _refuse(
            f"dflash_config.{name}",
            given[name],
            "this key is unknown here, and drafting without what it asks for could ruin acceptance unnoticed",
            "Remove the key if it changes nothing, or use the code this draft was trained for",
        )
    nested = {**NESTED_DEFAULTS, **given}
    alpha = nested["confidence_head_alpha"]
    if not _is_number(alpha) or alpha < 0:
        _refuse("dflash_config.confidence_head_alpha", alpha, "it must be a number of at least 0", "0 means untrained")
    nested.setdefault("enable_confidence_head", alpha > 0)
    for name in nested.keys() & fields.keys():
        if fields[name] != nested[name]:
            _refuse(name, fields[name], f"`dflash_config.{name}` is {nested[name]!r}", "Make the two agree")
    for name in NESTED_ONLY & fields.keys():
        del fields[name]
    return nested


def _check_layout(fields: dict[str, Any]) -> None:
    for prefix, given in (("", fields), ("dflash_config.", fields["dflash_config"])):
        for name in ONLY_LAYOUT.keys() & given.keys():
            only, why = ONLY_LAYOUT[name]
            if given[name] is not None and given[name] != only:
                _refuse(prefix + name, given[name], why, f"Only a draft trained with {json.dumps(only)} can be loaded")


def _check_backbone(fields: dict[str, Any], nested: dict[str, Any]) -> None:
    heads, kv_heads, mode = fields["num_attention_heads"], fields["num_key_value_heads"], nested["attention_mode"]
    if heads % kv_heads:
        _refuse("num_key_value_heads", kv_heads, f"it must divide `num_attention_heads` {heads}", "Use a divisor")
    if mode not in ("gqa", "mha"):
        _refuse("dflash_config.attention_mode", mode, "'gqa' and 'mha' are known", "Use the trained one")
    if (mode == "mha") != (heads == kv_heads):
        _refuse(
            "dflash_config.attention_mode",
            mode,
            f"there are {heads} query and {kv_heads} key/value heads; 'gqa' means fewer of the latter, 'mha' as many",
            f"Set it to {'mha' if heads == kv_heads else 'gqa'!r}",
        )
    if fields["head_dim"] % 2:
        _refuse("head_dim", fields["head_dim"], "rotary embeddings turn pairs of channels", "Use an even size")
    if fields.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", fields["hidden_act"], "the feed-forward layers are SwiGLU", "Set it to 'silu'")
    if fields.get("model_type", "qwen3") != "qwen3":
        _refuse("model_type", fields["model_type"], "serving engines look for 'qwen3'", "Set it to 'qwen3'")
    if fields.get("tie_word_embeddings"):
        _refuse("tie_word_embeddings", True, "embedding and head are the target's, not the draft's", "Set it to false")
    layers = fields["num_hidden_layers"]
    if fields.get("layer_types") not in (None, ["full_attention"] * layers):
        why = f"the {layers} layers all attend to the whole context here"
        _refuse("layer_types", fields["layer_types"], why, f"Expected 'full_attention' {layers} times")


def _check_target(fields: dict[str, Any], nested: dict[str, Any]) -> None:
    taps, depth = nested["target_layer_ids"], fields["num_target_layers"]
    if not isinstance(taps, list) or not taps or not all(map(_is_int, taps)):
        _refuse("dflash_config.target_layer_ids", taps, "it must list layer ids", "Use the trained list")
    if any(later <= earlier for earlier, later in zip(taps, taps[1:])):
        why = "taps are concatenated in increasing layer order"
        _refuse("dflash_config.target_layer_ids", taps, why, "Give each layer once, in increasing order")
    if taps[0] < 0 or taps[-1] >= depth:
        why = f"layer ids are 0-based and `num_target_layers` is {depth}"
        _refuse("dflash_config.target_layer_ids", taps, why, f"Use ids from 0 to {depth - 1}")

    mask, vocabulary, field = nested["mask_token_id"], fields["vocab_size"], "dflash_config.mask_token_id"
    if not _is_int(mask) or not 0 <= mask < vocabulary:
        _refuse(field, mask, f"it must be an id below `vocab_size` {vocabulary}", "Use the trained id")
    if mask == fields.get("pad_token_id"):
        _refuse(field, mask, "`pad_token_id` is the same id, and a mask is no padding", "Correct one of the two")
    ends = fields.get("eos_token_id")
    if mask in (ends if isinstance(ends, list) else [ends]):
        _refuse(field, mask, f"`eos_token_id` is {ends!r}, and a mask is no end of text", "Correct one of the two")


def _check_heads(nested: dict[str, Any]) -> None:
    if nested["projector_type"] != "dspark":
        why = "this code drafts as DSpark does"
        _refuse("dflash_config.projector_type", nested["projector_type"], why, "Use the code of that draft's own kind")
    rank, kind = nested["markov_rank"], nested["markov_head_type"]
    if not _is_int(rank) or rank < 0:
        _refuse("dflash_config.markov_rank", rank, "it must be an integer of at least 0", "0 means no Markov head")
    if kind not in MARKOV_HEAD_TYPES:
        known = ", ".join(map(repr, MARKOV_HEAD_TYPES))
        _refuse("dflash_config.markov_head_type", kind, f"{known} are known", "Use the trained one")
    for name in ("enable_confidence_head", "confidence_head_with_markov"):
        if not isinstance(nested[name], bool):
            _refuse(f"dflash_config.{name}", nested[name], "it must be true or false", "Use the trained value")
    if nested["enable_confidence_head"] and nested["confidence_head_with_markov"] and not rank:
        why = "`markov_rank` is 0, so there is no Markov embedding for the confidence head to read"
        _refuse("dflash_config.confidence_head_with_markov", True, why, "Set it to false, or give the trained rank")


def _check_temperatures(fields: dict[str, Any], nested: dict[str, Any]) -> None:
    name, places = "confidence_temperatures", fields["block_size"]
    values = fields.setdefault(name, None)
    if values is None:
        return
    if not isinstance(values, list) or len(values) != places or not all(map(_is_number, values)):
        _refuse(name, values, f"it must list `block_size` {places} numbers, one a position", "Fit them to this draft")
    if not all(0 < value < math.inf for value in values):
        _refuse(name, values, "logits are divided by them", "Use numbers above 0")
    if not nested["enable_confidence_head"]:
        _refuse(name, values, "this draft has no confidence head", "Remove the field")


def _read_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Take every spelling of RoPE out of `fields`; return what it means: `rope_type`, `rope_theta`, YaRN's values."""
    theta = fields.pop("rope_theta", None)
    spellings = {name: fields.pop(name, None) for name in ("rope_scaling", "rope_parameters")}
    given = {name: value for name, value in spellings.items() if value} or {"rope_scaling": {}}
    readings = [_read_one_rope(name, value, theta, fields["max_position_embeddings"]) for name, value in given.items()]
    if readings[0] != readings[-1]:
        why = f"`rope_parameters` is {spellings['rope_parameters']!r}"
        _refuse("rope_scaling", spellings["rope_scaling"], why, "Keep one of the two spellings")
    return readings[0]


def _read_one_rope(field: str, value: dict[str, Any], theta: float | None, maximum: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(field, value, "it must be a JSON object", "The published config.json shows one")
    rope = {**value, "rope_type": value.get("rope_type", value.get("type", "default"))}
    rope.pop("type", None)
    rope.setdefault("rope_theta", theta)
    if not _is_number(rope["rope_theta"]) or rope["rope_theta"] <= 0:
        _refuse("rope_theta", rope["rope_theta"], "RoPE needs its base", "The published draft has 10000")
    if theta is not None and theta != rope["rope_theta"]:
        _refuse("rope_theta", theta, f"`{field}.rope_theta` is {rope['rope_theta']!r}", "Keep one of the two")
    if rope["rope_type"] not in ("default", "yarn"):
        _refuse(f"{field}.rope_type", rope["rope_type"], "'default' and 'yarn' are known", "Use the trained one")
    known = {"rope_type", "rope_theta"} | (YARN_REQUIRED | YARN_OPTIONAL if rope["rope_type"] == "yarn" else set())
    for name in rope.keys() - known:
        _refuse(f"{field}.{name}", rope[name], f"{rope['rope_type']!r} RoPE has no such value here", "Remove it")
    if rope["rope_type"] == "yarn":
        _check_yarn(field, rope, maximum)
    return rope


def _check_yarn(field: str, rope: dict[str, Any], maximum: int) -> None:
    for name in sorted(YARN_REQUIRED):
        if not _is_number(rope.get(name)) or rope[name] < 1:
            _refuse(f"{field}.{name}", rope.get(name), "YaRN needs a number of at least 1", "Use the trained value")
    factor, original = float(rope["factor"]), rope["original_max_position_embeddings"]
    rope["factor"] = factor  # transformers 4.x warns about an integer
    if factor * original != maximum:
        why = f"{factor} times `original_max_position_embeddings` {original} is not `max_position_embeddings` {maximum}"
        _refuse(f"{field}.factor", factor, why, "Correct the one of the three that differs from training")


def _spell_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Spell RoPE in the fields that every transformers version reads.

    4.x keeps these two and silently ignores `rope_parameters`; 5.x keeps `rope_parameters` and fills it from these two.
    """
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if rope["rope_type"] != "default" else None}


DSparkConfig.register_for_auto_class()
