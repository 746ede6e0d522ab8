"""How wide a round verifies: the choice itself, losslessness at every width, and what must not be looked at."""

import gc
import itertools
import random

import pytest
import torch
from conftest import (
    Forwards,
    follow,
    make_batch_draft,
    make_draft,
    make_scripted_draft,
    make_target,
    pad_left,
    plain_greedy,
    random_ids,
    tensors_of,
)
from dspark import schedule_dspark
from dspark.modeling_dspark import DSparkDraftModel
from dspark.schedule_dspark import (
    AutoWidth,
    MeasuredCosts,
    ThresholdWidth,
    fastest_width,
    measured_costs,
    nondecreasing,
)
from dspark.target_kimi_k3 import VerifiableTarget
from test_generation_dspark import OPTIONS, chi_square_p_value, exact_law, refused

DICT = {"return_dict_in_generate": True, "do_sample": False}
STEEP = [1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0]
WAYS = [
    {"verify_width": 1},
    {"verify_width": 5},
    {"verify_width": "auto", "verify_costs": STEEP},
    {"confidence_threshold": 0.3, "verify_width": 4},
]


def logits(*probabilities):
    return torch.tensor([probabilities]).logit()


# The choice


def test_the_example_of_the_docstring():
    for costs, whole, early in (([1, 2, 2, 4], 1, 1), ([1, 2, 1.5, 4], 3, 1)):
        assert fastest_width([0.5, 0.4, 0.2], 1, costs, stop_early=False) == whole
        assert fastest_width([0.5, 0.4, 0.2], 1, costs, stop_early=True) == early


def test_the_width_of_most_tokens_a_second_by_a_slow_formula():
    choose = random.Random(0)
    seen = set()
    for _ in range(300):
        rows, widest = choose.randint(1, 4), choose.randint(2, 8)
        confidence = torch.tensor([[choose.random() ** 0.3 for _ in range(widest - 1)] for _ in range(rows)])
        costs = [1 + choose.uniform(0.05, 0.6) * width for width in range(widest)]
        costs = sorted(costs)
        speeds = []
        for width in range(1, widest + 1):
            tokens = sum(1 + sum(row[:j].prod().item() for j in range(1, width)) for row in confidence)
            speeds.append(tokens / costs[width - 1])
        whole = speeds.index(max(speeds)) + 1
        early = next((w for w in range(1, widest) if speeds[w] <= speeds[w - 1]), widest)
        for drawn, expected in ((False, whole), (True, early)):
            schedule = AutoWidth(costs, {}, None, drawn)
            padded = torch.cat([torch.zeros(1, widest - 1), confidence.logit()])  # row 0 has ended
            assert schedule.choose(padded, list(range(1, rows + 1)), 10) == expected
        seen.add((whole, early))
    assert len(seen) > 10 and any(whole > early for whole, early in seen)


def test_temperatures_calibrate_what_decides():
    """By hand: logits of 0.9 halved are 0.75. Two such survive with 0.5625 instead of 0.81."""
    confidence, costs = logits(0.9, 0.9, 0.9), [1.0, 1.3, 1.72, 9.0]
    # Speeds: 1, 1.9 / 1.3 = 1.46, 2.71 / 1.72 = 1.58; halved: 1, 1.75 / 1.3 = 1.35, 2.31 / 1.72 = 1.34.
    assert AutoWidth(costs, {}, None, True).choose(confidence, [0], 0) == 3
    assert AutoWidth(costs, {}, [2.0] * 3, True).choose(confidence, [0], 0) == 2
    assert ThresholdWidth(0.8, 4, None).choose(confidence, [0], 0) == 4
    assert ThresholdWidth(0.8, 4, [1.0, 2.0, 1.0]).choose(confidence, [0], 0) == 2


