"""How many of a block's draft tokens a round verifies (DSpark, arXiv 2607.05147, section 3.2 and algorithm 1).

A round of width w puts the anchor and the first w - 1 draft tokens through the target. A wider one is expected to add
more tokens to the text and takes longer. With c_j, the draft's confidence that its token j is accepted if all before it
are:

    survival   a_j    = c_1 ... c_j                  P(the first j draft tokens are accepted)
    tokens     tau(w) = 1 + a_1 + ... + a_(w - 1)    expected of a round; in a batch, summed over its rows
    speed      tau(w) / cost(w)                      what `AutoWidth` raises; cost(w) is what such a round takes

Sampling stays lossless as long as no token decides on its own trial: a token verified only where what follows it looks
good comes out too often. The confidence c_(k + 1) depends on the drawn token k, so a search over the whole block would
do just that. Here widths are tried from the narrowest on, and the first that brings no more speed ends the search:
whether token k is verified has then been decided by c_1 to c_k, which depend on the tokens before it alone. Tokens that
were not drawn (in greedy decoding, or with `draft_sampling="greedy"`) follow from the text and give nothing away, so
there all widths are compared.

The rows of a batch share a forward, hence its width, and each row is judged on all the draft tokens in it. That is
lossless too, whichever row asked for the width: the decision about the tokens at place k of all rows has seen the
tokens at earlier places only, of its own row and of others.

Shapes: B batch, K draft tokens.
"""

import math
import time
import weakref
from collections.abc import MutableMapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

MEASUREMENTS = 3  # of each width; the lowest counts, because whatever disturbs a measurement makes it longer
LONG_CONTEXT = 16384  # positions; beyond, costs are measured anew each time the context has doubled


class FixedWidth:
    """One width for all rounds."""

    def __init__(self, width: int):
        self.width = width

    def choose(self, confidence: torch.Tensor | None, rows: list[int], length: int) -> int:
        """The width of the next round, 1 to K + 1.

        Args:
            confidence: the draft's logits for the block, `[B, K]`; None if it has no confidence head.
            rows: those that have not ended.
            length: of the longest context, in positions.
        """
        return self.width


class ThresholdWidth:
    """Verifies a row's draft tokens up to the first whose confidence is below a threshold, as DeepSpec does.

    The confidence of each token, given that those before it are accepted, is compared, not their product. The row that
    wants most decides.
    """

    def __init__(self, threshold: float, widest: int, temperatures: list[float] | None):
        self.threshold = threshold
        self.widest = widest
        self.temperatures = temperatures

    def choose(self, confidence: torch.Tensor, rows: list[int], length: int) -> int:
        """As of `FixedWidth`."""
        confident = probabilities(confidence, rows, self.temperatures) >= self.threshold
        return min(self.widest, 1 + max(confident.long().cumprod(dim=1).sum(dim=1).tolist()))


