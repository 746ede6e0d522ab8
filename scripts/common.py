"""What the scripts share: loading a target and its draft, reading a prompt, and the target's plain decoding to compare
with."""

import inspect
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY_TARGET = ROOT / "examples" / "tiny-kimi-k3"
TINY_DRAFT = ROOT / "examples" / "tiny-kimi-k3-dspark"


def load_target(path: str | Path):
    """The target model, in its own dtype and on the best device at hand, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    device_map = "auto" if torch.cuda.is_available() else None
    target = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="auto", device_map=device_map)
    return target.eval(), tokenizer


def load_draft(path: str | Path | None, target):
    """The draft at `path`; without a path the trained one in `examples/`, or if there is none a freshly initialised
    one."""
    if path is None and not TINY_DRAFT.exists():
        return fresh_draft(target)
    draft = AutoModel.from_pretrained(path or TINY_DRAFT, trust_remote_code=True, dtype="auto")
    return draft.to(target.device).eval()


def fresh_draft(target):
    """An untrained draft of matching shape: exact like any draft, but its guesses are as good as chance."""
    text = target.config.get_text_config()
    layers = text.num_hidden_layers
    config = AutoConfig.from_pretrained(
        ROOT,
        trust_remote_code=True,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=2 * text.hidden_size,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_target_layers=layers,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        dflash_config={
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "target_layer_ids": sorted({1, layers // 4, layers // 2, 3 * layers // 4, layers - 2}),
            "mask_token_id": target.config.mask_token_id,
            "markov_rank": 32,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "confidence_head_alpha": 1.0,
        },
    )
    draft = AutoModel.from_config(config, trust_remote_code=True)
    return draft.to(device=target.device, dtype=target.dtype).eval()


def encode_prompt(tokenizer, prompt: str) -> torch.Tensor:
    """Token ids `[1, prompt]`, as a user's turn if the tokenizer has a chat template, else as plain text to
    continue."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").input_ids
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


@torch.no_grad()
def plain_greedy(target, input_ids: torch.Tensor, max_new_tokens: int, stop_ids=(), **prompt_inputs) -> torch.Tensor:
    """The target's own greedy continuation, `[1, prompt + new]`: one token a forward, no draft involved."""
    cache_name = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
    output = target(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=True, **prompt_inputs)
    # An image's placeholder stands for many positions; only the target knows how many.
    processed = output.logits.shape[1] if prompt_inputs else input_ids.shape[1]
    for made in range(1, max_new_tokens + 1):
        token = output.logits[:, -1].float().argmax(dim=-1, keepdim=True)
        input_ids = torch.cat([input_ids, token], dim=1)
        processed += 1
        if token.item() in stop_ids or made == max_new_tokens:
            break
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        mask = token.new_ones(1, processed)
        output = target(input_ids=token, attention_mask=mask, use_cache=True, **{cache_name: cache})
    return input_ids