def test_a_threshold_ends_at_the_first_token_below_it():
    confidence = logits(0.9, 0.5, 0.2, 0.9)
    for threshold, width in ((0.0, 5), (0.2, 5), (0.3, 3), (0.6, 2), (0.95, 1)):
        assert ThresholdWidth(threshold - 1e-6, 5, None).choose(confidence, [0], 0) == width
    assert ThresholdWidth(0.1, 3, None).choose(confidence, [0], 0) == 3, "`verify_width` is the most"
    two = torch.cat([confidence, logits(0.7, 0.7, 0.1, 0.1)])
    assert ThresholdWidth(0.6, 5, None).choose(two, [0, 1], 0) == 3, "the row that wants most decides"
    assert ThresholdWidth(0.6, 5, None).choose(two, [0], 0) == 2, "a row that has ended wants nothing"


def test_a_choice_looks_at_earlier_tokens_only():
    """Whether token k is verified may depend on c_1 to c_k, which the tokens before it give: the rest is changed."""
    choose = random.Random(1)
    costs = [1.0, 1.9, 2.0, 2.1, 4.0, 4.1, 4.2, 4.3]  # stairs, on which a search over all widths looks ahead
    looked_ahead = 0
    for schedule in (AutoWidth(costs, {}, None, True), ThresholdWidth(0.5, 8, None), AutoWidth(costs, {}, None, False)):
        for _ in range(400):
            confidence = torch.tensor([[choose.gauss(0.5, 2) for _ in range(7)] for _ in range(2)])
            place = choose.randint(1, 7)
            other = confidence.clone()
            other[:, place:] = torch.randn(2, 7 - place) * 3
            first, second = (schedule.choose(logits, [0, 1], 0) > place for logits in (confidence, other))
            looked_ahead += first != second
        if not (isinstance(schedule, AutoWidth) and not schedule.drafts_are_drawn):
            assert looked_ahead == 0
    assert looked_ahead > 0, "the search over all widths does look ahead, so this test would have seen it"


# Costs


def test_the_first_rounds_measure_the_costs(monkeypatch):
    """A clock on which a round of width w takes w + 10 seconds, twice as long the first time: the lowest counts."""
    now, seconds = [0.0], {}
    monkeypatch.setattr(schedule_dspark.time, "perf_counter", lambda: now[0])
    measured, widths, confidence = {}, [], logits(*[0.5] * 7)
    for _call in range(3):  # in three calls, whose times in between count nowhere
        schedule, now[0] = AutoWidth(None, measured, None, False), now[0] + 1000
        for _ in range(10):
            widths.append(schedule.choose(confidence, [0], 100))
            seconds[widths[-1]] = 10 + widths[-1] + 10 * (widths[-1] not in seconds)
            now[0] += seconds[widths[-1]]
    (costs,) = measured.values()
    assert costs.by_width() == [11, 12, 13, 14, 15, 16, 17, 18] and {len(taken) for taken in costs.seconds} == {3}
    assert widths[:8] == [8, 7, 6, 5, 4, 3, 2, 1]
    # 24 measurements, and two more where a call ended before its round did.
    assert sorted(widths[:26]) == sorted([*range(1, 9)] * 3 + widths[10:11] + widths[20:21])
    expected = fastest_width([0.5**j for j in range(1, 8)], 1, costs.by_width(), False)
    assert widths[26:] == [expected] * 4


def test_no_width_costs_more_than_a_wider_one():
    taken = [[9.0, 3.0], [5.0, 5.5], [4.0, 8.0], [6.0, 6.0]]
    assert MeasuredCosts(taken).by_width() == [3.0, 4.5, 4.5, 6.0]
    assert nondecreasing([5.0, 4.0, 7.0]) == [4.5, 4.5, 7.0], "the example of the docstring"
    assert nondecreasing([4.0, 3.0, 2.0, 1.0]) == [2.5] * 4 and nondecreasing([1.0, 1.0, 2.0]) == [1.0, 1.0, 2.0]
    choose = random.Random(0)
    for _ in range(50):  # the mean over the best run on either side: max over starts of min over ends
        values = [choose.random() for _ in range(8)]
        expected = [
            max(min(sum(values[i : j + 1]) / (j + 1 - i) for j in range(at, 8)) for i in range(at + 1))
            for at in range(8)
        ]
        assert nondecreasing(values) == pytest.approx(expected)


