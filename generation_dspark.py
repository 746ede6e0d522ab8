"""Speculative decoding with a DSpark draft: prefill, then rounds of draft, verify, accept, commit, emit.

A round spends one forward of the target, W tokens wide: the anchor (the last committed token, which the target has not
processed) and W - 1 draft tokens, all K of them unless the call asks for fewer (`schedule_dspark.py`). Row k of its
logits judges draft token k + 1. With `a` accepted, the next token comes from row `a`, and the round yields a + 1
tokens.

Loop invariant, for each row: its committed tokens are final; the last of them is the anchor; the target's state holds
exactly the positions before the anchor, and the draft's context holds exactly the same positions. Stops and budgets cut
a round's tokens before the state is committed, so text, statistics, streamer and caches never disagree.

The rows of a batch share every forward, and each accepts its own number of draft tokens. A row that has ended takes
part until all have, and keeps nothing.

Everything around the loop (generation config, logits processors, stopping criteria, streamers) is transformers' own,
prepared in `request_dspark.py`.

Shapes: B batch, c committed tokens of a row, K draft tokens, W verify width, V vocabulary, T taps, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .processors_dspark import BlockTexts
from .request_dspark import DSparkState, Request, check_given, check_pair, check_positions, prepare_request
from .target_kimi_k3 import VerifiableTarget, reserved

# To take padding out of a recurrent state again, the inputs of the recurrence are kept for all tokens of a forward: for
# Kimi K3 in bfloat16, 3 GB of so many tokens.
ROLLED_BACK_AT_ONCE = 256


@dataclass
class Round:
    """What one verify round did to a row.

    Args:
        position: index of the anchor in the row's text, padding not counted; the round's tokens follow it.
        draft_tokens: what the draft proposed, `[1, K]` int64.
        confidence: the draft's own logits, `[1, K]` float32, whose sigmoid estimates P(token accepted | all before it
            accepted), before calibration; None if the draft has no confidence head.
        width: how many positions were verified: the anchor and the first `width - 1` draft tokens.
        accepted: how many of these verification accepted, before a stop or a budget cut the round.
        tokens: what the round added to the text, `[1, 1..width]` int64.
    """

    position: int
    draft_tokens: torch.Tensor
    confidence: torch.Tensor | None
    width: int
    accepted: int
    tokens: torch.Tensor


@dataclass
class DSparkGenerateOutput(ModelOutput):
    """What `generate` returns with `return_dict_in_generate=True`.

    Args:
        sequences: prompt and new tokens, `[B, prompt + new]` int64; rows that ended early go on in pad tokens.
        scores: with `output_scores`, processed target scores of each new token, a tuple of `[B, V]` float32; zeros for
            a row that has ended.
        logits: with `output_logits`, unprocessed target logits of each new token, likewise.
        acceptance_histogram: verify rounds by accepted draft tokens 0..K, `[B, K + 1]` int64, as verification judged,
            before a stop or a budget cut the round. Draft tokens that were not verified count as not accepted.
        acc_len: mean of accepted + 1 over the rounds, `[B]` float32 (as SGLang 0.5.23 counts it); nan without rounds.
        tokens_per_round: tokens emitted by rounds over rounds, `[B]` float32, which a stop cuts; nan without rounds.
        num_target_forwards: verify forwards of the target; prefill is not counted.
        cache: what target and draft have processed, for a further turn; `past_key_values` is another name of it.
        rounds: with `output_rounds`, a `Round` for each verify round; for a batch, a tuple of them for each row.
    """

    sequences: torch.Tensor | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    acceptance_histogram: torch.Tensor | None = None
    acc_len: torch.Tensor | None = None
    tokens_per_round: torch.Tensor | None = None
    num_target_forwards: int | None = None
    cache: DSparkState | None = None
    rounds: tuple | None = None

    @property
    def past_key_values(self) -> DSparkState | None:
        """`cache`, as it was called before transformers 5.19."""
        return self.cache


@dataclass
class Verdict:
    """Outcome of one verification: for each row, how many draft tokens are accepted, and the round's `token_ids`, these
    and the one that follows them.

    Both are on the host, fetched together: with a width that is fixed, it is the only time in a round that the host
    waits for a device. `tokens` `[B, W]` are the same on the device; a row's are the first `accepted + 1` of its row.
    """

    accepted: list[int]
    token_ids: list[list[int]]
    tokens: torch.Tensor


@dataclass
class Transcript:
    """The committed text of one row, without padding, and its statistics.

    `ids` `[1, c]`; `histogram[a]` counts the rounds with `a` accepted.
    """

    request: Request
    row: int
    ids: torch.Tensor
    histogram: list[int]
    finished: bool = False
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    @property
    def anchor(self) -> torch.Tensor:
        return self.ids[:, -1]

    @property
    def num_new_tokens(self) -> int:
        return self.ids.shape[1] - self.request.lengths[self.row]


@torch.no_grad()
def generate(
    draft,
    input_ids: torch.Tensor | None = None,
    target=None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    prefix_allowed_tokens_fn: Callable | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer=None,
    inputs: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    draft_sampling: str = "sample",
    verification: str = "token",
    output_rounds: bool = False,
    verify_width: int | str | None = None,
    confidence_threshold: float | None = None,
    verify_costs: list[float] | None = None,
    **kwargs,
) -> torch.Tensor | DSparkGenerateOutput:
    """Continue a prompt with the target's own output, drafted by `draft` (DSpark, arXiv 2607.05147).

    Greedy decoding gives the target's own tokens; sampling keeps the target's distribution (Leviathan et al., arXiv
    2211.17192, algorithm 1). Unset options come from the target's generation config, as in the target's own `generate`.

    Args:
        draft: a `DSparkDraftModel`.
        input_ids: the prompts, `[B, prompt]` int64, padded on the left if their lengths differ.
        target: the loaded target model, as `AutoModelForCausalLM` returns it. Left as it was, also after an error.
        generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer, tokenizer: as in
            transformers' `generate`. A processor must depend on its arguments alone: it is also asked about draft
            tokens that are then rejected, and about text behind a stop string or a custom criterion's stop.
        inputs: another name of `input_ids`, the one that transformers' `generate` gives its first argument.
        generator: what to sample with; torch's own if None.
        draft_sampling: when sampling, "sample": draft tokens are drawn from the draft's law; "greedy": its likeliest.
        verification: when sampling, "token": each draft token is judged by itself; "block": all together (Sun et al.,
            arXiv 2403.10444), which accepts at least as much. All four ways keep the target's distribution.
        output_rounds: with `return_dict_in_generate=True`, return what every round did as `rounds`.
        verify_width: positions that a round verifies, the anchor and the first draft tokens: 1 to K + 1, or "auto" for
            the number of which most tokens a second are expected; K + 1 if None. Any width keeps the text or its law.
        confidence_threshold: verify draft tokens up to the first whose confidence is below this, and at most
            `verify_width` positions.
        verify_costs: what a round of each width 1 to K + 1 takes, the draft's block included, in any unit. None: with
            "auto", the first rounds go through all widths and are measured, once for draft, target and batch size in a
            process. Then the clock has a say in the widths, and a seed does not repeat a sampled text.
        kwargs: fields of `GenerationConfig`, `attention_mask`, `pixel_values` and `grid_thws` of an image prompt, and
            `past_key_values` (or `cache`) of an earlier output, to process only what `input_ids` adds to that text. A
            prompt is processed in pieces of `prefill_chunk_size` tokens, 16384 if unset; the first holds all images.

    Returns:
        `[B, prompt + new]` int64, or a `DSparkGenerateOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: before any token is made, for an argument that is wrong or not supported, naming it, and for a
            target whose state cannot be rolled back; in the first round, before its tokens, for a recurrent layer that
            looks like one we know but works otherwise.
        RuntimeError: at once, if the target is in use by another call.
    """
    check_given(input_ids, inputs, target)
    verifiable = VerifiableTarget(target, draft.config.target_layer_ids)
    check_pair(draft, verifiable)
    request = prepare_request(
        draft,
        verifiable,
        input_ids if inputs is None else inputs,
        generation_config,
        logits_processor,
        stopping_criteria,
        prefix_allowed_tokens_fn,
        streamer,
        tokenizer,
        generator,
        draft_sampling,
        verification,
        output_rounds,
        verify_width,
        confidence_threshold,
        verify_costs,
        kwargs,
    )
    with reserved(target), verifiable:
        cache = take_up_past(draft, verifiable, request)
        transcripts = decode(draft, verifiable, cache, request)
        return summarize(transcripts, request, hand_out_past(draft, verifiable, cache, transcripts))


def take_up_past(draft, target: VerifiableTarget, request: Request):
    """The draft's context to go on from, with the target's state taken up beside it; empty without a past."""
    if request.past is None:
        return draft.new_cache(len(request.prompts))
    target.take_up(request.past.take_memory())
    return request.past.context


def hand_out_past(draft, target: VerifiableTarget, cache, transcripts: list[Transcript]) -> DSparkState:
    """What target and draft hold now, for a further turn: all committed text but the last token of each row."""
    texts = [transcript.ids[:, :-1] for transcript in transcripts]
    return DSparkState(draft, target.model, texts, cache, target.hand_out())


def decode(draft, target: VerifiableTarget, cache, request: Request) -> list[Transcript]:
    """The loop: reads like the paper's figure of one round, once per round, until a stop."""
    histogram = [0] * (draft.config.block_size + 1)
    transcripts = [Transcript(request, row, ids, histogram.copy()) for row, ids in enumerate(request.prompts)]
    logits = prefill(draft, target, cache, request)
    if request.streamer is not None:
        request.streamer.put(request.input_ids.cpu())
    scores = texts_of(transcripts, 0).process(logits, request.input_ids[:, :0])
    verdict = choose_tokens(scores, request)
    kept = count_until_stops(transcripts, verdict, scores)
    emit(transcripts, verdict, scores, logits, kept)

    context_lead = cache.lengths[0] - request.lengths[0]  # more than 0 with an image: its placeholder stands for many
    while not all(transcript.finished for transcript in transcripts):
        assert cache.lengths == target.lengths, "loop invariant"
        assert cache.lengths[0] == transcripts[0].ids.shape[1] - 1 + context_lead, "loop invariant"
        anchors = torch.cat([transcript.anchor for transcript in transcripts])
        texts = texts_of(transcripts, draft.config.block_size)
        block = draft.draft_block(anchors, cache, target, texts, request.draws_drafts, request.generator)
        width = request.schedule.choose(block.confidence, rows_of(transcripts), cache.length)
        draft_tokens = block.tokens[:, : width - 1].to(anchors.device)
        output = target.verify(torch.cat([anchors[:, None], draft_tokens], dim=1))
        scores = texts.process(output.logits.to(anchors.device, torch.float32), draft_tokens)
        verdict = accept(scores, draft_tokens, block.scores[:, : width - 1], request)

        kept = count_until_stops(transcripts, verdict, scores)
        record(transcripts, verdict, block, width, kept)
        commit(draft, target, cache, output.features, kept)
        emit(transcripts, verdict, scores, output.logits, kept)

    if request.streamer is not None:
        request.streamer.end()
    return transcripts


def prefill(draft, target: VerifiableTarget, cache, request: Request) -> torch.Tensor:
    """Process what is not held yet of the prompts, in pieces of `prefill_chunk_size`, of which nothing is kept but what
    target and draft remember; returns the logits of the last tokens, `[B, 1, V]`."""
    # At once: growing piece by piece would copy, and end with up to half as much again as is needed.
    end = min(max(request.max_lengths), 1.5 * max(request.lengths))
    cache.reserve(int(end) - cache.length + draft.config.block_size)
    process = process_prompts if request.past is None else process_new_ids
    logits = process(draft, target, cache, request)
    if request.inputs:  # how many positions an image takes is known only now
        images = cache.lengths[0] - request.lengths[0]
        check_positions(draft, cache.lengths[0], request.max_lengths[0] + images)
    return logits.to(request.input_ids.device, torch.float32)


def process_prompts(draft, target: VerifiableTarget, cache, request: Request) -> torch.Tensor:
    """Process the prompts, padded on the left."""
    width, chunk, inputs = request.input_ids.shape[1], request.config.prefill_chunk_size, request.inputs
    # Padding and images must be in the first piece: recurrent layers know of no padding later, and images come once.
    start, end = 0, min(width, max(chunk, request.first_piece))
    while start < width:
        lengths = [min(length - width + end, end - start) for length in request.lengths]
        output = target.prefill(request.input_ids[:, start:end], lengths, **inputs)
        widths = [held - known for held, known in zip(target.lengths, cache.lengths)]
        add_context(draft, cache, without_padding(output.features, widths), widths)
        logits = output.logits
        del output  # the features, before the next piece makes its own
        start, end, inputs = end, min(width, end + chunk), {}
    return logits


def process_new_ids(draft, target: VerifiableTarget, cache, request: Request) -> torch.Tensor:
    """Process what the prompts add to an earlier turn, padded on the right; if it is much, first what all rows have."""
    widths, logits = [ids.shape[1] for ids in request.new_ids], torch.empty(0)
    new_ids = torch.cat([F.pad(ids, (0, max(widths) - ids.shape[1])) for ids in request.new_ids])
    chunk, common = request.config.prefill_chunk_size, min(widths) if max(widths) > ROLLED_BACK_AT_ONCE else 0
    pieces = new_ids[:, :common].split(chunk, dim=1)
    pieces += new_ids[:, common:].split(min(chunk, ROLLED_BACK_AT_ONCE), dim=1)
    for piece in (piece for piece in pieces if piece.numel()):
        piece_widths = [min(width, piece.shape[1]) for width in widths]
        output = target.extend(piece, piece_widths)
        add_context(draft, cache, output.features, piece_widths)
        logits = keep_ended(output.logits, logits, piece_widths)
        widths = [width - processed for width, processed in zip(widths, piece_widths)]
        del output  # as above
    return logits


def keep_ended(logits: torch.Tensor, before: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """`logits` `[B, 1, V]` of the rows with something in this piece, those from `before` of the rows without."""
    if min(widths) > 0:
        return logits
    has_ended = torch.tensor([width == 0 for width in widths], device=logits.device)
    return torch.where(has_ended[:, None, None], before, logits)


def without_padding(features: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Features `[B, P, T * H]` of rows padded on the left, whose last `widths[i]` count: the same, moved to the
    left."""
    width = features.shape[1]
    if min(widths) == width:
        return features
    starts = width - torch.tensor(widths, device=features.device)
    places = (starts[:, None] + torch.arange(width, device=features.device)).clamp(max=width - 1)
    return features.gather(1, places[..., None].expand_as(features))


def commit(draft, target: VerifiableTarget, cache, features: torch.Tensor, kept: list[int]) -> None:
    """Keep the round's first `kept[i]` positions of row i, in the target's state and, by their features, in the draft's
    context."""
    target.commit(kept, width=features.shape[1])
    add_context(draft, cache, features[:, : max(kept)], kept)


def add_context(draft, cache, features: torch.Tensor, widths: list[int]) -> None:
    """Write `features` `[B, C, T * H]` of the next positions into the draft's context, `widths[i]` in row i."""
    positions = cache.next_position[:, None] + torch.arange(features.shape[1], device=draft.device)
    draft.write_context(features, positions, cache, widths)


def rows_of(transcripts: list[Transcript]) -> list[int]:
    """The rows that have not ended."""
    return [transcript.row for transcript in transcripts if not transcript.finished]


def texts_of(transcripts: list[Transcript], block_size: int) -> BlockTexts:
    """The text of every row for its processors, with room for a block."""
    texts = [None if transcript.finished else transcript.ids for transcript in transcripts]
    return BlockTexts(transcripts[0].request.processors, texts, block_size)


def count_until_stops(transcripts: list[Transcript], verdict: Verdict, scores: torch.Tensor) -> list[int]:
    """How many of the round's tokens each row keeps: all, or up to the first stopping event, inclusive; none once it
    has ended."""
    return [
        0
        if transcript.finished
        else count_until_stop(
            transcript,
            verdict.tokens[transcript.row : transcript.row + 1],
            verdict.token_ids[transcript.row],
            scores[transcript.row : transcript.row + 1],
        )
        for transcript in transcripts
    ]


def count_until_stop(transcript: Transcript, tokens: torch.Tensor, token_ids: list[int], scores: torch.Tensor) -> int:
    """How many of a row's tokens are kept: all, or up to the first stopping event, inclusive.

    `token_ids` are on the host what `tokens` `[1, W]` begins with. Criteria get the `scores` `[1, W, V]` of the new
    tokens so far when scores are asked for, as in transformers.
    """
    stops, length = transcript.request.stops, transcript.ids.shape[1]
    max_length = transcript.request.max_lengths[transcript.row]
    text = torch.cat([transcript.ids, tokens], dim=1) if stops.criteria else None
    for count, token_id in enumerate(token_ids, start=1):
        stopped = length + count >= max_length or token_id in stops.end_ids
        if text is not None:
            stopped |= ask_criteria(transcript, text[:, : length + count], scores[:, :count])
        if stopped:
            transcript.finished = True
            return count
    return len(token_ids)


def ask_criteria(transcript: Transcript, text: torch.Tensor, scores: torch.Tensor) -> bool:
    """Whether a criterion ends the `text` `[1, c]`, whose last tokens were chosen by `scores` `[1, n, V]`."""
    request = transcript.request
    so_far = (*transcript.scores, *scores.unbind(1)) if request.config.output_scores else None
    return bool(request.stops.criteria(text, so_far).all())


def record(transcripts: list[Transcript], verdict: Verdict, block, width: int, kept: list[int]) -> None:
    """Enter the round into the statistics of the rows that take part in it."""
    for transcript, accepted, count in zip(transcripts, verdict.accepted, kept):
        if not count:
            continue
        transcript.histogram[accepted] += 1
        if transcript.request.output_rounds:
            row = slice(transcript.row, transcript.row + 1)
            confidence = None if block.confidence is None else block.confidence[row]
            tokens = verdict.tokens[row, :count]
            draft_tokens = block.tokens[row].to(tokens.device)
            position = transcript.ids.shape[1] - 1
            transcript.rounds.append(Round(position, draft_tokens, confidence, width, accepted, tokens))


def emit(
    transcripts: list[Transcript], verdict: Verdict, scores: torch.Tensor, logits: torch.Tensor, kept: list[int]
) -> None:
    """Append to each row's text the first `kept` of its tokens, with the rows of `scores` and `logits` `[B, n, V]` that
    chose them."""
    for transcript, count, token_ids in zip(transcripts, kept, verdict.token_ids):
        request, row = transcript.request, slice(transcript.row, transcript.row + 1)
        transcript.ids = torch.cat([transcript.ids, verdict.tokens[row, :count]], dim=1)
        if request.config.output_scores:
            transcript.scores.extend(scores[row, :count].unbind(1))
        if request.config.output_logits:
            transcript.logits.extend(logits[row, :count].float().unbind(1))
        if request.streamer is not None:
            request.streamer.put(torch.tensor(token_ids[:count]))


def choose_tokens(scores: torch.Tensor, request: Request) -> Verdict:
    """The token after each text, chosen from the processed scores `[B, 1, V]` by the target alone: the first one, and
    those of rounds that verify no draft token."""
    if request.config.do_sample:
        tokens = draw(scores[:, 0].softmax(dim=-1), request.generator)[:, None]
    else:
        tokens = scores.argmax(dim=-1)
    return Verdict([0] * len(tokens), tokens.tolist(), tokens)


def accept(
    target_scores: torch.Tensor, draft_tokens: torch.Tensor, draft_scores: torch.Tensor, request: Request
) -> Verdict:
    """Judge draft tokens `[B, W - 1]` by processed target scores `[B, W, V]` and the draft's own `[B, W - 1, V]`."""
    if draft_tokens.shape[1] == 0:
        return choose_tokens(target_scores, request)
    if not request.config.do_sample:
        return accept_greedy(target_scores, draft_tokens)
    if request.draws_drafts:
        draft_probs = draft_scores.to(target_scores.device).softmax(dim=-1)
    else:
        draft_probs = F.one_hot(draft_tokens, draft_scores.shape[-1]).to(target_scores.dtype)
    rule = accept_sampled_block if request.verification == "block" else accept_sampled
    return rule(target_scores.softmax(dim=-1), draft_tokens, draft_probs, request.generator)


def accept_greedy(target_scores: torch.Tensor, draft_tokens: torch.Tensor) -> Verdict:
    """Accept the longest prefix of draft tokens `[B, W - 1]` that equals the target's argmax over `[B, W, V]`.

    Example: the target's argmax by row is 5 7 9 4 and the drafts are 5 7 8: two are accepted, and 9 follows them.
    """
    choices = target_scores.argmax(dim=-1)
    return fetch_verdict(_leading_true(draft_tokens == choices[:, :-1]), choices)


def accept_sampled(
    target_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), lossless for any law of the drafts.

    Draft token d_k is accepted with probability min(1, target(d_k) / draft(d_k)). At the first rejection the next token
    is drawn from the normalised positive part of target - draft in that row; after K acceptances from the target's last
    row.

    Args: target_probs `[B, K + 1, V]` and draft_probs `[B, K, V]` float32 laws; draft_tokens `[B, K]`, drawn from
    draft_probs.
    """
    uniform = draw_uniform(draft_tokens, generator)
    # 0 / 0 is nan, which compares as a rejection
    accepted = _leading_true(uniform < likelihood_ratios(target_probs, draft_tokens, draft_probs))
    residual = (target_probs - F.pad(draft_probs, (0, 0, 0, 1))).clamp_min(0.0)
    return draw_after(accepted, residual, target_probs, draft_tokens, generator)


def accept_sampled_block(
    target_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Block verification (Sun et al., arXiv 2403.10444, algorithm 2): lossless too, and accepts at least as much.

    Where `accept_sampled` stops at the first rejection, this keeps the longest prefix that passes a trial of its own. A
    prefix of i tokens carries weight w_i = min(1, w_(i-1) target(d_i) / draft(d_i)), and passes with probability
    m_i / (m_i + 1 - w_i), where m_i is the mass of the positive part of w_i target - draft behind it; the whole block
    with probability w_K. The next token is drawn from that positive part.

    Args: as of `accept_sampled`.
    """
    steps = [torch.ones_like(target_probs[:, 0, 0])]
    for ratio in likelihood_ratios(target_probs, draft_tokens, draft_probs).unbind(1):
        steps.append((steps[-1] * ratio).clamp(max=1.0))
    weights = torch.stack(steps, dim=1)
    residual = (weights[..., None] * target_probs - F.pad(draft_probs, (0, 0, 0, 1))).clamp_min(0.0)
    mass = residual[:, 1:-1].sum(dim=-1)
    # Equal laws behind a prefix of full weight leave 0 / 0: it passes, as all that follows it does.
    passes = (mass / (mass + 1.0 - weights[:, 1:-1])).nan_to_num(nan=1.0)
    passes = torch.cat([passes, weights[:, -1:]], dim=1)
    lengths = torch.arange(1, draft_tokens.shape[1] + 1, device=draft_tokens.device)
    accepted = (lengths * (draw_uniform(draft_tokens, generator) < passes)).amax(dim=1)
    return draw_after(accepted, residual, target_probs, draft_tokens, generator)


def likelihood_ratios(
    target_probs: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor
) -> torch.Tensor:
    """target(d) / draft(d) of each draft token, `[B, K]`."""
    tokens = draft_tokens[..., None]
    return (target_probs[:, :-1].gather(-1, tokens) / draft_probs.gather(-1, tokens))[..., 0]


def draw_after(
    accepted: torch.Tensor,
    residual: torch.Tensor,
    target_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    generator: torch.Generator | None,
) -> Verdict:
    """Draw the token after the first `accepted` `[B]` drafts from the residual law there, `[B, K + 1, V]` before
    normalisation."""
    place = accepted[:, None, None].expand(-1, -1, residual.shape[-1])
    law, target_law = residual.gather(1, place)[:, 0], target_probs.gather(1, place)[:, 0]
    # Equal laws leave no residual; only rounding can stop there, and then the target's own law is right.
    law = torch.where(law.sum(dim=-1, keepdim=True) > 0, law, target_law)
    next_token = draw(law, generator)[:, None]
    return fetch_verdict(accepted, F.pad(draft_tokens, (0, 1)).scatter(1, accepted[:, None], next_token))


def draw_uniform(like: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Uniform numbers in [0, 1) in the shape of `like`, drawn where `generator` is."""
    device = like.device if generator is None else generator.device
    return torch.rand(like.shape, device=device, generator=generator).to(like.device)


def fetch_verdict(accepted: torch.Tensor, tokens: torch.Tensor) -> Verdict:
    """Fetch how many drafts are accepted, `[B]`, and the round's tokens `[B, K + 1]`, of which accepted + 1 count."""
    rows = torch.cat([accepted[:, None], tokens], dim=1).tolist()
    return Verdict([count for count, *_ in rows], [ids[: count + 1] for count, *ids in rows], tokens)


def draw(law: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token `[B]` from each row of the probabilities `[B, V]`, drawn where `generator` is."""
    device = law.device if generator is None else generator.device
    return torch.multinomial(law.to(device), num_samples=1, generator=generator)[:, 0].to(law.device)


def summarize(
    transcripts: list[Transcript], request: Request, past: DSparkState
) -> torch.Tensor | DSparkGenerateOutput:
    """The return value of `generate`: the text, or the text with the acceptance figures."""
    config = request.config
    sequences = pad_rows(transcripts, request)
    if not config.return_dict_in_generate:
        return sequences
    histogram = torch.tensor([transcript.histogram for transcript in transcripts])
    rounds = histogram.sum(dim=1)
    lengths = torch.arange(1, histogram.shape[1] + 1)
    later_tokens = torch.tensor([transcript.num_new_tokens - 1 for transcript in transcripts])
    traces = [tuple(transcript.rounds) for transcript in transcripts]
    return DSparkGenerateOutput(
        sequences=sequences,
        scores=stack_steps([transcript.scores for transcript in transcripts]) if config.output_scores else None,
        logits=stack_steps([transcript.logits for transcript in transcripts]) if config.output_logits else None,
        acceptance_histogram=histogram,
        acc_len=(histogram * lengths).sum(dim=1) / rounds,
        tokens_per_round=torch.where(rounds > 0, later_tokens / rounds, torch.nan),
        num_target_forwards=int(rounds.max()),
        cache=past,
        rounds=(traces[0] if len(traces) == 1 else tuple(traces)) if request.output_rounds else None,
    )


def pad_rows(transcripts: list[Transcript], request: Request) -> torch.Tensor:
    """Prompts as they came and each row's new tokens, `[B, prompt + new]`, short ones filled up with pad tokens."""
    longest = max(transcript.num_new_tokens for transcript in transcripts)
    new_tokens = []
    for transcript in transcripts:
        missing = longest - transcript.num_new_tokens
        tokens = transcript.ids[:, transcript.ids.shape[1] - transcript.num_new_tokens :]
        new_tokens.append(F.pad(tokens, (0, missing), value=request.pad_token_id) if missing else tokens)
    return torch.cat([request.input_ids, torch.cat(new_tokens)], dim=1)


def stack_steps(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Of each row's `[1, V]` tensors a new token: `[B, V]` tensors, zeros where a row has no token any more."""
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.cat(step) for step in zip_longest(*rows, fillvalue=blank))


def _leading_true(flags: torch.Tensor) -> torch.Tensor:
    """How many of each row of `[B, K]` are true before the first that is not: `[B]` int64."""
    return flags.long().cumprod(dim=1).sum(dim=1)
