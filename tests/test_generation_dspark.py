"""The loop: losslessness against plain decoding, one forward a round, state after every round, stops, statistics,
refusals."""

import random
import threading

import pytest
import torch
import transformers
from common import TINY_TARGET
from conftest import (
    TARGET_KINDS,
    Forwards,
    follow,
    make_draft,
    make_scripted_draft,
    make_target,
    plain_greedy,
    random_ids,
    tensors_of,
)
from dspark.generation_dspark import accept_greedy, accept_sampled, accept_sampled_block
from dspark.request_dspark import HONOURED_FIELDS, INERT_FIELDS, read_stops
from dspark.target_kimi_k3 import VerifiableTarget, locate_text_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

DICT = {"return_dict_in_generate": True}


def adversary(text):
    """A script that is wrong at every place: each proposed id is one off the right one."""
    right = follow(text)
    return lambda prefix_ids: [(token + 1) % 12 for token in right(prefix_ids)]


# Losslessness


def test_greedy_equals_plain_decoding_on_200_prompts(kind):
    """Lengths 1 to 300, each with a random draft and a script: an oracle, an adversary, or wrong at a random place."""
    target = make_target(kind)
    draft = make_draft(target)
    choose = random.Random(0)
    histogram = torch.zeros(8, dtype=torch.long)
    lengths = [1, 2, 3, 4, 5, 300] + [choose.randint(1, 300) for _ in range(194)]
    for number, length in enumerate(lengths):
        prompt = random_ids(length)
        expected = plain_greedy(target, prompt, 9)  # the prefill's token and one whole round
        scripts = (follow(expected), adversary(expected), follow(expected, lambda: choose.randint(0, 7)))
        for drafting in (draft, make_scripted_draft(target, scripts[number % 3])):
            output = drafting.generate(prompt, target=target, max_new_tokens=9, do_sample=False, **DICT)
            assert torch.equal(output.sequences, expected), f"prompt {number} of length {length}"
            rounds = output.acceptance_histogram[0]
            histogram += rounds
        if number % 3 < 2:
            assert rounds.tolist() == ([0, 0, 0, 0, 0, 0, 0, 1], [8, 0, 0, 0, 0, 0, 0, 0])[number % 3]
    assert (histogram > 0).all(), f"some acceptance length never occurred: {histogram.tolist()}"


def test_oracle_draft_is_accepted_whole_every_round(kind):
    target, prompt = make_target(kind), random_ids(9)
    text = plain_greedy(target, prompt, 60)
    draft = make_scripted_draft(target, follow(text))
    output = draft.generate(prompt, target=target, max_new_tokens=49, do_sample=False, **DICT)
    assert torch.equal(output.sequences, text[:, : 9 + 49])
    assert output.acceptance_histogram.tolist() == [[0, 0, 0, 0, 0, 0, 0, 6]]
    assert (
        output.acc_len.tolist() == [8.0]
        and output.tokens_per_round.tolist() == [8.0]
        and output.num_target_forwards == 6
    )


def test_adversary_draft_is_never_accepted_and_scores_exactly_one(kind):
    target, prompt = make_target(kind), random_ids(9)
    text = plain_greedy(target, prompt, 30)
    draft = make_scripted_draft(target, adversary(text))
    output = draft.generate(prompt, target=target, max_new_tokens=20, do_sample=False, **DICT)
    assert torch.equal(output.sequences, text[:, : 9 + 20])
    assert output.acceptance_histogram.tolist() == [[19, 0, 0, 0, 0, 0, 0, 0]]
    assert output.acc_len.tolist() == [1.0] and output.tokens_per_round.tolist() == [1.0]


def test_one_forward_of_width_eight_a_round(kind):
    target, prompt = make_target(kind), random_ids(21)
    draft = make_draft(target)
    forwards = Forwards(target)
    output = draft.generate(prompt, target=target, max_new_tokens=20, do_sample=False, **DICT)
    assert forwards.widths == [21] + [8] * output.num_target_forwards
    assert output.num_target_forwards == output.acceptance_histogram.sum()


def test_state_after_every_round_equals_a_fresh_prefill(kind):
    """The target's state, tensor by tensor, and the draft's context, after rounds of every acceptance length."""
    target, prompt = make_target(kind), random_ids(11)
    places = random.Random(1)
    text = plain_greedy(target, prompt, 70)
    draft = make_scripted_draft(target, follow(text, lambda: places.randint(0, 7)))

    def compare(prefix_ids, cache, verifiable):
        committed = prefix_ids[:, :-1]
        fresh = VerifiableTarget(target, draft.config.target_layer_ids)
        features = fresh.prefill(committed).features
        expected_cache = draft.new_cache()
        draft.write_context(features, torch.arange(committed.shape[1])[None], expected_cache)
        assert cache.lengths == verifiable.lengths == [committed.shape[1]]
        torch.testing.assert_close(tensors_of(verifiable.cache), tensors_of(fresh.cache), atol=1e-4, rtol=1e-4)
        for layer in range(len(cache.keys)):
            for held, expected in ((cache.keys, expected_cache.keys), (cache.values, expected_cache.values)):
                held, expected = (buffers[layer][:, :, : cache.length] for buffers in (held, expected))
                torch.testing.assert_close(held, expected, atol=1e-4, rtol=1e-4)

    draft.watch = compare
    output = draft.generate(prompt, target=target, max_new_tokens=60, do_sample=False, **DICT)
    assert torch.equal(output.sequences, text[:, : 11 + 60])
    assert len(draft.prefixes) == output.num_target_forwards > 8