def test_costs_are_measured_for_each_batch_size_and_order_of_length():
    measured = {}
    for batch, length in ((1, 5), (1, 16383), (1, 16384), (1, 32767), (1, 32768), (2, 5), (1, 1 << 20)):
        AutoWidth(None, measured, None, False).choose(torch.zeros(batch, 7), [0], length)
    assert list(measured) == [(1, 0), (1, 1), (1, 2), (2, 0), (1, 7)]


def test_costs_belong_to_a_pair_and_go_with_it():
    """Measured in the first turn and not again in the second; anew for another draft; let go of with the target."""
    target, prompt = make_target("qwen3", num_hidden_layers=1), random_ids(5)
    drafts = [make_draft(target, seed=seed, target_layer_ids=[0]) for seed in (1, 2)]
    options = {"target": target, "max_new_tokens": 30, "verify_width": "auto", **DICT}
    forwards, descending = Forwards(target), [8, 7, 6, 5, 4, 3, 2, 1]
    first = drafts[0].generate(prompt, **options)
    assert forwards.widths[1:9] == descending
    forwards.widths.clear()
    drafts[0].generate(first.sequences, past_key_values=first.cache, **options)
    assert len(forwards.widths) > 9 and forwards.widths[1:9] != descending
    forwards.widths.clear()
    drafts[1].generate(prompt, **options)
    assert forwards.widths[1:9] == descending
    assert all(len(measured_costs(draft, target)) == 1 for draft in drafts)
    held = len(schedule_dspark._measured)
    del first, drafts, forwards, target, options
    gc.collect()
    assert len(schedule_dspark._measured) < held


# Losslessness


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_greedy_equals_plain_decoding_at_every_width(kind, way):
    target, prompt = make_target(kind), random_ids(9)
    places = random.Random(2)
    text = plain_greedy(target, prompt, 32)
    draft = make_scripted_draft(target, follow(text, lambda: places.randint(0, 7)))
    forwards = Forwards(target)
    output = draft.generate(prompt, target=target, max_new_tokens=25, output_rounds=True, **way, **DICT)
    widths = [step.width for step in output.rounds]
    assert torch.equal(output.sequences, text[:, : 9 + 25])
    assert forwards.widths == [9] + widths and output.num_target_forwards == len(widths), "one forward a round"
    assert all(step.accepted < step.width and step.tokens.shape[1] <= step.width for step in output.rounds)
    assert all(step.draft_tokens.shape == step.confidence.shape == (1, 7) for step in output.rounds)
    accepted = torch.tensor([step.accepted for step in output.rounds])
    assert torch.equal(output.acceptance_histogram[0], torch.bincount(accepted, minlength=8))
    if way["verify_width"] == "auto":
        assert len(set(widths)) > 1
    else:
        assert max(widths) <= way["verify_width"] and ("confidence_threshold" in way or len(set(widths)) == 1)


def test_the_default_is_the_full_width():
    target, prompt = make_target("text"), random_ids(9)
    draft = make_draft(target)
    texts = []
    for way in ({}, {"verify_width": 8}, {"confidence_threshold": 0}):
        for options in ({"do_sample": False}, {"do_sample": True, "generator": torch.Generator().manual_seed(1)}):
            forwards = Forwards(target)
            texts.append(draft.generate(prompt, target=target, max_new_tokens=20, **way, **options))
            forwards.remove()
            assert set(forwards.widths[1:]) == {8}
    assert all(torch.equal(text, texts[number % 2]) for number, text in enumerate(texts))


def test_width_one_is_plain_decoding():
    target, prompt = make_target("text"), random_ids(9)
    forwards = Forwards(target)
    output = make_draft(target).generate(prompt, target=target, max_new_tokens=20, verify_width=1, **DICT)
    assert forwards.widths == [9] + [1] * 19 and output.acceptance_histogram.tolist() == [[19] + [0] * 7]
    assert output.acc_len.tolist() == output.tokens_per_round.tolist() == [1.0]


