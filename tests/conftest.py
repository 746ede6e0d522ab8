"""Shared fixtures: the root modules as an importable package, small targets of every supported kind, and plain
decoding.

The oracle for losslessness is `plain_greedy`: the target alone, one token a forward, and the argmax of its logits.
"""

import atexit
import dataclasses
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two test processes must not copy remote code into one folder at the same time.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="dspark-modules-")

import pytest
import torch
import transformers

atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

ROOT = Path(__file__).resolve().parent.parent


def add_package(name: str, folder: Path) -> None:
    """Make `folder`, whose modules import each other with a leading dot, importable as the package `name`."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


add_package("dspark", ROOT)
add_package("tiny_kimi_k3", ROOT / "examples" / "tiny-kimi-k3")
sys.path.insert(0, str(ROOT / "scripts"))

from common import plain_greedy  # noqa: E402, F401  (tests import it from here)

# The models are tiny: a second thread costs more in waiting than it computes, above all on a busy machine.
torch.set_num_threads(1)

HAS_NATIVE_KIMI = hasattr(transformers, "KimiLinearForCausalLM")
TARGET_KINDS = ["text", "wrapper", "qwen3"] + (
    ["native"] if HAS_NATIVE_KIMI else []
)  # native: transformers 5.19 and later

SMALL = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 5, "bos_token_id": 8, "pad_token_id": 10}
MASK_TOKEN_ID = 11
PLACEHOLDER_ID = 7


def text_config(**changes):
    """A Kimi K3 text configuration with KDA layers 0 to 2 and MLA layers 3 and 4, and three AttnRes snapshots."""
    from tiny_kimi_k3.configuration_kimi_k3 import KimiLinearConfig

    fields = dict(
        SMALL,
        intermediate_size=48,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        linear_attn_config={
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4, 5],
            "num_heads": 2,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
        attn_res_block_size=2,
        num_experts=4,
        moe_intermediate_size=16,
        routed_expert_hidden_size=16,
        initializer_range=0.3,
    )
    return KimiLinearConfig(**{**fields, **changes})


def make_target(kind: str, seed: int = 0, **changes):
    """A small random target in float32: its logits spread enough that near ties do not occur in practice."""
    torch.manual_seed(seed)
    if kind == "text":
        from tiny_kimi_k3.modeling_kimi_k3 import KimiLinearForCausalLM

        return KimiLinearForCausalLM(text_config(**changes)).eval()
    if kind == "wrapper":
        from tiny_kimi_k3.configuration_kimi_k3 import KimiK3Config
        from tiny_kimi_k3.modeling_kimi_k3 import KimiK3ForConditionalGeneration

        config = KimiK3Config(
            text_config=text_config(**changes),
            media_placeholder_token_id=PLACEHOLDER_ID,
            initializer_range=0.3,
            bos_token_id=8,
            pad_token_id=10,
        )
        return KimiK3ForConditionalGeneration(config).eval()
    if kind == "native":
        changes = {"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2, **changes}
        config = transformers.KimiLinearConfig(
            **dict(SMALL, **changes),
            intermediate_size=48,
            moe_intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            kv_lora_rank=12,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            linear_head_dim=8,
            linear_num_heads=2,
            initializer_range=0.3,
            eos_token_id=None,
        )
        return transformers.KimiLinearForCausalLM(config).eval()
    if kind == "qwen3":
        config = transformers.Qwen3Config(
            **dict(SMALL, **changes),
            intermediate_size=48,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.3,
        )
        return transformers.Qwen3ForCausalLM(config).eval()
    raise ValueError(f"unknown kind {kind!r}")


@pytest.fixture(params=TARGET_KINDS)
def kind(request):
    return request.param


def tensors_of(cache) -> dict[str, torch.Tensor]:
    """Every tensor a cache holds, by name, read without the package's help."""
    held = {}
    if hasattr(cache, "layers"):
        for i, layer in enumerate(cache.layers):
            fields = {name: getattr(layer, name, None) for name in ("keys", "values")}
            for name in ("conv_states", "recurrent_states"):
                fields |= {f"{name}.{j}": state for j, state in getattr(layer, name, {}).items()}
            held |= {f"{i}.{name}": tensor for name, tensor in fields.items() if tensor is not None}
        return held
    for name in ("conv_states", "recurrent_states", "key_cache", "value_cache"):
        for i, entry in enumerate(getattr(cache, name)):
            parts = entry if isinstance(entry, (tuple, list)) else [entry]
            held |= {f"{i}.{name}.{j}": part for j, part in enumerate(parts) if part is not None}
    return held


