"""The DSpark draft model: one pass over a block of K slots proposes the next K tokens of its target.

How it differs from DFlash, its nearest relative, in slots and positions: a DFlash block holds the anchor and K - 1
masks, and the anchor's row is thrown away, which leaves K - 1 drafts. In DSpark that row is the first prediction:

    slot         0        1        ...   K - 1
    token        anchor   mask     ...   mask
    position     p        p + 1    ...   p + K - 1
    row predicts p + 1    p + 2    ...   p + K         -> K draft tokens

The anchor, at position p, is the last committed token; the target has processed positions 0 to p - 1 and not yet the
anchor. A Markov head then goes over the rows from left to right and adds to each row's logits a bias that depends on
the token just drafted, and a confidence head estimates for each row whether its token will be accepted.

What the draft knows of the text are hidden states of the target (context features). They pass through `fc`,
`hidden_norm` and each layer's key and value projections once, when they are written to the `DSparkCache`; the layers
run on the block only.

Shapes: B batch, C new context positions, K block, T taps, V vocabulary, H hidden.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .configuration_dspark import DSparkConfig
from .generation_dspark import draw, generate
from .target_kimi_k3 import VerifiableTarget

# Not used in this file. Up to transformers 5.8 a module of a local folder is found only if the entry file imports it.
from .processors_dspark import RowProcessors  # noqa: F401  # isort: skip
from .request_dspark import Request  # noqa: F401  # isort: skip
from .schedule_dspark import AutoWidth  # noqa: F401  # isort: skip
from .target_state import TargetState  # noqa: F401  # isort: skip

# Early checkpoints keep both heads under this name.
OLD_HEAD_PREFIX = "logit_head."


class DSparkCache:
    """Keys and values of the context, per layer, in buffers that are written in place and grow by half their size.

    Each row's context fills its slots from the first on, so rows of different lengths waste nothing. A block's own keys
    and values go into the slots behind a row's context and are overwritten by whatever comes next.

    Attributes:
        lengths: context positions held, a number for each row.
        next_position: `[B]` int64, the position after the last one written; zeros while empty.
        keys, values: per layer `[B, key/value heads, capacity, head_dim]`.
    """

    def __init__(self, config: DSparkConfig, batch_size: int, dtype: torch.dtype, device: torch.device):
        empty = torch.empty(batch_size, config.num_key_value_heads, 0, config.head_dim, dtype=dtype, device=device)
        self.lengths = [0] * batch_size
        self.next_position = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.keys = [empty] * config.num_hidden_layers
        self.values = [empty] * config.num_hidden_layers
        self._row_starts: torch.Tensor | None = None  # `lengths` on the device, while they differ

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        """Context positions of the longest row."""
        return max(self.lengths)

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def reserve(self, width: int) -> None:
        """Make room for `width` slots behind every row's context."""
        if self.length + width <= self.capacity:
            return
        capacity = max(self.length + width, self.capacity + self.capacity // 2)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                # Zeros, because a slot that no row may look at is still multiplied, by 0.
                buffers[layer] = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                buffers[layer][:, :, : self.length] = old[:, :, : self.length]

    def place(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put `[B, key/value heads, N, head_dim]` into the reserved slots; return views of the context and them."""
        end = self.length + keys.shape[2]
        for buffer, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if self._row_starts is None:
                buffer[:, :, self.length : end] = new
            else:
                slots = self._row_starts[:, None] + torch.arange(keys.shape[2], device=buffer.device)
                rows = torch.arange(self.batch_size, device=buffer.device)[:, None]
                buffer[rows, :, slots] = new.transpose(1, 2)
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def mask(self, width: int) -> torch.Tensor | None:
        """Where a block of `width` slots may look, added to the scores of the views `place` returns: `[B, 1, width,
        slots]`, 0 or -inf. None if all rows are of one length and look everywhere."""
        if self._row_starts is None:
            return None
        slots = torch.arange(self.length + width, device=self.next_position.device)
        hidden = slots >= self._row_starts[:, None] + width
        bias = torch.zeros_like(hidden, dtype=self.keys[0].dtype).masked_fill_(hidden, -torch.inf)
        return bias[:, None, None].expand(-1, -1, width, -1)

    def keep(self, widths: list[int], first_position: torch.Tensor) -> None:
        """Make the first `widths[i]` slots behind row i's context, in every layer, part of it. `first_position` `[B]`
        is the position in the first of them."""
        self.lengths = [length + width for length, width in zip(self.lengths, widths, strict=True)]
        device = first_position.device
        # A number, where one will do for all rows: a tensor from the host would have to be sent to the device.
        step = widths[0] if len(set(widths)) == 1 else torch.tensor(widths, device=device)
        self.next_position = first_position + step
        self._row_starts = torch.tensor(self.lengths, device=device) if len(set(self.lengths)) > 1 else None


@dataclass
class DraftBlock:
    """What one block pass proposes.

    Attributes:
        tokens: `[B, K]` int64, the draft tokens for positions p + 1 to p + K.
        logits: `[B, K, V]` float32, Markov bias included, before any processor.
        scores: `[B, K, V]` float32, the same after the processors; a sampled token was drawn from their softmax.
        hidden: `[B, K, H]`, the normed rows the head read.
        confidence: `[B, K]` float32 logits; their sigmoid estimates P(token accepted | all before it accepted). None if
            the draft has no confidence head.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    scores: torch.Tensor
    hidden: torch.Tensor
    confidence: torch.Tensor | None


class DSparkRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's rotary embedding, with a float32 table however the model is created, cast or moved.

    The table is not saved, so a model built on the meta device has nothing to fill it from; and cast to bfloat16 it
    would be useless at the positions of a long context.
    """

    inv_freq: torch.Tensor

    def _apply(self, fn: Callable, recurse: bool = True):
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        if device.type != "meta":
            with torch.device("cpu"):
                table = Qwen3RotaryEmbedding(self.config).inv_freq.to(device)
            self.inv_freq, self.original_inv_freq = table, table.clone()
        return self


class DSparkAttention(nn.Module):
    """Attention of the block's queries to the whole context and the whole block; query heads share key/value heads."""

    is_causal = False  # read by the attention functions of transformers

    def __init__(self, config: DSparkConfig, layer_index: int):
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys_and_values(self, inputs: torch.Tensor, rotary: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Project `[B, N, H]` to keys, normed and rotated, and values: `[B, key/value heads, N, head_dim]` each."""
        keys = rotate(self.k_norm(self._split_heads(self.k_proj(inputs))), rotary)
        return keys, self._split_heads(self.v_proj(inputs))

    def forward(
        self, hidden: torch.Tensor, rotary: tuple, cache: DSparkCache, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend from the block `[B, K, H]` to the cached context and the block, or where `mask` says; same shape out.

        `mask`: added to the scores, `[B, 1, K, context + K]`: 0 where a row may look, else -inf. Training runs many
        blocks at once with it.
        """
        queries = rotate(self.q_norm(self._split_heads(self.q_proj(hidden))), rotary)
        keys, values = cache.place(self.layer_index, *self.keys_and_values(hidden, rotary))
        # The registry holds every implementation but eager.
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        mixed, _ = attend(self, queries, keys, values, mask, scaling=self.head_dim**-0.5, dropout=dropout)
        return self.o_proj(mixed.flatten(2))

    def _split_heads(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DSparkLayer(nn.Module):
    """One layer: attention, then SwiGLU, each on the normed residual stream of the block."""

    def __init__(self, config: DSparkConfig, layer_index: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, rotary: tuple, cache: DSparkCache, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, cache, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class VanillaMarkovHead(nn.Module):
    """Logit bias of the previous token, in low rank: `W2 W1[prev]`."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def forward(self, base_logits: torch.Tensor, hidden: torch.Tensor, anchor_ids: torch.Tensor) -> tuple:
        """`draw_left_to_right` with this head and nothing else, which can be compiled whole."""
        return draw_left_to_right(self, base_logits, hidden, anchor_ids)

    def step(self, prev_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None):
        """One step from left to right.

        Args:
            prev_ids: `[B]` the token before the one to predict: the anchor at row 0.
            hidden: `[B, H]` the row that predicts.
            state: what the previous step returned; None at row 0.

        Returns:
            The bias `[B, V]` and the state for the next step (None for heads that keep none).
        """
        return self.markov_w2(self.markov_w1(prev_ids)), None


class GatedMarkovHead(VanillaMarkovHead):
    """The previous token's embedding passes a gate that sees the row: `W2 (sigmoid(G [h; W1[prev]]) * W1[prev])`."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, prev_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None):
        previous = self.markov_w1(prev_ids)
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], dim=-1)))
        return self.markov_w2(gate * previous), None


class RNNMarkovHead(VanillaMarkovHead):
    """A gated recurrence over the block, from a zero state, so that the bias depends on every token drafted so far."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def step(self, prev_ids: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None):
        previous = self.markov_w1(prev_ids)
        state = torch.zeros_like(previous) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, previous, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), state


MARKOV_HEADS = {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


class ConfidenceHead(nn.Module):
    """Logit of P(token accepted | all before it accepted), from the row and, if trained so, the previous token."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        extra = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[..., H]` or `[..., H + rank]` to float32 logits `[...]`."""
        return self.proj(inputs).squeeze(-1).float()


class DSparkDraftModel(PreTrainedModel):
    """The draft. Input embedding and output head are the target's: passed in and called, never owned, never saved."""

    config_class = DSparkConfig
    _no_split_modules = ["DSparkLayer"]
    _supports_sdpa = True

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(DSparkLayer(config, index) for index in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DSparkRotaryEmbedding(config)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.register_load_state_dict_pre_hook(rename_old_heads)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """Load as transformers does, but refuse a checkpoint that does not fit.

        Override: transformers only warns about missing and unexpected tensors and fills the gaps with random weights,
        and a draft with a random tensor still generates, just never faster. Old head names are accepted.

        Raises:
            ValueError: naming every tensor that is missing, unexpected, or of another shape.
        """
        kwargs.setdefault("key_mapping", {"^" + re.escape(OLD_HEAD_PREFIX): ""})
        kwargs["ignore_mismatched_sizes"] = True  # reported below by name, with the others
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        refuse_misfit(pretrained_model_name_or_path, model, info)
        model._weight_conversions = None  # transformers 5.x would save under the old names again
        return (model, info) if output_loading_info else model

    @property
    def device(self) -> torch.device:
        """Where the draft is. Override: the inherited property searches the parameters, and every block asks often."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the draft computes in. Override: as for `device`."""
        return self.norm.weight.dtype

    @classmethod
    def can_generate(cls) -> bool:
        """False: alone, the draft generates nothing, and `generate` here needs a target.

        Override: the Auto classes add GenerationMixin to every class with a `generate`, and loading would then put this
        repository's `custom_generate`, which is meant for targets, over the draft's own method.
        """
        return False

    def get_input_embeddings(self) -> None:
        """None: the embedding is the target's. Override: the inherited method looks for one and raises."""
        return None

    def resize_token_embeddings(self, *args, **kwargs) -> NoReturn:
        """Override: refuses. The embedding is the target's, and the Markov tables are trained for its vocabulary."""
        raise ValueError(
            f"The draft's vocabulary ({self.config.vocab_size}) is its target's and cannot be resized. Train a draft "
            "for the resized target instead."
        )

    def new_cache(self, batch_size: int = 1) -> DSparkCache:
        """An empty context cache for `batch_size` rows, on the draft's device and in its dtype.

        Raises ValueError for a draft that is spread over several devices or offloaded.
        """
        devices = sorted({str(parameter.device) for parameter in self.parameters()})
        if len(devices) > 1 or devices == ["meta"]:
            raise ValueError(
                f"The draft's weights are on {', '.join(devices)}, expected one device with all of them loaded: every "
                'block reads them all. Load the draft with device_map={"": <device>}.'
            )
        return DSparkCache(self.config, batch_size, self.dtype, self.device)

    @torch.no_grad()
    def write_context(
        self,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DSparkCache,
        widths: list[int] | None = None,
    ) -> None:
        """Append context to the cache: keys and values of positions the target has processed and committed.

        Args:
            features: `[B, C, T * H]` hidden states of the T tapped layers, in the order of `target_layer_ids`; any
                float dtype, any device.
            position_ids: `[B, C]` absolute positions, which continue those in the cache one by one.
            cache: written in place.
            widths: how many of the C positions count, from the first on, a number for each row; all of them if None.

        Raises:
            ValueError: shapes that do not fit the draft, the cache or each other; more context than the draft has
                positions; positions that leave a gap or overlap (checked on the CPU only: elsewhere looking at values
                would stall the device in every round).
        """
        widths = [features.shape[1]] * features.shape[0] if widths is None else widths
        self._check_context(features, position_ids, cache, widths)
        position_ids = position_ids.to(self.device)
        context = self.hidden_norm(self.fc(features.to(self.device, self.dtype)))
        rotary = self.rotary_emb(context, position_ids)
        cache.reserve(features.shape[1] + self.config.block_size)  # and for the block that comes next
        for index, layer in enumerate(self.layers):
            cache.place(index, *layer.self_attn.keys_and_values(context, rotary))  # type: ignore[operator]
        cache.keep(widths, position_ids[:, 0])

    @torch.no_grad()
    def forward(self, embeds: torch.Tensor, position_ids: torch.Tensor, cache: DSparkCache) -> torch.Tensor:
        """Run the layers over a block.

        Args:
            embeds: `[B, K, H]` the target's embeddings of anchor and masks, in the draft's dtype.
            position_ids: `[B, K]`.
            cache: the context, with room for the block behind it; its contents stay as they are.

        Returns:
            `[B, K, H]` normed hidden states, ready for the target's head.
        """
        rotary = self.rotary_emb(embeds, position_ids)
        hidden, mask = embeds, cache.mask(embeds.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, rotary, cache, mask)
        return self.norm(hidden)

    @torch.no_grad()
    def draft_block(
        self,
        anchor_ids: torch.Tensor,
        cache: DSparkCache,
        target: VerifiableTarget | nn.Module,
        process: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor] | None = None,
        do_sample: bool = False,
        generator: torch.Generator | None = None,
    ) -> DraftBlock:
        """Propose the K tokens after the anchor.

        Args:
            anchor_ids: `[B]` int64, the last committed token, which the target has not processed yet.
            cache: context up to the position before the anchor; its contents stay as they are.
            target: lends its input embedding and output head.
            process: maps the tokens drafted so far in the block, `[B]` each, and the float32 Markov-corrected logits
                `[B, V]` of the next place to its scores, as logits processors do.
            do_sample: draw from the softmax of the scores instead of taking their argmax.
            generator: to draw with; torch's own if None.

        Raises:
            ValueError: shapes that do not fit the cache or each other; a target of another hidden or vocabulary size.
        """
        check_anchors(anchor_ids, cache)
        target = VerifiableTarget.wrap(target)
        anchor_ids = anchor_ids.to(self.device)
        hidden = self._block_hidden(anchor_ids, cache, target)
        base_logits = target.head(hidden).to(self.device, torch.float32)
        check_lent("output head", base_logits, "vocab_size", self.config.vocab_size)
        if self.markov_head is None or process or do_sample:
            drawn = draw_left_to_right(self.markov_head, base_logits, hidden, anchor_ids, process, do_sample, generator)
        else:
            drawn = self.markov_head(base_logits, hidden, anchor_ids)
        tokens, logits, scores = drawn
        confidence = self.confidence_logits(hidden, torch.cat([anchor_ids[:, None], tokens[:, :-1]], dim=1))
        return DraftBlock(tokens, logits, scores, hidden, confidence)

    def confidence_logits(self, hidden: torch.Tensor, prev_ids: torch.Tensor) -> torch.Tensor | None:
        """Confidence of each row `[B, K, H]`, given the token before the one it predicts `[B, K]`.

        Returns float32 logits `[B, K]`, or None if the draft has no confidence head.
        """
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(prev_ids)], dim=-1)
        return self.confidence_head(hidden)

    def compile(self, *args, **kwargs) -> None:
        """Compile what every round runs, with the arguments of `torch.compile`; `dynamic=True` suits every length.

        Override: the inherited method compiles the pass of the layers. The greedy drawing of tokens is small operations
        too, seven times over; with processors or sampling it stays as it is.
        """
        super().compile(*args, **kwargs)
        if self.markov_head is not None:
            self.markov_head.compile(*args, **kwargs)

    def generate(self, input_ids: torch.Tensor | None = None, target: nn.Module | None = None, **kwargs):
        """Generate with `target`, token for token what it generates alone: see `generate` in `generation_dspark`."""
        return generate(self, input_ids, target, **kwargs)

    def _block_hidden(self, anchor_ids: torch.Tensor, cache: DSparkCache, target: VerifiableTarget) -> torch.Tensor:
        masks = anchor_ids.new_full((anchor_ids.shape[0], self.config.block_size - 1), self.config.mask_token_id)
        embeds = target.embed(torch.cat([anchor_ids[:, None], masks], dim=1)).to(self.device, self.dtype)
        check_lent("input embedding", embeds, "hidden_size", self.config.hidden_size)
        position_ids = cache.next_position[:, None] + torch.arange(self.config.block_size, device=self.device)
        cache.reserve(self.config.block_size)  # here and not in the pass, where it would be compiled
        return self(embeds, position_ids, cache)

    def _check_context(
        self, features: torch.Tensor, position_ids: torch.Tensor, cache: DSparkCache, widths: list[int]
    ) -> None:
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        if features.ndim != 3 or features.shape[2] != width or features.shape[1] == 0:
            raise ValueError(
                f"features have shape {list(features.shape)}, expected [batch, positions, {width}] with at least one "
                f"position: the tapped layers {self.config.target_layer_ids}, {self.config.hidden_size} wide each, in "
                "that order. Check that target and draft belong together."
            )
        if not features.is_floating_point():
            raise ValueError(f"features are {features.dtype}, expected a float dtype: hidden states of the target.")
        if features.shape[0] != cache.batch_size or position_ids.shape != features.shape[:2]:
            raise ValueError(
                f"features are for batch and positions {list(features.shape[:2])}, position_ids have shape "
                f"{list(position_ids.shape)} and the cache holds batch {cache.batch_size}. All must agree; the cache "
                "comes from `draft.new_cache(batch_size)`."
            )
        if len(widths) != cache.batch_size or not all(0 <= width <= features.shape[1] for width in widths):
            raise ValueError(
                f"widths are {widths}, expected {cache.batch_size} numbers from 0 to {features.shape[1]}: how many of "
                "the positions count, for each row in the cache."
            )
        maximum, longest = self.config.max_position_embeddings, max(map(sum, zip(cache.lengths, widths)))
        if longest > maximum:
            raise ValueError(
                f"The context would grow from {cache.length} to {longest} positions, and the draft has {maximum} "
                "(`max_position_embeddings`). End the text there."
            )
        if position_ids.device.type == cache.next_position.device.type == "cpu":
            expected = cache.next_position[:, None] + torch.arange(position_ids.shape[1])
            if not torch.equal(position_ids.long(), expected):
                raise ValueError(
                    f"position_ids run from {position_ids[:, 0].tolist()} to {position_ids[:, -1].tolist()} (an entry "
                    f"per row), but the context in the cache goes on at {cache.next_position.tolist()}, one by one. A "
                    "gap or an overlap would shift every draft after it. Write committed positions once each, in order."
                )