def test_prefill_in_pieces_gives_the_same_text(kind):
    target, prompt = make_target(kind), random_ids(37)
    draft = make_draft(target)
    forwards = Forwards(target)
    output = draft.generate(prompt, target=target, max_new_tokens=12, do_sample=False, prefill_chunk_size=10)
    assert forwards.widths[:4] == [10, 10, 10, 7]
    assert torch.equal(output, plain_greedy(target, prompt, 12))


def test_image_prompt_is_counted_as_the_target_counts_it():
    """An image's placeholder stands for several positions, so positions come from the target and not from
    `input_ids`."""
    target = make_target("wrapper")
    placeholder = target.config.media_placeholder_token_id
    prompt = torch.tensor([[1, 2, placeholder, 3, 4, placeholder, 5]])
    patch = target.config.vision_config["patch_size"]
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    images = {"pixel_values": torch.randn(int(grid.prod(dim=1).sum()), 3, patch, patch), "grid_thws": grid}
    text = plain_greedy(target, prompt, 30, **images)
    assert not torch.equal(text, plain_greedy(target, prompt[:, :0].new_tensor([[1, 2, 3, 4, 5, 6, 1]]), 30))
    draft = make_scripted_draft(target, follow(text, iter([3, 0, 7, 5, 1] * 9).__next__))
    seen = []
    draft.watch = lambda prefix_ids, cache, verifiable: seen.append(
        (cache.lengths[0], verifiable.lengths[0], prefix_ids.shape[1])
    )
    output = draft.generate(prompt, target=target, max_new_tokens=20, do_sample=False, **images)
    assert torch.equal(output, text[:, : 7 + 20])
    assert all(context == held == written - 1 + (4 - 1) + (2 - 1) for context, held, written in seen)


def test_low_precision_differs_from_plain_decoding_at_near_ties_only(kind):
    target = make_target(kind).to(torch.bfloat16)
    draft = make_draft(target).to(torch.bfloat16)
    prompt = random_ids(20)
    mine = draft.generate(prompt, target=target, max_new_tokens=24, do_sample=False)
    plain = plain_greedy(target, prompt, 24)
    different = (mine != plain)[0].nonzero()
    if len(different):
        with torch.no_grad():
            logits = target(input_ids=mine[:, : int(different[0])]).logits[0, -1].float()
        first, second = logits.topk(2).values.tolist()
        assert first - second < 0.05 * logits.abs().max(), "the first difference is not a near tie"
    assert mine.shape == plain.shape


# Sampling


def exact_law(target, prompt, steps, temperature, top_k, top_p):
    """The probability of every continuation of `steps` tokens, `[V] * steps`, by a formula apart from the code under
    test."""
    if steps == 0:
        return torch.ones((), dtype=torch.float64)
    with torch.no_grad():
        logits = target(input_ids=prompt).logits[0, -1].double() / temperature
    order = sorted(range(len(logits)), key=lambda token: -logits[token].item())[: top_k or None]
    weights = [logits[token].exp().item() for token in order]
    probs = [weight / sum(weights) for weight in weights]
    count = next(n for n in range(1, len(order) + 1) if sum(probs[:n]) >= top_p or n == len(order))
    law = torch.zeros(len(logits), *[len(logits)] * (steps - 1), dtype=torch.float64)
    for token, prob in zip(order[:count], probs):
        longer = torch.cat([prompt, torch.tensor([[token]])], dim=1)
        law[token] = prob / sum(probs[:count]) * exact_law(target, longer, steps - 1, temperature, top_k, top_p)
    return law


def chi_square_p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Pearson's test; cells expected less than 5 times are pooled, impossible ones must be empty."""
    counts, law = counts.flatten().double(), law.flatten()
    assert counts[law == 0].sum() == 0, "a token came out that the target never emits"
    expected = law * counts.sum()
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item() if freedom > 0 else 1.0


LAWFUL = [
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 2},
    {"top_p": 0.7},
    {"draft_sampling": "greedy"},
    {"verification": "block"},
    {"verification": "block", "draft_sampling": "greedy", "temperature": 2.0},
    {"verification": "block", "top_k": 2, "temperature": 0.3},
]


