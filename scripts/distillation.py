"""The training objective: blocks at sampled anchors, run all at once, against the target's own distributions.

The recipe of the published checkpoint. Of each text some positions are anchors. A block of K rows starts at each: it
sees the context before its anchor and itself, and no other block. Row k of the block at p is supervised at p + k + 1:

    loss = 0.1 CE(token) + 0.9 L1(target's law) + 1.0 BCE(confidence, acceptance)

with acceptance `1 - L1 / 2`, the probability that speculative sampling accepts the row's draft. Rows weigh
`exp(-k / gamma)`, since a late row matters only if the earlier ones were accepted.

The target's features come from `VerifiableTarget.observe`, so from the taps the generation loop reads.

Shapes: B texts, S positions, A anchors a text, K block, N blocks, V vocabulary, H hidden, T taps.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
GAMMA = 4.0
GROUP = 8  # blocks that share one attention call: more waste work on keys they mask, fewer copy the context more often


@dataclass
class Terms:
    """Sums over blocks, of which losses and figures are quotients. float32.

    Attributes:
        ce, l1, bce: weighted sums over the supervised rows, `[]`.
        weight: sum of the weights, `[]`.
        accepted, rows: by position, acceptance summed and rows counted, `[K]`.
        expected, blocks: expected accepted length summed over blocks and blocks counted, `[]`.
    """

    ce: torch.Tensor
    l1: torch.Tensor
    bce: torch.Tensor
    weight: torch.Tensor
    accepted: torch.Tensor
    rows: torch.Tensor
    expected: torch.Tensor
    blocks: torch.Tensor

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass
class Losses:
    """What a training step minimises and reports.

    Attributes:
        loss: `0.1 ce + 0.9 l1 + 1.0 bce`, `[]`, with gradient.
        ce, l1, bce: each term's weighted mean over the supervised rows, `[]`.
        acceptance: mean acceptance by position, `[K]`; nan where no row was supervised.
        expected_length: mean over blocks of 1 + the sum of the cumulative products of acceptance, `[]`.
    """

    loss: torch.Tensor
    ce: torch.Tensor
    l1: torch.Tensor
    bce: torch.Tensor
    acceptance: torch.Tensor
    expected_length: torch.Tensor


class Distillation(nn.Module):
    """The draft with its objective, as one module, so that every way of distributing a module works on it.

    Args:
        draft: the `DSparkDraftModel` to train.
        target: a `VerifiableTarget`, whose model is frozen here; lends embedding and head, and is not part of this
            module.
        chunk_anchors: anchors a text processed at once. More than one chunk costs a second forward each (gradient
            checkpointing) and keeps memory at one chunk of `[B, chunk_anchors, K, V]`.
        gamma: decay of the row weights, in rows.
    """

    def __init__(self, draft: nn.Module, target, chunk_anchors: int = 64, gamma: float = GAMMA):
        super().__init__()
        self.draft = draft
        self.target = target
        target.model.requires_grad_(False)
        self.chunk_anchors = chunk_anchors
        self.gamma = gamma

    def forward(self, trace, input_ids: torch.Tensor, anchors: torch.Tensor, rows: torch.Tensor) -> Losses:
        """The losses of a batch.

        Args:
            trace: what `target.observe(input_ids)` returned.
            input_ids: `[B, S]` int64, padded on the right.
            anchors: `[B, A]` int64 positions.
            rows: `[B, A, K]` bool, True where a row is supervised.
        """
        context = self._context(trace.features)
        chunks = list(zip(anchors.split(self.chunk_anchors, dim=1), rows.split(self.chunk_anchors, dim=1)))
        total = None
        for chunk in chunks:
            arguments = (context, trace.hidden, input_ids, *chunk)
            if len(chunks) > 1:
                terms = checkpoint(self._chunk_terms, *arguments, use_reentrant=False)
            else:
                terms = self._chunk_terms(*arguments)
            total = terms if total is None else total + terms
        return combine(total)

    def block_hidden(self, features: torch.Tensor, input_ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Normed hidden rows `[B, A, K, H]` of the blocks at `anchors` `[B, A]`, given features `[B, S, T * H]`."""
        return self._block_hidden(self._context(features), input_ids, anchors)

    def _context(self, features: torch.Tensor) -> torch.Tensor:
        draft = self.draft
        return draft.hidden_norm(draft.fc(features.to(draft.device, draft.dtype)))

    def _block_hidden(self, context: torch.Tensor, input_ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        draft, (batch, count) = self.draft, anchors.shape
        groups = -(-count // GROUP)
        # Groups are rows of the batch. The last one is filled up with blocks that nobody reads.
        anchors = F.pad(anchors, (0, groups * GROUP - count)).view(batch * groups, GROUP)
        positions, embeds = self._slots(input_ids, anchors)
        cache = TeacherContext(draft, context, groups)
        mask = attention_mask(anchors, context.shape[1], draft.config.block_size, embeds.dtype)
        rotary, hidden = draft.rotary_emb(embeds, positions), embeds
        for layer in draft.layers:
            hidden = layer(hidden, rotary, cache, mask)
        hidden = draft.norm(hidden).view(batch, groups * GROUP, draft.config.block_size, -1)
        return hidden[:, :count]

    def _slots(self, input_ids: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions `[B * groups, GROUP * K]` and embeddings `[.., H]` of the blocks' slots: an anchor and masks."""
        config = self.draft.config
        positions = anchors[..., None] + torch.arange(config.block_size, device=anchors.device)
        ids = torch.full_like(positions, config.mask_token_id)
        ids[..., 0] = input_ids.gather(1, anchors.view(len(input_ids), -1)).view_as(anchors)
        embeds = self.target.embed(ids.flatten(1)).to(self.draft.device, self.draft.dtype)
        return positions.flatten(1), embeds

    def _chunk_terms(self, context, target_hidden, input_ids, anchors, rows) -> Terms:
        draft, target = self.draft, self.target
        places = anchors[..., None] + torch.arange(draft.config.block_size, device=anchors.device)
        hidden = self._block_hidden(context, input_ids, anchors).flatten(0, 1)
        prev_ids = gather_rows(input_ids, places).flatten(0, 1)
        logits = target.head(hidden).to(draft.device).float() + markov_bias(draft, prev_ids, hidden)
        with torch.no_grad():
            target_logits = target.head(gather_rows(target_hidden, places)).to(draft.device).float()
        return block_terms(
            logits,
            target_logits.flatten(0, 1),
            draft.confidence_logits(hidden, prev_ids),
            gather_rows(input_ids, places + 1).flatten(0, 1),
            row_weights(rows, self.gamma).flatten(0, 1),
        )


class TeacherContext:
    """Takes the place of `DSparkCache` in the layers: the whole text as context, and blocks whose gradient is kept.

    Keys and values of the context are made inside the layer's own forward, which is where a sharded layer has its
    weights.
    """

    def __init__(self, draft: nn.Module, context: torch.Tensor, groups: int):
        positions = torch.arange(context.shape[1], device=context.device).expand(len(context), -1)
        self.layers, self.context, self.groups = draft.layers, context, groups
        self.rotary = draft.rotary_emb(context, positions)

    def place(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Context and block keys and values, `[B * groups, key/value heads, S + GROUP * K, head_dim]` each."""
        known = self.layers[layer].self_attn.keys_and_values(self.context, self.rotary)
        pairs = zip(known, (keys, values), strict=True)
        return tuple(torch.cat([old.repeat_interleave(self.groups, dim=0), new], dim=2) for old, new in pairs)


def attention_mask(anchors: torch.Tensor, length: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask `[N, 1, G * K, S + G * K]` for G blocks at `anchors` `[N, G]`: a row sees the positions before its
    own anchor, and its own block."""
    places = torch.arange(length, device=anchors.device)
    context = places < anchors[..., None]
    block = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).expand(len(anchors), -1, -1)
    seen = torch.cat([context, block.repeat_interleave(block_size, dim=2)], dim=2).repeat_interleave(block_size, dim=1)
    return torch.zeros(seen.shape, dtype=dtype, device=anchors.device).masked_fill(~seen, -torch.inf)[:, None]


def gather_rows(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`values` `[B, S, ...]` at `places` `[B, A, K]`; places past the end give the last one, which no row may count."""
    batch = torch.arange(len(values), device=values.device)[:, None, None]
    return values[batch, places.clamp(max=values.shape[1] - 1).to(values.device)]


def markov_bias(draft: nn.Module, prev_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The Markov head's bias `[N, K, V]` in float32 given the true previous tokens `[N, K]`; zero without a head."""
    if draft.markov_head is None:
        return hidden.new_zeros((), dtype=torch.float32)
    rows, state = [], None
    for k in range(prev_ids.shape[1]):
        bias, state = draft.markov_head.step(prev_ids[:, k], hidden[:, k], state)
        rows.append(bias.float())
    return torch.stack(rows, dim=1)


def sample_anchors(
    loss_mask: torch.Tensor, count: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Up to `count` distinct anchors a text: positions p >= 1 that are in `loss_mask` `[B, S]` bool, as is p + 1.

    The loop's first anchor is the first token the target wrote, so the last one of the prompt is none.

    Returns anchors `[B, A]` int64 and which of them are real, `[B, A]` bool: a text may have fewer than the others.
    """
    candidates = F.pad(loss_mask[:, :-1] & loss_mask[:, 1:], (0, 1), value=False)
    candidates[:, 0] = False
    chance = torch.rand(loss_mask.shape, generator=generator).to(loss_mask.device).masked_fill(~candidates, -1.0)
    most = max(1, min(count, int(candidates.sum(dim=1).max())))
    chance, anchors = chance.topk(most, dim=1)
    return anchors, chance >= 0


def supervised_rows(
    anchors: torch.Tensor, valid: torch.Tensor, loss_mask: torch.Tensor, block_size: int
) -> torch.Tensor:
    """`[B, A, K]` bool: row k counts if the tokens at p + 1 to p + k + 1 are all inside the text and `loss_mask`."""
    places = anchors[..., None] + torch.arange(1, block_size + 1, device=anchors.device)
    inside = (places < loss_mask.shape[1]) & gather_rows(loss_mask, places)
    return inside.cumprod(dim=-1).bool() & valid[..., None]


def row_weights(rows: torch.Tensor, gamma: float = GAMMA) -> torch.Tensor:
    """`exp(-k / gamma)` where `rows` `[..., K]` is True, else zero; float32."""
    return rows * torch.exp(-torch.arange(rows.shape[-1], device=rows.device) / gamma)


def block_terms(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    confidence: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
) -> Terms:
    """Sum the objective over blocks.

    Args: draft_logits (Markov included) and target_logits `[N, K, V]` float32; confidence logits `[N, K]`; labels
    `[N, K]` int64, the texts' tokens; weights `[N, K]`, zero for rows that do not count.
    """
    log_probs = draft_logits.log_softmax(dim=-1)
    ce = -log_probs.gather(-1, labels[..., None])[..., 0]
    l1 = (log_probs.exp() - target_logits.softmax(dim=-1)).abs().sum(dim=-1)
    rows = (weights > 0).float()
    acceptance = (1 - l1.detach() / 2) * rows
    bce = torch.zeros_like(ce)
    if confidence is not None:
        bce = F.binary_cross_entropy_with_logits(confidence, 1 - l1.detach() / 2, reduction="none")
    return Terms(
        ce=(ce * weights).sum(),
        l1=(l1 * weights).sum(),
        bce=(bce * weights).sum(),
        weight=weights.sum(),
        accepted=acceptance.sum(dim=0),
        rows=rows.sum(dim=0),
        expected=(rows[:, 0] + acceptance.cumprod(dim=-1).sum(dim=-1)).sum(),
        blocks=rows[:, 0].sum(),
    )


def combine(terms: Terms) -> Losses:
    """Divide the sums; a batch without any supervised row has losses of zero."""
    weight = terms.weight.clamp_min(torch.finfo(torch.float32).tiny)
    ce, l1, bce = terms.ce / weight, terms.l1 / weight, terms.bce / weight
    return Losses(
        loss=CE_WEIGHT * ce + L1_WEIGHT * l1 + CONFIDENCE_WEIGHT * bce,
        ce=ce.detach(),
        l1=l1.detach(),
        bce=bce.detach(),
        acceptance=terms.accepted / terms.rows,
        expected_length=terms.expected / terms.blocks,
    )