def test_the_state_after_rounds_of_all_widths_equals_a_fresh_prefill(kind):
    """The measuring rounds of "auto" have all widths; what they accept is dictated."""
    target, prompt = make_target(kind), random_ids(11)
    places = random.Random(1)
    text = plain_greedy(target, prompt, 100)
    draft = make_scripted_draft(target, follow(text, lambda: places.randint(0, 7)))

    def compare(prefix_ids, cache, verifiable):
        committed = prefix_ids[:, :-1]
        fresh = VerifiableTarget(target, draft.config.target_layer_ids)
        fresh.prefill(committed)
        assert cache.lengths == verifiable.lengths == [committed.shape[1]]
        torch.testing.assert_close(tensors_of(verifiable.cache), tensors_of(fresh.cache), atol=1e-4, rtol=1e-4)

    draft.watch = compare
    options = {"max_new_tokens": 50, "verify_width": "auto", "output_rounds": True, **DICT}
    output = draft.generate(prompt, target=target, **options)
    assert torch.equal(output.sequences, text[:, : 11 + 50])
    seen = {(step.width, step.accepted) for step in output.rounds}
    assert {width for width, _ in seen} == set(range(1, 9)) and len(seen) > 11


@pytest.mark.parametrize("first", [1, 2, 8])
def test_a_replay_is_compared_once_for_one_token_and_once_for_more(kind, first, monkeypatch):
    """A target may have a kernel of its own for one token, so the first wider forward is checked even behind such."""
    target, prompt = make_target(kind), random_ids(6)
    widths, checked = iter([first, 1, 1, 3, 8, 2, *[8] * 50]), []

    class Listed:
        def choose(self, *_):
            return next(widths)

    monkeypatch.setattr(schedule_dspark.FixedWidth, "choose", Listed.choose)
    state = type(make_state(target))
    check = state.check_replay
    monkeypatch.setattr(state, "check_replay", lambda self, width: checked.append(width) or check(self, width))
    text = make_draft(target).generate(prompt, target=target, max_new_tokens=12, do_sample=False)
    assert torch.equal(text, plain_greedy(target, prompt, 12))
    assert checked == ([1, 3] if first == 1 else [first])


def make_state(target):
    with VerifiableTarget(target) as verifiable:
        verifiable.prefill(random_ids(3))
        return verifiable.state


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_row_of_a_batch_equals_the_row_alone(kind, way):
    target = make_target(kind)
    torch.manual_seed(3)
    rows = [random_ids(length) for length in (3, 17, 1, 8)]
    ids, mask = pad_left(rows)
    texts = [plain_greedy(target, row, 25) for row in rows]
    draft = make_batch_draft(target)
    draft.rights = [text[0].tolist() for text in texts]
    draft.script = itertools.cycle([7, 0, 3, 1, 6])
    end = texts[1][0, 30].item()
    options = {"attention_mask": mask, "max_new_tokens": 18, "pad_token_id": 10, "output_rounds": True, **DICT}
    output = draft.generate(ids, target=target, eos_token_id=end, **way, **options)
    for row, (text, prompt) in enumerate(zip(texts, rows)):
        new = text[0, prompt.shape[1] :][:18].tolist()
        new = new[: new.index(end) + 1] if end in new else new
        assert output.sequences[row, ids.shape[1] :][: len(new)].tolist() == new
    for number in range(output.num_target_forwards):
        assert len({steps[number].width for steps in output.rounds if number < len(steps)}) == 1, "one width a round"


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_processors_and_stops_see_what_plain_decoding_shows_them(options):
    target, prompt = make_target("qwen3"), random_ids(8)
    common = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    common |= {"output_scores": True, "output_logits": True, **options}
    expected = target.generate(prompt, **common)
    draft = make_scripted_draft(target, follow(expected.sequences, itertools.cycle([7, 1, 0, 4]).__next__))
    narrow = {"confidence_threshold": 0.3, "verify_width": 4, "output_rounds": True}
    output = draft.generate(prompt, target=target, **narrow, **common)
    assert torch.equal(output.sequences, expected.sequences) and max(step.width for step in output.rounds) <= 4
    for mine, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), atol=1e-4, rtol=1e-4)