@pytest.mark.parametrize(
    "kind, options", [(kind, {}) for kind in TARGET_KINDS] + [("qwen3", options) for options in LAWFUL], ids=str
)
def test_sampling_keeps_the_target_law(kind, options):
    """Chi-square of three tokens on a vocabulary of 6; p < 1e-4 has odds of 1 in 10000 for a right implementation."""
    target = make_target(kind, vocab_size=6, num_hidden_layers=5, pad_token_id=5, bos_token_id=4)
    draft = make_draft(target, mask_token_id=3)
    prompt = torch.tensor([[0, 2, 1]])
    law = exact_law(
        target, prompt, 3, options.get("temperature", 1.0), options.get("top_k", 0), options.get("top_p", 1.0)
    )
    settings = {"top_k": 0, "max_new_tokens": 3, "do_sample": True, **options}
    counts = torch.zeros(6, 6, 6)
    for _ in range(10):
        for text in draft.generate(prompt, target=target, num_return_sequences=80, **settings):
            counts[tuple(text[3:])] += 1
    assert chi_square_p_value(counts, law) > 1e-4


RULES = [accept_sampled, accept_sampled_block]
LAWS = torch.tensor([[0.5, 0.2, 0.3, 0.0], [0.1, 0.0, 0.6, 0.3], [0.25, 0.15, 0.35, 0.25], [0.7, 0.1, 0.1, 0.1]])
DRAFT_LAWS = {
    "other": torch.tensor([[0.1, 0.6, 0.0, 0.3], [0.7, 0.1, 0.1, 0.1], [0.3, 0.3, 0.3, 0.1]]),
    "near": LAWS[:3] * 0.9 + 0.025,
    "same": LAWS[:3],
    "certain": torch.eye(4)[[0, 2, 1]],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_laws", DRAFT_LAWS.values(), ids=DRAFT_LAWS)
def test_acceptance_rules_keep_the_law(rule, draft_laws):
    """The first three tokens of 20,000 rounds; what a round leaves open is drawn from the target."""
    rounds = 20_000
    drafts = torch.stack([torch.multinomial(law, rounds, replacement=True) for law in draft_laws], dim=1)
    verdict = rule(LAWS.expand(rounds, -1, -1), drafts, draft_laws.expand(rounds, -1, -1))
    texts = torch.stack([torch.multinomial(law, rounds, replacement=True) for law in LAWS], dim=1)
    for text, accepted, token_ids in zip(texts, verdict.accepted, verdict.token_ids):
        assert len(token_ids) == accepted + 1
        text[: accepted + 1] = torch.tensor(token_ids)
    counts = torch.zeros(4, 4, 4, 4).index_put(tuple(texts.T), torch.ones(rounds), accumulate=True)
    assert chi_square_p_value(counts, torch.einsum("a,b,c,d->abcd", *LAWS.double())) > 1e-4


def test_block_verification_accepts_more():
    """By hand (Sun et al., arXiv 2403.10444, section 2): target 1/3, 2/3 and draft 2/3, 1/3 at both of two places make
    10/9 accepted drafts on average token by token, 11/9 as a block."""
    target_probs, draft_probs = torch.tensor([[1 / 3, 2 / 3]] * 3), torch.tensor([[2 / 3, 1 / 3]] * 2)
    rounds, means = 60_000, []
    for rule in RULES:
        drafts = torch.multinomial(draft_probs[0], 2 * rounds, replacement=True).view(rounds, 2)
        verdict = rule(target_probs.expand(rounds, -1, -1), drafts, draft_probs.expand(rounds, -1, -1))
        means.append(sum(verdict.accepted) / rounds)
    assert means == pytest.approx([10 / 9, 11 / 9], abs=0.02)


def test_accept_sampled_with_deterministic_and_impossible_drafts():
    one_hot = torch.eye(4)[None]
    verdict = accept_sampled(one_hot[:, [0, 1, 2]], torch.tensor([[0, 1]]), one_hot[:, [0, 1]])
    assert verdict.accepted == [2] and verdict.token_ids == [[0, 1, 2]]
    verdict = accept_sampled(one_hot[:, [0, 1, 2]], torch.tensor([[0, 3]]), one_hot[:, [0, 3]])
    assert verdict.accepted == [1] and verdict.token_ids == [[0, 1]]
    # A token that neither law allows: 0 / 0 is no acceptance, and the target's own law decides.
    verdict = accept_sampled(one_hot[:, [0, 1, 2]], torch.tensor([[3, 1]]), one_hot[:, [0, 1]])
    assert verdict.accepted == [0] and verdict.token_ids == [[0]]


def test_accept_greedy_takes_the_longest_right_prefix():
    """The example of the docstring, and every place of the first mismatch."""
    scores = torch.nn.functional.one_hot(torch.tensor([[5, 7, 9, 4]]), 12).float()
    verdict = accept_greedy(scores, torch.tensor([[5, 7, 8]]))
    assert (verdict.accepted, verdict.token_ids) == ([2], [[5, 7, 9]])
    scores = torch.nn.functional.one_hot(torch.arange(8)[None], 12).float()
    for place in range(8):
        drafts = torch.arange(7)[None].clone()
        drafts[0, place:] += 1
        verdict = accept_greedy(scores, drafts)
        assert verdict.accepted == [place] and verdict.token_ids[0][-1] == place


def test_sampling_follows_the_seed_and_greedy_leaves_the_random_stream_alone():
    target, prompt = make_target("qwen3"), random_ids(5)
    draft = make_draft(target)
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(draft.generate(prompt, target=target, max_new_tokens=30, do_sample=True))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    before = torch.get_rng_state()
    draft.generate(prompt, target=target, max_new_tokens=30, do_sample=False)
    assert torch.equal(torch.get_rng_state(), before)


# Processors, stops, streams: against transformers' own generate of a plain decoder

OPTIONS = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 9, "eos_token_id": list(range(6))},
    {"min_length": 20, "eos_token_id": list(range(6))},
    {"bad_words_ids": [[3], [4, 1]]},
    {"suppress_tokens": [0, 1, 2]},
    {"begin_suppress_tokens": [0, 1, 2, 3]},
    {"forced_eos_token_id": 9},
    {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 9},
    {"sequence_bias": {(3,): 5.0}},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 2},
    {"eos_token_id": [2, 5, 9]},
    {"eos_token_id": 5},
    {"logits_processor": LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(2.0)])},
    {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1] + 1) % 12, int(ids.sum()) % 12]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_options_give_what_the_targets_own_generate_gives(options):
    target = make_target("qwen3")
    for seed, place in ((0, 7), (1, 2), (2, 0)):
        torch.manual_seed(seed)
        prompt = random_ids(8)
        common = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
        common |= {"output_scores": True, "output_logits": True, **options}
        expected = target.generate(prompt, **common)
        draft = make_scripted_draft(target, follow(expected.sequences, lambda place=place: place))
        output = draft.generate(prompt, target=target, **common)
        assert torch.equal(output.sequences, expected.sequences)
        for mine, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
            assert len(mine) == len(theirs) == expected.sequences.shape[1] - 8
            torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("place", range(1, 9))
