"""Speculative decoding with a DSpark draft: prefill, then rounds of draft, verify, accept, commit, emit.

A round spends one forward of the target, W = K + 1 tokens wide: the anchor (the last committed token, which the target
has not processed) and the K draft tokens. Row k of its logits judges draft token k + 1. With `a` accepted, the next
token comes from row `a`, and the round yields a + 1 tokens.

Loop invariant, with c committed tokens: `ids[:, :c]` is final; `ids[:, c - 1]` is the anchor; the target's state holds
exactly the positions before the anchor, and the draft's context holds exactly the same positions. Stops and budgets cut
a round's tokens before the state is committed, so text, statistics, streamer and caches never disagree.

Everything around the loop (generation config, logits processors, stopping criteria, streamers) is transformers' own,
prepared in `request_dspark.py`.

Shapes: B batch (1), c committed tokens, K draft tokens, W = K + 1 verify width, V vocabulary, T taps, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .request_dspark import Request, check_given, check_pair, prepare_request
from .target_kimi_k3 import VerifiableTarget


@dataclass
class Round:
    """What one verify round did.

    Args:
        position: index in `sequences` of the anchor; the round's tokens follow it.
        draft_tokens: what the draft proposed, `[B, K]` int64.
        confidence: the draft's own logits, `[B, K]` float32, whose sigmoid estimates P(token accepted | all before it
            accepted); None if the draft has no confidence head.
        accepted: how many of the draft tokens verification accepted, before a stop or a budget cut the round.
        tokens: what the round added to `sequences`, `[B, 1..K + 1]` int64.
    """

    position: int
    draft_tokens: torch.LongTensor
    confidence: torch.Tensor | None
    accepted: int
    tokens: torch.LongTensor


@dataclass
class DSparkGenerateOutput(ModelOutput):
    """What `generate` returns with `return_dict_in_generate=True`.

    Args:
        sequences: prompt and new tokens, `[B, prompt + new]` int64.
        scores: with `output_scores`, processed target scores of each new token, a tuple of `[B, V]` float32.
        logits: with `output_logits`, unprocessed target logits of each new token, a tuple of `[B, V]` float32.
        acceptance_histogram: verify rounds by accepted draft tokens 0..K, `[B, K + 1]` int64, as verification judged,
            before a stop or a budget cut the round.
        acc_len: mean of accepted + 1 over the rounds, `[B]` float32 (as SGLang 0.5.23 counts it); nan without rounds.
        tokens_per_round: tokens emitted by rounds over rounds, `[B]` float32, which a stop cuts; nan without rounds.
        num_target_forwards: verify forwards of the target; prefill is not counted.
        rounds: with `output_rounds`, a `Round` for each verify round.
    """

    sequences: torch.LongTensor | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    acceptance_histogram: torch.LongTensor | None = None
    acc_len: torch.Tensor | None = None
    tokens_per_round: torch.Tensor | None = None
    num_target_forwards: int | None = None
    rounds: tuple[Round, ...] | None = None


@dataclass
class Verdict:
    """Outcome of one verification: how many draft tokens are accepted, and the token that follows them, `[B]`.

    `token_ids` are both on the host, fetched together: it is the only time in a round that the host waits for a device.
    """

    accepted: int
    next_token: torch.Tensor
    token_ids: list[int]


@dataclass
class Transcript:
    """The committed text and its statistics. `ids` `[B, c]`; `histogram[a]` counts the rounds with `a` accepted."""

    request: Request
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
        return self.ids.shape[1] - self.request.input_ids.shape[1]


@torch.no_grad()
def generate(
    draft,
    input_ids: torch.LongTensor | None = None,
    target=None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    prefix_allowed_tokens_fn: Callable | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer=None,
    inputs: torch.LongTensor | None = None,
    output_rounds: bool = False,
    **kwargs,
) -> torch.LongTensor | DSparkGenerateOutput:
    """Continue a prompt with the target's own output, drafted by `draft` (DSpark, arXiv 2607.05147).

    Greedy decoding gives the target's own tokens; sampling keeps the target's distribution (Leviathan et al., arXiv
    2211.17192, algorithm 1). Unset options come from the target's generation config, as in the target's own `generate`.

    Args:
        draft: a `DSparkDraftModel`.
        input_ids: the prompt, `[1, prompt]` int64, unpadded.
        target: the loaded target model, as `AutoModelForCausalLM` returns it. Left as it was, also after an error. It
            must not run another `generate` meanwhile.
        generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, streamer, tokenizer: as in
            transformers' `generate`. A processor must depend on its arguments alone: it is also asked about draft
            tokens that are then rejected, and about text behind a stop string or a custom criterion's stop.
        inputs: another name of `input_ids`, the one that transformers' `generate` gives its first argument.
        output_rounds: with `return_dict_in_generate=True`, return what every round did as `rounds`.
        kwargs: fields of `GenerationConfig`, `attention_mask`, and `pixel_values` and `grid_thws` of an image prompt.

    Returns:
        `[1, prompt + new]` int64, or a `DSparkGenerateOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: before any token is made, for an argument that is wrong or not supported, naming it, and for a
            target whose state cannot be rolled back; in the first round, before its tokens, for a recurrent layer that
            looks like one we know but works otherwise.
    """
    check_given(input_ids, inputs, target)
    verifiable = VerifiableTarget(target, draft.config.target_layer_ids)
    check_pair(draft, verifiable)
    request = prepare_request(
        verifiable,
        input_ids if inputs is None else inputs,
        generation_config,
        logits_processor,
        stopping_criteria,
        prefix_allowed_tokens_fn,
        streamer,
        tokenizer,
        output_rounds,
        kwargs,
    )
    with verifiable:
        transcript = decode(draft, verifiable, request)
    return summarize(transcript)


def decode(draft, target: VerifiableTarget, request: Request) -> Transcript:
    """The loop: reads like the paper's figure of one round, once per round, until a stop."""
    cache = draft.new_cache()
    transcript = Transcript(request, request.input_ids, histogram=[0] * (draft.config.block_size + 1))
    logits = prefill(draft, target, cache, request)
    if request.streamer is not None:
        request.streamer.put(request.input_ids.cpu())
    first_token, scores = choose_token(logits, request)
    token_ids = first_token[0].tolist()
    kept = count_until_stop(transcript, first_token, token_ids, scores)
    emit(transcript, first_token, token_ids, scores, logits, kept)

    context_lead = cache.length - transcript.ids.shape[1]  # -1, or more with an image: its placeholder stands for many
    while not transcript.finished:
        assert cache.length == target.length == transcript.ids.shape[1] + context_lead, "loop invariant"
        block = draft.draft_block(
            transcript.anchor, cache, target, transcript.ids, request.processors, request.config.do_sample
        )
        draft_tokens = block.tokens.to(transcript.ids.device)
        output = target.verify(torch.cat([transcript.anchor[:, None], draft_tokens], dim=1))
        scores = process_rows(output.logits, transcript.ids, draft_tokens, request.processors)
        verdict = accept(scores, draft_tokens, block.scores, request.config.do_sample)
        transcript.histogram[verdict.accepted] += 1

        tokens = torch.cat([draft_tokens[:, : verdict.accepted], verdict.next_token[:, None]], dim=1)
        kept = count_until_stop(transcript, tokens, verdict.token_ids, scores)
        if request.output_rounds:
            position = transcript.ids.shape[1] - 1
            transcript.rounds.append(
                Round(position, draft_tokens, block.confidence, verdict.accepted, tokens[:, :kept])
            )
        commit(draft, target, cache, output.features, kept)
        emit(transcript, tokens, verdict.token_ids, scores, output.logits, kept)

    if request.streamer is not None:
        request.streamer.end()
    return transcript


def prefill(draft, target: VerifiableTarget, cache, request: Request) -> torch.Tensor:
    """Process the prompt, in pieces if `prefill_chunk_size` says so; returns its last row's logits, `[B, 1, V]`."""
    prompt = request.input_ids
    for piece in prompt.split(request.config.prefill_chunk_size or prompt.shape[1], dim=1):
        output = target.prefill(piece, **request.inputs)
        add_context(draft, cache, output.features)
    return output.logits


def commit(draft, target: VerifiableTarget, cache, features: torch.Tensor, kept: int) -> None:
    """Keep the round's first `kept` positions, in the target's state and, by their features, in the draft's context."""
    target.commit(kept, width=features.shape[1])
    add_context(draft, cache, features[:, :kept])


def add_context(draft, cache, features: torch.Tensor) -> None:
    """Write `features` `[B, C, T * H]` of the next C processed positions into the draft's context."""
    positions = torch.arange(cache.length, cache.length + features.shape[1], device=draft.device)
    draft.write_context(features, positions.expand(features.shape[0], -1), cache)


def count_until_stop(transcript: Transcript, tokens: torch.Tensor, token_ids: list[int], scores: torch.Tensor) -> int:
    """How many of the round's `tokens` `[B, n]` are kept: all, or up to the first stopping event, inclusive.

    `token_ids` are the same tokens on the host. Criteria get the `scores` `[B, n, V]` of the new tokens so far when
    scores are asked for, as in transformers.
    """
    stops, length = transcript.request.stops, transcript.ids.shape[1]
    text = torch.cat([transcript.ids, tokens], dim=1) if stops.criteria else None
    for count, token_id in enumerate(token_ids, start=1):
        stopped = length + count >= stops.max_length or token_id in stops.end_ids
        if stops.criteria:
            stopped |= ask_criteria(transcript, text[:, : length + count], scores[:, :count])
        if stopped:
            transcript.finished = True
            return count
    return len(token_ids)


def ask_criteria(transcript: Transcript, text: torch.Tensor, scores: torch.Tensor) -> bool:
    """Whether a criterion ends the `text` `[B, c]`, whose last tokens were chosen by `scores` `[B, n, V]`."""
    request = transcript.request
    so_far = (*transcript.scores, *scores.unbind(1)) if request.config.output_scores else None
    return bool(request.stops.criteria(text, so_far).all())


def emit(
    transcript: Transcript,
    tokens: torch.Tensor,
    token_ids: list[int],
    scores: torch.Tensor,
    logits: torch.Tensor,
    kept: int,
) -> None:
    """Append the first `kept` tokens `[B, n]` to the text, with the rows of `scores` and `logits` that chose them."""
    request = transcript.request
    transcript.ids = torch.cat([transcript.ids, tokens[:, :kept]], dim=1)
    if request.config.output_scores:
        transcript.scores.extend(scores[:, :kept].unbind(1))
    if request.config.output_logits:
        transcript.logits.extend(logits[:, :kept].float().unbind(1))
    if request.streamer is not None:
        request.streamer.put(torch.tensor(token_ids[:kept]))


def choose_token(logits: torch.Tensor, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """The token after the prompt `[B, 1]`, chosen from `[B, 1, V]` by the target alone, and its processed scores."""
    scores = process_rows(logits, request.input_ids, request.input_ids[:, :0], request.processors)
    if request.config.do_sample:
        return torch.multinomial(scores[:, 0].softmax(dim=-1), num_samples=1), scores
    return scores.argmax(dim=-1), scores


def process_rows(
    logits: torch.Tensor, ids: torch.Tensor, draft_tokens: torch.Tensor, processors: LogitsProcessorList
) -> torch.Tensor:
    """Target logits `[B, n + 1, V]` after the processors, float32; row k sees the text and the first k drafts."""
    if not processors:
        return logits.to(ids.device, torch.float32)
    # Processors may write into what they are given, and the logits stay as the target made them.
    logits = logits.to(ids.device, torch.float32, copy=True)
    text = torch.cat([ids, draft_tokens], dim=1)
    length = ids.shape[1]
    return torch.stack([processors(text[:, : length + k], row) for k, row in enumerate(logits.unbind(1))], dim=1)


def accept(
    target_scores: torch.Tensor, draft_tokens: torch.Tensor, draft_scores: torch.Tensor, do_sample: bool
) -> Verdict:
    """Judge the draft tokens `[1, K]` by processed target scores `[1, K + 1, V]` and the draft's own `[1, K, V]`."""
    if not do_sample:
        return accept_greedy(target_scores, draft_tokens)
    draft_probs = draft_scores.to(target_scores.device).softmax(dim=-1)
    return accept_sampled(target_scores.softmax(dim=-1), draft_tokens, draft_probs)


def accept_greedy(target_scores: torch.Tensor, draft_tokens: torch.Tensor) -> Verdict:
    """Accept the longest prefix of draft tokens `[1, K]` that equals the target's argmax over `[1, K + 1, V]`.

    Example: the target's argmax by row is 5 7 9 4 and the drafts are 5 7 8: two are accepted, and 9 follows them.
    """
    choices = target_scores.argmax(dim=-1)
    accepted = _leading_true(draft_tokens == choices[:, :-1])
    accepted, *token_ids = torch.cat([accepted[:, None], choices], dim=1)[0].tolist()
    return Verdict(accepted, choices[:, accepted], token_ids[: accepted + 1])


def accept_sampled(
    target_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
) -> Verdict:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), lossless for any law of the drafts.

    Draft token d_k is accepted with probability min(1, target(d_k) / draft(d_k)). At the first rejection the next token
    is drawn from the normalised positive part of target - draft in that row; after K acceptances from the target's last
    row.

    Args: target_probs `[1, K + 1, V]` and draft_probs `[1, K, V]` float32 laws; draft_tokens `[1, K]`, drawn from
    draft_probs.
    """
    token_index = draft_tokens[..., None]
    ratio = target_probs[:, :-1].gather(-1, token_index) / draft_probs.gather(-1, token_index)
    uniform = torch.rand(draft_tokens.shape, device=draft_tokens.device)
    accepted = _leading_true(uniform < ratio[..., 0])  # 0 / 0 is nan, which compares as a rejection
    row = accepted[:, None, None].expand(-1, -1, target_probs.shape[-1])
    law = target_probs.gather(1, row)[:, 0]
    # After K acceptances there is no draft to take away.
    residual = (law - F.pad(draft_probs, (0, 0, 0, 1)).gather(1, row)[:, 0]).clamp_min(0.0)
    # Equal laws leave no residual; only rounding can reject there, and then the target's own law is right.
    law = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, law)
    next_token = torch.multinomial(law, num_samples=1)
    accepted, *token_ids = torch.cat([accepted[:, None], draft_tokens, next_token], dim=1)[0].tolist()
    return Verdict(accepted, next_token[:, 0], token_ids[:accepted] + token_ids[-1:])


def summarize(transcript: Transcript) -> torch.LongTensor | DSparkGenerateOutput:
    """The return value of `generate`: the text, or the text with the acceptance figures."""
    config = transcript.request.config
    if not config.return_dict_in_generate:
        return transcript.ids
    histogram = torch.tensor([transcript.histogram])
    rounds = histogram.sum(dim=1)
    lengths = torch.arange(1, histogram.shape[1] + 1)
    return DSparkGenerateOutput(
        sequences=transcript.ids,
        scores=tuple(transcript.scores) if config.output_scores else None,
        logits=tuple(transcript.logits) if config.output_logits else None,
        acceptance_histogram=histogram,
        acc_len=(histogram * lengths).sum(dim=1) / rounds,
        tokens_per_round=torch.where(rounds > 0, (transcript.num_new_tokens - 1) / rounds, torch.nan),
        num_target_forwards=int(rounds),
        rounds=tuple(transcript.rounds) if transcript.request.output_rounds else None,
    )


def _leading_true(flags: torch.Tensor) -> torch.Tensor:
    """How many of each row of `[B, K]` are true before the first that is not: `[B]` int64."""
    return flags.long().cumprod(dim=1).sum(dim=1)