def rotate(inputs: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate `[B, heads, N, head_dim]` by the cosines and sines `[B, N, head_dim]` of its positions."""
    cos, sin = (table[:, None] for table in rotary)
    return inputs * cos + rotate_half(inputs) * sin


def draw_left_to_right(
    markov_head: VanillaMarkovHead | None,
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchor_ids: torch.Tensor,
    process: Callable | None = None,
    do_sample: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the K tokens one by one from the target head's float32 logits `[B, K, V]` of the rows `[B, K, H]`; return
    tokens `[B, K]`, logits and scores `[B, K, V]`. The other arguments are those of `draft_block`."""
    drafted: list[torch.Tensor] = []
    rows, state = [], None
    for k in range(base_logits.shape[1]):
        logits = base_logits[:, k]
        if markov_head is not None:
            bias, state = markov_head.step(drafted[-1] if drafted else anchor_ids, hidden[:, k], state)
            logits = logits + bias.float()
        scores = process(drafted, logits) if process else logits
        drafted.append(pick_token(scores, do_sample, generator))
        rows.append((logits, scores))
    logits, scores = (torch.stack(column, dim=1) for column in zip(*rows))
    return torch.stack(drafted, dim=1), logits, scores


def pick_token(scores: torch.Tensor, do_sample: bool, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token `[B]` per row of `[B, V]` scores: the argmax, or a draw from their softmax."""
    if not do_sample:
        return scores.argmax(dim=-1)
    return draw(scores.softmax(dim=-1), generator)


def check_anchors(anchor_ids: torch.Tensor, cache: DSparkCache) -> None:
    if anchor_ids.dtype != torch.long or anchor_ids.shape != (cache.batch_size,):
        raise ValueError(
            f"anchor_ids are {anchor_ids.dtype} of shape {list(anchor_ids.shape)}, expected int64 of shape "
            f"[{cache.batch_size}]: the last committed token of each row in the cache."
        )


def check_lent(name: str, output: torch.Tensor, field: str, width: int) -> None:
    if output.shape[-1] != width:
        raise ValueError(
            f"The target's {name} returns vectors of {output.shape[-1]}, the draft's `{field}` is {width}. This draft "
            "was not trained for this target: load the pair that belongs together."
        )


def rename_old_heads(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """`load_state_dict` hook: take heads under their old name for what they are."""
    old = prefix + OLD_HEAD_PREFIX
    for name in [name for name in state_dict if name.startswith(old)]:
        state_dict[prefix + name.removeprefix(old)] = state_dict.pop(name)


def refuse_misfit(path: str, model: DSparkDraftModel, info: dict) -> None:
    """Raise ValueError, by name, for what transformers' loading report says does not fit."""
    # transformers 4.x reports a tensor of another shape by its name, 5.x as a tuple that starts with the name.
    names = [entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"]]
    misfits = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "of another shape": [f"{name} (expected {list(model.get_parameter(name).shape)})" for name in sorted(names)],
    }
    found = [f"{kind}: {', '.join(tensors)}" for kind, tensors in misfits.items() if tensors]
    if found:
        raise ValueError(
            f"The checkpoint at {path} does not fit its configuration. Tensors {'; '.join(found)}. The draft would run "
            "on random or incomplete weights. Load config.json and weights of one and the same draft; embedding and "
            "output head are the target's and do not belong into the file."
        )


DSparkDraftModel.register_for_auto_class("AutoModel")