def test_stop_token_at_every_place_of_a_block(kind, place):
    """The text ends with the stop token, the round's later tokens are dropped, acc_len counts what verification
    judged."""
    target, prompt = make_target(kind, seed=5), random_ids(6)
    text = plain_greedy(target, prompt, 30)
    stop = text[0, 6 + place].item()  # token `place` of the first round
    end = next(at for at in range(6, 6 + 30) if text[0, at] == stop)
    draft = make_scripted_draft(target, follow(text))
    output = draft.generate(prompt, target=target, max_new_tokens=30, do_sample=False, eos_token_id=stop, **DICT)
    assert torch.equal(output.sequences, text[:, : end + 1])
    if end == 6:  # the token after the prompt is the stop: no round at all
        assert (
            output.num_target_forwards == 0 and output.acc_len.isnan().all() and output.tokens_per_round.isnan().all()
        )
    else:
        assert output.acceptance_histogram.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1]]
        assert output.acc_len.tolist() == [8.0] and output.tokens_per_round.tolist() == [end - 6]


@pytest.mark.parametrize("budget", range(1, 10))
def test_budgets_cut_inside_a_block(budget):
    target, prompt = make_target("text"), random_ids(6)
    text = plain_greedy(target, prompt, 30)
    draft = make_scripted_draft(target, follow(text))
    by_new = draft.generate(prompt, target=target, max_new_tokens=budget, do_sample=False)
    by_length = draft.generate(prompt, target=target, max_length=6 + budget, do_sample=False)
    assert torch.equal(by_new, text[:, : 6 + budget]) and torch.equal(by_length, by_new)


@pytest.mark.parametrize("kind", ["text", "qwen3"])
def test_processors_are_asked_about_reachable_text_only(kind):
    """A constraint that has nothing to allow behind its end or its budget, where a block of seven drafts goes on."""
    target, prompt = make_target(kind), random_ids(3)
    draft = make_draft(target)
    words = [[1, 2, 3, 5], [1, 4, 5]]  # 5 ends the text

    def next_of_words(row, ids):
        done = ids[3:].tolist()
        return [word[len(done)] for word in words if word[: len(done)] == done and len(word) > len(done)]

    common = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 5}
    output = draft.generate(prompt, target=target, prefix_allowed_tokens_fn=next_of_words, **common)
    assert output[0, 3:].tolist() in words
    plan = [1, 2, 3, 4]
    common = {"max_new_tokens": 4, "do_sample": False}
    output = draft.generate(
        prompt, target=target, prefix_allowed_tokens_fn=lambda _, ids: [plan[len(ids) - 3]], **common
    )
    assert output[0, 3:].tolist() == plan
    common = {"max_new_tokens": 8, "do_sample": True, "no_repeat_ngram_size": 1}
    output = draft.generate(prompt[:, :1], target=target, **common)
    assert len(set(output[0].tolist())) == 9