def test_figures_count_what_was_verified():
    """Widths 4, 4 and 4 of a draft that is right at all, none and two places: 3, 0 and 2 accepted."""
    target, prompt = make_target("text"), random_ids(6)
    text = plain_greedy(target, prompt, 40)
    draft = make_scripted_draft(target, follow(text, iter([7, 0, 2]).__next__))
    output = draft.generate(prompt, target=target, max_new_tokens=1 + 4 + 1 + 3, verify_width=4, **DICT)
    assert output.acceptance_histogram.tolist() == [[1, 0, 1, 1, 0, 0, 0, 0]]
    assert output.acc_len.tolist() == output.tokens_per_round.tolist() == [pytest.approx(8 / 3)]


# Sampling


LAWFUL = [
    {"verify_width": 2},
    {"verify_width": "auto"},
    {"verify_width": "auto", "verify_costs": STEEP},
    {"verify_width": "auto", "verify_costs": STEEP, "verification": "block"},
    {"verify_width": "auto", "verify_costs": [1, 2, 2, 2, 2, 2, 2, 2], "draft_sampling": "greedy"},
    {"confidence_threshold": 0.5, "top_k": 3, "temperature": 0.7},
    {"confidence_threshold": 0.5, "verification": "block"},
]


@pytest.mark.parametrize("kind, options", [("qwen3", options) for options in LAWFUL] + [("text", LAWFUL[2])], ids=str)
def test_sampling_keeps_the_target_law(kind, options):
    """Chi-square of three tokens on a vocabulary of 6; p < 1e-4 has odds of 1 in 10000 for a right implementation.

    The rows are one batch, so a row's width is often asked for by another.
    """
    target = make_target(kind, vocab_size=6, num_hidden_layers=5, pad_token_id=5, bos_token_id=4)
    draft = make_draft(target, mask_token_id=3)
    prompt = torch.tensor([[0, 2, 1]])
    law = exact_law(target, prompt, 3, options.get("temperature", 1.0), options.get("top_k", 0), 1.0)
    settings = {"top_k": 0, "max_new_tokens": 3, "do_sample": True, **options}
    counts = torch.zeros(6, 6, 6)
    for copies in [80] * 6 + [2] * 6:
        for text in draft.generate(prompt, target=target, num_return_sequences=copies, **settings):
            counts[tuple(text[3:])] += 1
    assert chi_square_p_value(counts, law) > 1e-4


class GivenAway(DSparkDraftModel):
    """A draft whose confidence in token 2 gives token 1 away: it is sure behind a 0, and hopeless behind others."""

    def draft_block(self, *args):
        block = super().draft_block(*args)
        block.confidence = torch.full_like(block.confidence, -9.0)
        block.confidence[:, 0] = 0.0  # a half, whatever is drawn
        block.confidence[:, 1:] += 18.0 * (block.tokens[:, :1] == 0)
        return block


@pytest.mark.parametrize("batch, verification", [(1, "token"), (1, "block"), (2, "token")])
@pytest.mark.parametrize("stop_early", [True, False])
def test_a_search_over_the_whole_block_biases_the_text_and_ours_does_not(batch, verification, stop_early, monkeypatch):
    """The paper's counterexample in kind: the costs have a stair that token 1 does not pay for alone (1.5 / 1.6 < 1)
    and with token 2 does (2 / 1.7 > 1). Verified only where it is a 0, token 1 is a 0 too often.

    A processor makes all tokens independent draws from one law, so that one text holds many samples.
    """
    target = make_target("qwen3", vocab_size=6, num_hidden_layers=1, pad_token_id=5, bos_token_id=4)
    draft = make_draft(target, GivenAway, mask_token_id=3, target_layer_ids=[0])
    choose = AutoWidth.choose

    def choose_as(self, *args):
        assert self.drafts_are_drawn
        self.drafts_are_drawn = stop_early
        width = choose(self, *args)
        self.drafts_are_drawn = True
        return width

    monkeypatch.setattr(AutoWidth, "choose", choose_as)
    law = torch.tensor([0.2, 0.3, 0.1, 0.0, 0.15, 0.25])
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 400 + 100 * batch, "num_return_sequences": batch}
    options |= {"verify_width": "auto", "verify_costs": [1.0, 1.6, 1.7, 9, 9, 9, 9, 9], "verification": verification}
    options |= {"logits_processor": [lambda ids, scores: law.log().expand_as(scores)], "output_rounds": True}
    output = draft.generate(torch.tensor([[0, 2, 1]]), target=target, return_dict_in_generate=True, **options)
    counts = torch.bincount(output.sequences[:, 3:].flatten(), minlength=6)
    assert (chi_square_p_value(counts, law.double()) > 1e-4) == stop_early
    widths = {step.width for step in (output.rounds if batch == 1 else output.rounds[0])}
    assert widths == ({1} if stop_early else {1, 3})


