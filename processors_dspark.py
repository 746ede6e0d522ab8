"""Logits processors over a block: which text each of them is asked about, row by row.

The processors are transformers' own, or the caller's. In plain decoding they are asked once a token, about the text so
far. Here they are asked about every place of a block, for draft and target alike: place k sees the committed text and
the first k draft tokens. The rows of a batch are of different lengths, and a row is to come out as if it ran alone, so
each has its own processors, which see its own text without padding.

Shapes: B batch, K draft tokens, V vocabulary, c committed tokens of a row.
"""

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# Processors that look at the scores alone, so that one call serves all rows and places.
TEXT_BLIND = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
# Those that read the text, but leave a token to choose after any, also after one that the target could not come to.
CONTENT_WITH_ANY_TEXT = (*TEXT_BLIND, RepetitionPenaltyLogitsProcessor)


class RowProcessors:
    """The processors of each row of a batch.

    They are asked only about text that the target alone could come to. A block goes on behind an end of text and beyond
    the budget, where a constraint may have nothing left to allow. The places there are cut anyway, so their scores stay
    as they are. Finding out has the host wait for the device, which is left out where any text suits all of them.

    Args:
        rows: the processors of each row.
        prompt_lengths: of each row, in tokens; an end of text within the prompt ends nothing.
        configs: of each row, with its `max_length`.
    """

    def __init__(self, rows: list[LogitsProcessorList], prompt_lengths: list[int], configs: list[GenerationConfig]):
        self.rows = rows
        self.prompt_lengths = prompt_lengths
        self.configs = configs
        self.are_text_blind = all(type(processor) in TEXT_BLIND for processor in rows[0])
        self.are_content = all(type(processor) in CONTENT_WITH_ANY_TEXT for processor in rows[0])

    def __bool__(self) -> bool:
        return bool(self.rows[0])

    def __call__(self, texts: list[torch.Tensor | None], logits: torch.Tensor) -> torch.Tensor:
        """Scores `[B, V]` of the tokens after `texts`, `[1, n]` each (None: whatever), from their logits."""
        if self.are_text_blind:
            return self.rows[0](texts[0], logits)
        scores = [self._ask(row, text, logits[row : row + 1]) for row, text in enumerate(texts)]
        return torch.cat(scores)

    def _ask(self, row: int, text: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        if text is None or text.shape[1] >= self.configs[row].max_length:
            return logits
        ends = None if self.are_content else self.configs[row]._eos_token_tensor
        if ends is not None and bool(torch.isin(text[:, self.prompt_lengths[row] :], ends).any()):
            return logits
        return self.rows[row](text, logits)


class BlockTexts:
    """The text at each place of a block, as the draft fills it: `BlockTexts(...)(drafted, logits)` is what
    `draft_block` calls.

    Args:
        processors: of the rows.
        texts: committed text of each row, `[1, c]`; None for a row that has ended.
        block_size: K.
    """

    def __init__(self, processors: RowProcessors, texts: list[torch.Tensor | None], block_size: int):
        self.processors = processors
        self.texts = texts
        self.lengths = [0 if text is None else text.shape[1] for text in texts]
        self.buffers = texts
        if not processors.are_text_blind:  # one buffer for all places: a copy each would grow with the context
            self.buffers = [
                None if text is None else torch.cat([text, text.new_empty(1, block_size)], dim=1) for text in texts
            ]

    def __bool__(self) -> bool:
        """Whether there is anything to ask: without processors, scores are logits."""
        return bool(self.processors)

    def __call__(self, drafted: list[torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
        """Scores `[B, V]` of the draft's next place from its logits, given what it drafted before, `[B]` a place."""
        if not self:
            return logits
        place = len(drafted)
        if drafted and not self.processors.are_text_blind:
            self._write(place - 1, drafted[-1])
        device = next(buffer.device for buffer in self.buffers if buffer is not None)
        # Processors may write into what they are given, and the logits stay as the draft made them.
        return self.processors(self._up_to(place), logits.to(device, copy=True)).to(logits.device)

    def process(self, logits: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Scores `[B, K + 1, V]` of every place from the target's logits there, given the draft tokens `[B, K]`."""
        if not self:
            return logits
        logits = logits.clone()  # as above
        if self.processors.are_text_blind:
            return self.processors(self.buffers, logits.flatten(0, 1)).view_as(logits)
        for place in range(draft_tokens.shape[1]):
            self._write(place, draft_tokens[:, place])
        scores = [self.processors(self._up_to(place), logits[:, place]) for place in range(logits.shape[1])]
        return torch.stack(scores, dim=1)

    def _write(self, place: int, tokens: torch.Tensor) -> None:
        for row, buffer in enumerate(self.buffers):
            if buffer is not None:
                buffer[0, self.lengths[row] + place] = tokens[row]

    def _up_to(self, place: int) -> list[torch.Tensor | None]:
        return [
            None if buffer is None else buffer[:, : length + place]
            for buffer, length in zip(self.buffers, self.lengths)
        ]