def test_stopping_criterion_gets_the_scores_when_they_are_asked_for():
    target, prompt = make_target("qwen3"), random_ids(6)
    draft = make_draft(target)

    class Confident(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert len(scores) == input_ids.shape[1] - 6
            return (scores[-1].softmax(dim=-1).amax(dim=-1) > 0.9) & (input_ids.shape[1] > 9)

    common = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    common["stopping_criteria"] = StoppingCriteriaList([Confident()])
    expected = target.generate(prompt, **common)
    assert torch.equal(draft.generate(prompt, target=target, **common).sequences, expected.sequences)


def test_custom_stopping_criterion_sees_every_token():
    target, prompt = make_target("text"), random_ids(6)
    text = plain_greedy(target, prompt, 30)
    lengths = []

    class StopAt(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            lengths.append(input_ids.shape[1])
            return torch.tensor([input_ids.shape[1] == 19])

    draft = make_scripted_draft(target, follow(text))
    output = draft.generate(
        prompt, target=target, max_new_tokens=30, do_sample=False, stopping_criteria=StoppingCriteriaList([StopAt()])
    )
    assert torch.equal(output, text[:, :19]) and lengths == list(range(7, 20))


def test_end_tokens_come_as_number_list_or_tensor():
    target, prompt = make_target("qwen3"), random_ids(6)
    text = plain_greedy(target, prompt, 30)
    end = text[0, 14].item()
    stop = text[0, 6:].tolist().index(end) + 7
    draft = make_scripted_draft(target, follow(text))
    for ends in (end, [end, 11], torch.tensor([11, end])):
        output = draft.generate(prompt, target=target, max_new_tokens=30, do_sample=False, eos_token_id=ends)
        assert torch.equal(output, text[:, :stop])


def test_stop_strings_cut_where_the_targets_own_generate_cuts():
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_TARGET, trust_remote_code=True)
    target = make_target("qwen3", vocab_size=len(tokenizer))
    prompt = tokenizer("def f(", return_tensors="pt").input_ids
    text = plain_greedy(target, prompt, 60)
    draft = make_scripted_draft(target, follow(text, vocab_size=len(tokenizer)))
    lengths = set()
    for place in range(12, 22):
        options = {"max_new_tokens": 50, "do_sample": False, "tokenizer": tokenizer}
        options["stop_strings"] = [tokenizer.decode(text[0, place : place + 2])]
        expected = target.generate(prompt, **options)
        output = draft.generate(prompt, target=target, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected)
        assert torch.equal(output.cache.texts[0], expected[:, :-1])
        lengths.add(expected.shape[1])
    assert len(lengths) > 4


def test_time_runs_out_between_tokens(monkeypatch):
    target, prompt = make_target("text"), random_ids(6)
    text = plain_greedy(target, prompt, 40)
    clock = iter(range(1000))
    monkeypatch.setattr(transformers.generation.stopping_criteria.time, "time", lambda: next(clock))
    draft = make_scripted_draft(target, follow(text))
    # The clock is read once at the start and then for every token, and has gone on by a second each time.
    output = draft.generate(prompt, target=target, max_new_tokens=40, do_sample=False, max_time=10.5)
    assert torch.equal(output, text[:, : 6 + 11])


def test_transformers_own_criteria_are_read_and_all_others_asked():
    class OtherEnd(transformers.EosTokenCriteria):
        pass

    ends = [transformers.EosTokenCriteria([3, 5]), transformers.EosTokenCriteria(torch.tensor(8))]
    lengths = [transformers.MaxLengthCriteria(40), transformers.MaxLengthCriteria(30, max_position_embeddings=64)]
    long, other = transformers.MaxLengthCriteria(25, max_position_embeddings=20), OtherEnd(9)
    stops = read_stops(StoppingCriteriaList([*ends, long, other, *lengths]))
    assert (stops.max_length, stops.end_ids) == (25, {3, 5, 8})
    warning, asked = stops.criteria
    assert asked is other and warning.max_position_embeddings == 20
    assert not warning(torch.zeros(1, 25), None), "it warns, and ends nothing"


@pytest.mark.parametrize(
    "sampling",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7, "typical_p": 0.9},
        {"do_sample": True, "epsilon_cutoff": 0.01, "renormalize_logits": True},
    ],
)
def test_rounds_read_no_single_value_from_the_device(sampling):
    """Each such read has the host wait. A round's tokens are fetched by one `tolist`, which is not counted here."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    target, prompt = make_target("text"), random_ids(6)
    counts = []
    for length in (9, 40):
        draft = make_scripted_draft(target, follow(plain_greedy(target, prompt, length), lambda: 2))
        with Reads() as reads:
            output = draft.generate(prompt, target=target, max_new_tokens=length, **sampling, **DICT)
        counts.append((output.num_target_forwards, reads.count))
    assert counts[0][0] < counts[1][0] and counts[0][1] == counts[1][1]


def test_default_length_and_stop_come_from_the_targets_generation_config():
    target, prompt = make_target("qwen3"), random_ids(6)
    draft = make_draft(target)
    assert torch.equal(draft.generate(prompt, target=target), target.generate(prompt))
    target.generation_config.eos_token_id = plain_greedy(target, prompt, 9)[0, -1].item()
    target.generation_config.max_new_tokens = 15
    assert torch.equal(draft.generate(prompt, target=target), target.generate(prompt))
    given = GenerationConfig(max_new_tokens=4, do_sample=False)
    assert draft.generate(prompt, target=target, generation_config=given).shape[1] == 10


@pytest.mark.parametrize("max_new_tokens", [1, 5, 23])
def test_streamer_shows_what_is_returned(max_new_tokens):
    target, prompt = make_target("text"), random_ids(6)
    text = plain_greedy(target, prompt, 40)
    draft = make_scripted_draft(target, follow(text, iter([2, 7, 0, 5] * 9).__next__))
    pieces, ended = [], []

    class Collect(transformers.generation.streamers.BaseStreamer):
        def put(self, value):
            pieces.append(value.flatten().tolist())

        def end(self):
            ended.append(True)

    output = draft.generate(prompt, target=target, max_new_tokens=max_new_tokens, do_sample=False, streamer=Collect())
    assert sum(pieces, []) == output[0].tolist() and pieces[0] == prompt[0].tolist() and ended == [True]


def test_acceptance_figures_of_a_scripted_run():
    """Accepted 0, 3 and 7: acc_len 13/3 (SGLang 0.5.23's count), and 13 tokens in three rounds."""
    target, prompt = make_target("text"), random_ids(6)
    text = plain_greedy(target, prompt, 40)
    draft = make_scripted_draft(target, follow(text, iter([0, 3, 7]).__next__))
    output = draft.generate(prompt, target=target, max_new_tokens=14, do_sample=False, **DICT)
    assert output.acceptance_histogram.dtype == torch.int64
    assert output.acceptance_histogram.tolist() == [[1, 0, 0, 1, 0, 0, 0, 1]] and output.num_target_forwards == 3
    torch.testing.assert_close(output.acc_len, torch.tensor([13 / 3]))
    torch.testing.assert_close(output.tokens_per_round, torch.tensor([13 / 3]))
    assert isinstance(output.num_target_forwards, int)


def test_rounds_say_what_every_round_did():
    """Accepted 2, 0, 7 and 5, the last one cut to two tokens by the budget; positions, drafts and tokens by hand."""
    target, prompt = make_target("text"), random_ids(6)
    text = plain_greedy(target, prompt, 40)
    script = follow(text, iter([2, 0, 7, 5]).__next__)
    proposed = []
    draft = make_scripted_draft(target, lambda prefix_ids: proposed.append(script(prefix_ids)) or proposed[-1])
    output = draft.generate(prompt, target=target, max_new_tokens=15, do_sample=False, output_rounds=True, **DICT)
    rounds = output.rounds
    assert [step.accepted for step in rounds] == [2, 0, 7, 5]
    assert [step.position for step in rounds] == [6, 9, 10, 18]
    assert [step.tokens.shape for step in rounds] == [(1, 3), (1, 1), (1, 8), (1, 2)]
    assert [step.draft_tokens.tolist() for step in rounds] == [[tokens] for tokens in proposed]
    assert torch.equal(torch.cat([text[:, :7], *(step.tokens for step in rounds)], dim=1), output.sequences)
    for step in rounds:
        following = output.sequences[:, step.position + 1 :][:, : step.tokens.shape[1]]
        assert torch.equal(step.tokens, following)
    histogram = torch.bincount(torch.tensor([step.accepted for step in rounds]), minlength=8)
    assert torch.equal(histogram[None], output.acceptance_histogram)


def test_rounds_hold_the_confidence_of_the_block_that_was_drafted(kind):
    target, prompt = make_target(kind), random_ids(6)
    draft = make_draft(target)
    blocks, draw = [], draft.draft_block
    draft.draft_block = lambda *args, **kwargs: blocks.append(draw(*args, **kwargs)) or blocks[-1]
    options = {"max_new_tokens": 12, "do_sample": True, "output_rounds": True}
    output = draft.generate(prompt, target=target, **options, **DICT)
    assert len(output.rounds) == len(blocks) > 1
    for step, block in zip(output.rounds, blocks):
        assert step.confidence.shape == (1, 7) and step.confidence.dtype == torch.float32
        assert torch.equal(step.confidence, block.confidence) and torch.equal(step.draft_tokens, block.tokens)
    assert len({tuple(step.confidence[0].tolist()) for step in output.rounds}) == len(blocks)


def test_rounds_are_given_only_when_asked_for():
    target, prompt = make_target("qwen3"), random_ids(6)
    draft = make_draft(target, enable_confidence_head=False)
    options = {"target": target, "max_new_tokens": 9, "do_sample": False}
    assert draft.generate(prompt, **options, **DICT).rounds is None
    assert isinstance(draft.generate(prompt, **options, output_rounds=True), torch.Tensor)
    output = draft.generate(prompt, **options, output_rounds=True, **DICT)
    assert output.rounds and all(step.confidence is None for step in output.rounds)
    options["max_new_tokens"] = 1
    assert draft.generate(prompt, **options, output_rounds=True, **DICT).rounds == ()


# Refusals, and the target left as it was


def refused(message, prompt=None, target=None, **arguments):
    """Assert that `generate` raises a ValueError matching `message` before any forward of the target."""
    target = target or make_target("qwen3")
    forwards = Forwards(target)
    prompt = random_ids(4) if prompt is None else prompt
    with pytest.raises(ValueError, match=message):
        make_draft(make_target("qwen3")).generate(prompt, target=target, **arguments)
    assert forwards.widths == [] and count_hooks(target) == 1  # the recorder's own


def count_hooks(target) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_beams", 3),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("prompt_lookup_num_tokens", 3),
        ("cache_implementation", "static"),
        ("use_cache", False),
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("token_healing", True),
        ("length_penalty", 2.0),
        ("assistant_early_exit", 2),
        ("watermarking_config", transformers.WatermarkingConfig(greenlist_ratio=0.5)),
    ],
)
def test_unsupported_options_are_refused_by_name(name, value):
    refused(name, **{name: value})