class Forwards:
    """Records the width of every forward of a target."""

    def __init__(self, target):
        self.widths = []
        self.remove = target.register_forward_pre_hook(self._record, with_kwargs=True).remove

    def _record(self, module, args, kwargs):
        self.widths.append(kwargs["input_ids"].shape[1])


def random_ids(length: int) -> torch.Tensor:
    """A prompt `[1, length]` of ids that every small target knows and none takes for a special token."""
    return torch.randint(0, 7, (1, length))


def pad_left(rows: list[torch.Tensor], pad_token_id: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts `[1, n]` of any lengths as one batch: ids and attention mask, `[B, longest]` each."""
    width = max(row.shape[1] for row in rows)
    pad = torch.nn.functional.pad
    ids = torch.cat([pad(row, (width - row.shape[1], 0), value=pad_token_id) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows])
    return ids, mask


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def make_draft(target, draft_class=None, seed: int = 1, **nested):
    """A random draft that fits `target`: taps of KDA and MLA layers, a Markov head and a confidence head, plain
    RoPE."""
    from dspark.configuration_dspark import DSparkConfig
    from dspark.modeling_dspark import DSparkDraftModel
    from dspark.target_kimi_k3 import locate_text_model

    text = locate_text_model(target)[0].config
    config = DSparkConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        initializer_range=0.3,
        block_size=7,
        num_target_layers=text.num_hidden_layers,
        dflash_config={
            "projector_type": "dspark",
            "target_layer_ids": [0, 2, 4],
            "mask_token_id": MASK_TOKEN_ID,
            "markov_rank": 8,
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True,
            **nested,
        },
    )
    torch.manual_seed(seed)
    return (draft_class or DSparkDraftModel)(config).eval()


def make_scripted_draft(target, propose, **nested):
    """A draft whose tokens are dictated: `propose(prefix_ids [1, c])` returns up to seven ids, filled up with wrong
    ones.

    The rest of the block pass is the real one. The dictated law is one-hot, as a deterministic draft's is.
    `draft.prefixes` records the committed text of every round, and `draft.watch(prefix_ids, cache, target)` is called
    there if set.
    """
    from dspark.modeling_dspark import DSparkDraftModel

    class ScriptedDraft(DSparkDraftModel):
        def draft_block(self, anchor_ids, cache, target, texts, *rest):
            block = super().draft_block(anchor_ids, cache, target, texts, *rest)
            (prefix_ids,) = texts.texts
            self.prefixes.append(prefix_ids.clone())
            if self.watch is not None:
                self.watch(prefix_ids, cache, target)
            tokens = torch.tensor([propose(prefix_ids)])
            scores = torch.full_like(block.scores, -torch.inf).scatter(-1, tokens[..., None], 0.0)
            return dataclasses.replace(block, tokens=tokens, scores=scores)

    draft = make_draft(target, ScriptedDraft, **nested)
    draft.prefixes, draft.watch = [], None
    return draft


def make_batch_draft(target, seed: int = 1, **nested):
    """A draft for several rows, whose blocks are right about `draft.rights[row]`, a row's whole text, up to the next
    place of `draft.script` (7: everywhere); with `draft.script` None they are its own."""
    from dspark.modeling_dspark import DSparkDraftModel

    class BatchDraft(DSparkDraftModel):
        script, rights = None, ()

        def draft_block(self, anchor_ids, cache, target, texts, *rest):
            block = super().draft_block(anchor_ids, cache, target, texts, *rest)
            if self.script is None:
                return block
            tokens = block.tokens.clone()
            for row, text in enumerate(texts.texts):
                if text is not None:
                    right = self.rights[row][text.shape[1] :][:7]
                    tokens[row, : len(right)] = torch.tensor(right, dtype=torch.long)
                    wrong = next(self.script)
                    if wrong < 7:
                        tokens[row, wrong] = (tokens[row, wrong] + 1) % self.config.vocab_size
            return dataclasses.replace(block, tokens=tokens)

    return make_draft(target, BatchDraft, seed, **nested)


def follow(text, accepted=lambda: 7, vocab_size: int = 12):
    """A script that proposes what follows in `text` `[1, n]`, but is wrong at place `accepted()` (0-based; 7:
    nowhere)."""

    def propose(prefix_ids):
        at = prefix_ids.shape[1]
        tokens = text[0, at : at + 7].tolist()
        tokens += [0] * (7 - len(tokens))
        wrong = accepted()
        if wrong < 7:
            tokens[wrong] = (tokens[wrong] + 1) % vocab_size
        return tokens

    return propose