def test_a_search_that_stops_early_verifies_and_is_lossless():
    """As above, with costs for which token 1 pays, and token 2 only behind a 0: rounds of two widths, and no bias."""
    target = make_target("qwen3", vocab_size=6, num_hidden_layers=1, pad_token_id=5, bos_token_id=4)
    draft = make_draft(target, GivenAway, mask_token_id=3, target_layer_ids=[0])
    law = torch.tensor([0.2, 0.3, 0.1, 0.0, 0.15, 0.25])
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 500, "output_rounds": True}
    options |= {"verify_width": "auto", "verify_costs": [1.0, 1.4, 1.6, 9, 9, 9, 9, 9]}
    options |= {"logits_processor": [lambda ids, scores: law.log().expand_as(scores)]}
    output = draft.generate(torch.tensor([[0, 2, 1]]), target=target, return_dict_in_generate=True, **options)
    assert {step.width for step in output.rounds} == {2, 3}
    assert chi_square_p_value(torch.bincount(output.sequences[0, 3:], minlength=6), law.double()) > 1e-4


# Refusals


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("verify_width.*0.*'auto' or an integer from 1 to 8", {"verify_width": 0}),
        ("verify_width.*9", {"verify_width": 9}),
        ("verify_width.*-1", {"verify_width": -1}),
        ("verify_width.*'wide'", {"verify_width": "wide"}),
        ("verify_width.*2.0", {"verify_width": 2.0}),
        ("verify_width.*True", {"verify_width": True}),
        (r"verify_width.*\[2\]", {"verify_width": [2]}),
        ("confidence_threshold.*1.5.*from 0 to 1", {"confidence_threshold": 1.5}),
        ("confidence_threshold.*-0.1", {"confidence_threshold": -0.1}),
        ("confidence_threshold.*nan", {"confidence_threshold": float("nan")}),
        ("confidence_threshold.*'0.5'", {"confidence_threshold": "0.5"}),
        ("confidence_threshold.*True", {"confidence_threshold": True}),
        ("confidence_threshold.*verify_width.*'auto'", {"confidence_threshold": 0.5, "verify_width": "auto"}),
        ("verify_costs.*8 positive numbers", {"verify_costs": [1.0] * 7, "verify_width": "auto"}),
        ("verify_costs.*0", {"verify_costs": [1.0] * 7 + [0], "verify_width": "auto"}),
        ("verify_costs.*inf", {"verify_costs": [1.0] * 7 + [float("inf")], "verify_width": "auto"}),
        ("verify_costs.*'1'", {"verify_costs": ["1"] * 8, "verify_width": "auto"}),
        ("verify_costs.*3.0", {"verify_costs": 3.0, "verify_width": "auto"}),
        ("verify_costs.*verify_width.*None", {"verify_costs": [1.0] * 8}),
        ("verify_costs.*verify_width.*4", {"verify_costs": [1.0] * 8, "verify_width": 4}),
    ],
)
def test_bad_arguments_are_refused_by_name(message, arguments):
    refused(message, **arguments)


def test_a_draft_without_a_confidence_head_can_only_be_given_a_width():
    target, prompt = make_target("qwen3"), random_ids(4)
    draft = make_draft(target, enable_confidence_head=False)
    forwards = Forwards(target)
    for name, value in (("verify_width", "auto"), ("confidence_threshold", 0.5)):
        with pytest.raises(ValueError, match=f"{name}.*confidence head"):
            draft.generate(prompt, target=target, **{name: value})
    assert forwards.widths == []
    text = draft.generate(prompt, target=target, max_new_tokens=9, do_sample=False, verify_width=3)
    assert set(forwards.widths[1:]) == {3}
    assert torch.equal(text, plain_greedy(target, prompt, 9))