DEFAULTS = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "repetition_penalty": 1.0,
    "early_stopping": False,
    "use_cache": True,
    "output_attentions": False,
    "remove_invalid_values": False,
    "assistant_model": None,
    "synced_gpus": False,
    "negative_prompt_ids": None,
    "cache_implementation": None,
}


@pytest.mark.parametrize("name, value", DEFAULTS.items())
def test_options_that_ask_for_nothing_pass(name, value):
    target, prompt = make_target("qwen3"), random_ids(4)
    output = make_draft(target).generate(prompt, target=target, max_new_tokens=3, do_sample=False, **{name: value})
    assert torch.equal(output, plain_greedy(target, prompt, 3))


def test_every_field_of_generation_config_is_honoured_inert_or_refused():
    fields = {name for name in GenerationConfig().__dict__ if not name.startswith("_")}
    assert INERT_FIELDS <= fields and len(HONOURED_FIELDS - fields) <= 1  # top_h came with transformers 5
    refusable = fields - HONOURED_FIELDS - INERT_FIELDS
    assert {
        "num_beams",
        "constraints",
        "force_words_ids",
        "num_assistant_tokens",
        "max_matching_ngram_size",
    } <= refusable


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("input_ids.*list", {"prompt": [[1, 2]]}),
        ("input_ids.*float32", {"prompt": torch.ones(1, 3)}),
        (r"input_ids.*\[3\]", {"prompt": torch.ones(3, dtype=torch.long)}),
        (r"input_ids.*\[1, 0\]", {"prompt": torch.ones(1, 0, dtype=torch.long)}),
        ("input_ids.*12", {"prompt": torch.tensor([[1, 12]])}),
        ("input_ids.*-1", {"prompt": torch.tensor([[1, -1]])}),
        ("attention_mask", {"attention_mask": torch.tensor([[1, 0, 1, 1]])}),
        ("attention_mask", {"attention_mask": torch.tensor([[1, 1, 1, 0]])}),
        ("attention_mask", {"attention_mask": torch.ones(1, 9)}),
        ("max_new_token`", {"max_new_token": 5}),
        ("assistant_model", {"assistant_model": object()}),
        ("past_key_values", {"past_key_values": object()}),
        ("inputs_embeds", {"inputs_embeds": torch.ones(1, 4, 32)}),
        ("max_length", {"max_length": 4}),
        ("max_new_tokens", {"max_new_tokens": -1}),
        ("temperature", {"do_sample": True, "temperature": -1.0}),
        ("pixel_values.*Qwen3ForCausalLM", {"pixel_values": torch.ones(1)}),
        ("tokenizer", {"stop_strings": ["x"]}),
        ("inputs.*input_ids|input_ids.*inputs", {"inputs": torch.tensor([[1, 2]])}),
        ("attention_mask.*list", {"attention_mask": [[1, 1, 1, 1]]}),
        ("generation_config.*dict", {"generation_config": {"max_new_tokens": 3}}),
        ("streamer.*bool", {"streamer": True}),
        ("logits_processor.*Repetition", {"logits_processor": transformers.RepetitionPenaltyLogitsProcessor(2.0)}),
        ("logits_processor.*list", {"logits_processor": [3]}),
        ("stopping_criteria.*MaxTime", {"stopping_criteria": transformers.MaxTimeCriteria(3.0)}),
        ("prefix_allowed_tokens_fn.*list", {"prefix_allowed_tokens_fn": [1]}),
        ("max_new_tokens.*5.5", {"max_new_tokens": 5.5}),
        ("prefill_chunk_size.*-1", {"prefill_chunk_size": -1}),
        ("prefill_chunk_size.*0", {"prefill_chunk_size": 0}),
        ("suppress_tokens.*'a'", {"suppress_tokens": "a"}),
        ("suppress_tokens.*12", {"suppress_tokens": torch.tensor([12])}),
        ("max_time.*'a'", {"max_time": "a"}),
        ("eos_token_id.*1.5", {"eos_token_id": 1.5}),
        ("num_return_sequences.*0", {"num_return_sequences": 0}),
        ("num_return_sequences.*1.5", {"num_return_sequences": 1.5}),
        ("max_new_tokens.*True", {"max_new_tokens": True}),
        ("draft_sampling.*'best'.*'sample' or 'greedy'", {"draft_sampling": "best"}),
        ("verification.*None.*'token' or 'block'", {"verification": None}),
        ("generator.*int", {"generator": 3}),
        ("forced_eos_token_id.*99", {"forced_eos_token_id": 99}),
        ("suppress_tokens.*99", {"suppress_tokens": [1, 99]}),
        ("output_rounds.*'yes'", {"output_rounds": "yes", **DICT}),
        ("output_rounds.*None", {"output_rounds": None}),
    ],
)
def test_bad_arguments_are_refused_by_name(message, arguments):
    refused(message, **arguments)