class AutoWidth:
    """Chooses the width of which most tokens a second are expected.

    Args:
        costs: of a round by width, 1 to K + 1, in any unit; None to measure them.
        measured: what was measured for this pair of draft and target so far; filled.
        temperatures: of the confidence logits, by position, or None.
        drafts_are_drawn: whether the search has to stop early, to stay lossless.
    """

    def __init__(
        self, costs: list[float] | None, measured: dict, temperatures: list[float] | None, drafts_are_drawn: bool
    ):
        self.costs = costs
        self.measured = measured
        self.temperatures = temperatures
        self.drafts_are_drawn = drafts_are_drawn
        self._running: tuple[MeasuredCosts, int, float] | None = None  # the round that is being measured

    def choose(self, confidence: torch.Tensor, rows: list[int], length: int) -> int:
        """As of `FixedWidth`. A round is measured from one call to the next: then the host has waited for the draft,
        and with it for all that was done before."""
        survival = probabilities(confidence, rows, self.temperatures).cumprod(dim=1).sum(dim=0).tolist()
        costs = self.costs
        if costs is None:
            found = self._measured_costs(confidence.shape[0], confidence.shape[1], length)
            to_measure = self._measure_next(found)
            if to_measure is not None:
                return to_measure
            costs = found.by_width()
        return fastest_width(survival, len(rows), costs, self.drafts_are_drawn)

    def _measured_costs(self, batch: int, block_size: int, length: int) -> "MeasuredCosts":
        """Those of this batch size and order of context length."""
        return self.measured.setdefault(
            (batch, (length // LONG_CONTEXT).bit_length()), MeasuredCosts([[] for _ in range(block_size + 1)])
        )

    def _measure_next(self, costs: "MeasuredCosts") -> int | None:
        """End the measurement of the round before, if it was one, and return the next width to measure, if any."""
        now = time.perf_counter()
        if self._running is not None:
            begun_for, begun_width, begun = self._running
            begun_for.seconds[begun_width - 1].append(now - begun)
        width = costs.next_width()
        self._running = None if width is None else (costs, width, now)
        return width


class MeasuredCosts:
    """What rounds of each width took, in `seconds[width - 1]`.

    The first rounds are measured as they are, with real text and whatever else belongs to a round, and no forward is
    spent on it: they go through all widths in turn, the widest first. Their widths depend on no draft token.
    """

    def __init__(self, seconds: list[list[float]]):
        self.seconds = seconds

    def next_width(self) -> int | None:
        """The width to measure next: of those measured least often, the widest. None once all are done."""
        fewest = min(map(len, self.seconds))
        if fewest == MEASUREMENTS:
            return None
        return max(width for width, taken in enumerate(self.seconds, start=1) if len(taken) == fewest)

    def by_width(self) -> list[float]:
        """Seconds by width, fitted so that none is above that of a wider round: a dent that noise left in the curve
        would end the search too early."""
        return nondecreasing([min(taken) for taken in self.seconds])


def nondecreasing(values: list[float]) -> list[float]:
    """The sequence nearest to `values` in squares in which nothing falls: neighbours that do are replaced by their
    mean, as 5 4 7 by 4.5 4.5 7."""
    levels: list[tuple[float, int]] = []  # means, and of how many values
    for mean in values:
        count = 1
        while levels and levels[-1][0] > mean:
            before, more = levels.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        levels.append((mean, count))
    return [mean for mean, count in levels for _ in range(count)]


def fastest_width(survival: list[float], rows: int, costs: list[float], stop_early: bool) -> int:
    """The width with the highest tau(w) / cost(w), or with `stop_early` the last one before the first that brings no
    more.

    `survival` holds a_1 to a_K, each summed over the `rows`.

    Example: survivals 0.5, 0.4, 0.2 and costs 1, 2, 2, 4 make speeds 1, 0.75, 0.95, 0.53: width 1 both ways. With costs
    1, 2, 1.5, 4 they are 1, 0.75, 1.27, 0.53: width 3, or 1 when stopping early.
    """
    tokens, best, speed = float(rows), 1, rows / costs[0]
    for width, (more, cost) in enumerate(zip(survival, costs[1:], strict=True), start=2):
        tokens += more
        if tokens / cost > speed:
            best, speed = width, tokens / cost
        elif stop_early:
            break
    return best


def probabilities(confidence: torch.Tensor, rows: list[int], temperatures: list[float] | None) -> torch.Tensor:
    """Calibrated P(token accepted | all before it accepted) of the rows, `[rows, K]` on the host, from logits
    `[B, K]`."""
    logits = confidence.cpu()[rows]
    return (logits if temperatures is None else logits / torch.tensor(temperatures)).sigmoid()


# By target and draft, for later calls in the same process.
_measured: MutableMapping[nn.Module, Any] = weakref.WeakKeyDictionary()


def measured_costs(draft, model: nn.Module) -> dict[tuple[int, int], MeasuredCosts]:
    """What rounds of this draft and target took, by batch size and order of context length; `AutoWidth` fills it."""
    return _measured.setdefault(model, weakref.WeakKeyDictionary()).setdefault(draft, {})


def make_schedule(draft, model: nn.Module, verify_width, confidence_threshold, verify_costs, drawn: bool):
    """The schedule that a call of `generate` asks for; ValueError, by name, for a value that is wrong or of no use.

    `model` is the target, and `drawn` says whether draft tokens are drawn at random.
    """
    widest, temperatures = draft.config.block_size + 1, draft.config.confidence_temperatures
    check_width(verify_width, widest)
    check_threshold(confidence_threshold, verify_width)
    check_costs(verify_costs, verify_width, widest)
    needs_head = {"confidence_threshold": confidence_threshold} if confidence_threshold is not None else {}
    needs_head |= {"verify_width": verify_width} if verify_width == "auto" else {}
    for name, value in needs_head.items():
        if draft.confidence_head is None:
            raise ValueError(
                f"`{name}` is {value!r}, which goes by the draft's confidence head, and this draft has none "
                "(`enable_confidence_head` is False). Leave it out, or pass a number as `verify_width`."
            )
    if verify_width == "auto":
        return AutoWidth(verify_costs, measured_costs(draft, model), temperatures, drawn)
    if confidence_threshold is not None:
        return ThresholdWidth(confidence_threshold, verify_width or widest, temperatures)
    return FixedWidth(verify_width or widest)


def check_width(verify_width, widest: int) -> None:
    if verify_width is None or isinstance(verify_width, str) and verify_width == "auto":
        return
    if isinstance(verify_width, Integral) and is_real(verify_width) and 1 <= int(verify_width) <= widest:
        return
    raise ValueError(
        f"`verify_width` is {verify_width!r}, expected 'auto' or an integer from 1 to {widest}: the anchor and up to "
        f"{widest - 1} draft tokens."
    )


def check_threshold(confidence_threshold, verify_width) -> None:
    if confidence_threshold is None:
        return
    if not is_real(confidence_threshold) or not 0 <= confidence_threshold <= 1:
        raise ValueError(
            f"`confidence_threshold` is {confidence_threshold!r}, expected a number from 0 to 1: it is compared with "
            "probabilities."
        )
    if verify_width == "auto":
        raise ValueError(
            f"`confidence_threshold` is {confidence_threshold!r} and `verify_width` is 'auto', and each chooses the "
            "width. Pass one of them."
        )


def check_costs(verify_costs, verify_width, widest: int) -> None:
    if verify_costs is None:
        return
    if (
        not isinstance(verify_costs, (list, tuple))
        or len(verify_costs) != widest
        or not all(map(is_cost, verify_costs))
    ):
        raise ValueError(
            f"`verify_costs` is {verify_costs!r}, expected a list of {widest} positive numbers: what a round of each "
            f"width from 1 to {widest} takes, in any unit."
        )
    if verify_width != "auto":
        raise ValueError(
            f"`verify_costs` is given with `verify_width` {verify_width!r}, and only 'auto' looks at costs. Pass "
            "verify_width='auto', or leave `verify_costs` out."
        )


def is_cost(value) -> bool:
    return is_real(value) and 0 < value < math.inf


def is_real(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