def test_image_arguments_come_together():
    wrapper = make_target("wrapper")
    refused("grid_thws.*without.*pixel_values", target=wrapper, grid_thws=torch.tensor([[1, 2, 2]]))
    refused("pixel_values.*without.*grid_thws", target=make_target("wrapper"), pixel_values=torch.ones(4, 3, 14, 14))
    refused("pixel_values.*list", target=make_target("wrapper"), pixel_values=[1])


def test_a_call_without_target_or_prompt_is_refused():
    draft = make_draft(make_target("qwen3"))
    with pytest.raises(ValueError, match="`target` is not given"):
        draft.generate(random_ids(3))
    with pytest.raises(ValueError, match="Neither of `input_ids` and `inputs`"):
        draft.generate(target=make_target("qwen3"))
    target, prompt = make_target("qwen3"), random_ids(3)
    by_other_name = draft.generate(inputs=prompt, target=target, max_new_tokens=5, do_sample=False)
    assert torch.equal(by_other_name, plain_greedy(target, prompt, 5))


def test_a_forward_in_another_thread_changes_nothing(kind):
    """Hooks belong to the thread that generates: what others run on the model in between is not caught."""
    target, prompt = make_target(kind), random_ids(5)
    expected = plain_greedy(target, prompt, 40)
    draft = make_draft(target)
    generating, backbone = threading.get_ident(), locate_text_model(target)[0]

    def run_elsewhere(*_):
        if threading.get_ident() == generating:
            other = threading.Thread(target=lambda: backbone(input_ids=random_ids(8), use_cache=False))
            other.start()
            other.join()

    backbone.norm.register_forward_pre_hook(run_elsewhere)
    assert torch.equal(draft.generate(prompt, target=target, max_new_tokens=40, do_sample=False), expected)


def test_targets_that_do_not_fit_are_refused():
    refused("vocab_size.*12.*14", target=make_target("qwen3", vocab_size=14))
    refused("hidden_size.*32.*48", target=make_target("qwen3", hidden_size=48))
    refused("num_target_layers.*5.*6", target=make_target("qwen3", num_hidden_layers=6))
    refused("AutoModelForCausalLM", target=make_target("qwen3").model)
    refused("training mode", target=make_target("qwen3").train())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["draft", "target", "streamer"])
def test_target_is_as_before_after_an_interruption(kind, error, where):
    target, prompt = make_target(kind), random_ids(6)
    parameters = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    config = target.config.to_dict()
    text = plain_greedy(target, prompt, 20)
    draft = make_scripted_draft(target, follow(text, lambda: 2))
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) == 6:
            raise error("in the middle")

    class Fail(transformers.generation.streamers.BaseStreamer):
        put = fail

        def end(self):
            pass

    own_hook = None
    if where == "draft":
        draft.watch = fail
    if where == "target":
        own_hook = locate_text_model(target)[0].layers[3].register_forward_pre_hook(fail)
    streamer = Fail() if where == "streamer" else None
    with pytest.raises(error, match="in the middle"):
        draft.generate(prompt, target=target, max_new_tokens=60, do_sample=False, streamer=streamer)
    if own_hook is not None:
        own_hook.remove()
    assert count_hooks(target) == 0 and target.config.to_dict() == config
    assert all(torch.equal(tensor, parameters[name]) for name, tensor in target.state_dict().items())
    draft.watch = None
    assert torch.equal(draft.generate(prompt, target=target, max_new_tokens=20, do_sample=False), text)


def test_nothing_of_the_callers_is_changed(kind):
    target, prompt = make_target(kind), random_ids(6)
    draft = make_draft(target)
    given = GenerationConfig(max_new_tokens=6, do_sample=False)
    own = getattr(target, "generation_config", None)
    before = given.to_dict(), own and own.to_dict(), prompt.clone(), draft.config.to_dict()
    first = draft.generate(prompt, target=target, generation_config=given)
    assert (given.to_dict(), own and own.to_dict()) == before[:2] and draft.config.to_dict() == before[3]
    assert torch.equal(prompt, before[2])
    assert torch.equal(draft.generate(prompt, target=target, generation_config=given), first)
