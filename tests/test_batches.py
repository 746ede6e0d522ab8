"""Several rows at once, and several turns: every row comes out as if it ran alone, and nothing is held twice."""

import asyncio
import itertools
import random
import sys
import threading

import pytest
import torch
import transformers
from conftest import (
    Forwards,
    make_batch_draft,
    make_draft,
    make_target,
    pad_left,
    plain_greedy,
    random_ids,
    tensors_of,
)
from dspark.target_kimi_k3 import VerifiableTarget, reserved
from transformers import LogitsProcessorList, StoppingCriteriaList

DICT = {"return_dict_in_generate": True, "do_sample": False, "pad_token_id": 10}


def batch_of(target, lengths, seed=0):
    """Prompts of the given lengths, as rows and as a padded batch."""
    torch.manual_seed(seed)
    rows = [random_ids(length) for length in lengths]
    return rows, *pad_left(rows)


def scripted(target, texts, places):
    """A draft that is right about `texts` up to the next of `places` (7: everywhere), row by row."""
    draft = make_batch_draft(target)
    draft.rights, draft.script = [text[0].tolist() for text in texts], places
    return draft


def places(seed=0):
    choose = random.Random(seed)
    return (choose.randint(0, 7) for _ in itertools.count())


# Rows


@pytest.mark.parametrize("batch", [2, 5, 16])
def test_each_row_of_a_batch_equals_the_row_alone(kind, batch):
    target = make_target(kind)
    choose = random.Random(batch)
    rows, ids, mask = batch_of(target, [choose.randint(1, 60) for _ in range(batch)])
    texts = [plain_greedy(target, row, 40) for row in rows]
    for draft in (make_draft(target), scripted(target, texts, places(batch))):
        forwards = Forwards(target)
        output = draft.generate(ids, target=target, attention_mask=mask, max_new_tokens=32, **DICT)
        for row, text, length in zip(output.sequences, texts, map(len, (r[0] for r in rows))):
            assert torch.equal(row[ids.shape[1] :], text[0, length : length + 32])
        assert torch.equal(output.sequences[:, : ids.shape[1]], ids)
        assert forwards.widths == [ids.shape[1]] + [8] * output.num_target_forwards
        assert output.num_target_forwards == output.acceptance_histogram.sum(dim=1).max()
        assert output.acc_len.shape == output.tokens_per_round.shape == (batch,)
        forwards.remove()


def test_the_state_of_each_row_equals_a_fresh_prefill_of_it(kind):
    """After every round: what the slots hold, the recurrent states, and the draft's context."""
    target = make_target(kind)
    rows, ids, mask = batch_of(target, [3, 11, 6])
    texts = [plain_greedy(target, row, 80) for row in rows]
    draft = scripted(target, texts, places())
    rounds = []

    def compare(draft, texts, cache, verifiable):
        rounds.append(1)
        assert cache.lengths == verifiable.lengths == [text.shape[1] - 1 for text in texts]
        for row, text in enumerate(texts):
            fresh = VerifiableTarget(target, draft.config.target_layer_ids)
            features = fresh.prefill(text[:, :-1]).features
            context = draft.new_cache()
            draft.write_context(features, torch.arange(text.shape[1] - 1)[None], context)
            held = verifiable.slots.mask[row].bool()
            expected = tensors_of(fresh.cache)
            for name, tensor in tensors_of(verifiable.cache).items():
                mine = tensor[row : row + 1]
                mine = mine[:, :, held] if "key" in name or "value" in name else mine
                torch.testing.assert_close(mine, expected[name], atol=1e-4, rtol=1e-4)
            for mine, right in zip(cache.keys + cache.values, context.keys + context.values):
                size = text.shape[1] - 1
                torch.testing.assert_close(mine[row, :, :size], right[0, :, :size], atol=1e-4, rtol=1e-4)

    block_pass = draft.draft_block

    def watched(anchor_ids, cache, verifiable, texts, *rest):
        if all(text is not None for text in texts.texts):
            compare(draft, texts.texts, cache, verifiable)
        return block_pass(anchor_ids, cache, verifiable, texts, *rest)

    draft.draft_block = watched
    draft.generate(ids, target=target, attention_mask=mask, max_new_tokens=60, **DICT)
    assert len(rounds) > 8


def test_less_than_a_quarter_of_the_slots_is_wasted(kind, monkeypatch):
    """One row accepts everything and the other nothing, so nearly all that the second leaves open is a hole."""
    target = make_target(kind)
    rows, ids, mask = batch_of(target, [4, 4])
    texts = [plain_greedy(target, row, 200) for row in rows]
    draft = scripted(target, texts, itertools.cycle([7, 0]))
    widest, commit = [], VerifiableTarget.commit

    def watched(self, kept, width):
        commit(self, kept, width)
        assert set(self.state.store.attention_lengths()) == {self.slots.count}
        assert self.slots.mask.sum(dim=1).tolist() == self.slots.lengths
        widest.append(self.slots.count - max(self.slots.lengths))
        assert 4 * widest[-1] < self.slots.count

    monkeypatch.setattr(VerifiableTarget, "commit", watched)
    draft.script = itertools.chain.from_iterable([[7, 0]] * 6 + [[0, 7]] * 40)
    output = draft.generate(ids, target=target, attention_mask=mask, max_new_tokens=80, **DICT)
    for row, text in zip(output.sequences, texts):
        assert torch.equal(row, text[0, :84])
    assert len(widest) > 20


def test_rows_end_at_different_times(kind):
    target = make_target(kind)
    rows, ids, mask = batch_of(target, [5, 2, 9])
    texts = [plain_greedy(target, row, 30) for row in rows]
    end = texts[1][0, 2 + 3].item()
    draft = scripted(target, texts, places())
    output = draft.generate(ids, target=target, attention_mask=mask, max_new_tokens=30, eos_token_id=end, **DICT)
    width = ids.shape[1]
    for row, (text, length) in enumerate(zip(texts, (5, 2, 9))):
        new = text[0, length:].tolist()
        new = new[: new.index(end) + 1] if end in new else new
        got = output.sequences[row, width:].tolist()
        assert got == new + [10] * (len(got) - len(new))
        rounds = output.acceptance_histogram[row].sum().item()
        assert output.tokens_per_round[row].item() == pytest.approx(
            (len(new) - 1) / rounds if rounds else float("nan"), nan_ok=True
        )
    assert output.sequences.shape[1] - width == max(
        (t[0, n:].tolist() + [end]).index(end) + 1 if end in t[0, n:] else 30 for t, n in zip(texts, (5, 2, 9))
    )


def test_lengths_count_padding_as_transformers_does():
    target = make_target("qwen3")
    _, ids, mask = batch_of(target, [3, 8])
    settings = {"attention_mask": mask, "max_length": 20, "min_length": 12, "eos_token_id": 4, **DICT}
    expected = target.generate(ids, **settings).sequences
    assert torch.equal(make_draft(target).generate(ids, target=target, **settings).sequences, expected)


def test_several_answers_to_a_prompt():
    target = make_target("text")
    draft = make_draft(target)
    ids, mask = pad_left([random_ids(4), random_ids(7)])
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": True, "pad_token_id": 10}
    output = draft.generate(ids, target=target, num_return_sequences=3, **options)
    assert output.shape == (6, 16) and torch.equal(output[:, :7], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in output[:3].tolist()}) > 1


def test_a_mask_is_read_off_the_pad_tokens_as_transformers_does():
    target = make_target("qwen3")
    rows, ids, _ = batch_of(target, [3, 8])
    output = make_draft(target).generate(ids, target=target, max_new_tokens=9, **DICT)
    for row, text in zip(output.sequences, rows):
        assert torch.equal(row[8:], plain_greedy(target, text, 9)[0, text.shape[1] :])


@pytest.mark.parametrize("mask", [[[1, 1, 1, 0]], [[0, 1, 0, 1]], [[0, 0, 0, 0]], [[1, 1, 1]]])
def test_padding_elsewhere_than_on_the_left_is_refused(mask):
    target = make_target("text")
    forwards = Forwards(target)
    with pytest.raises(ValueError, match="attention_mask"):
        make_draft(target).generate(random_ids(4), target=target, attention_mask=torch.tensor(mask), max_new_tokens=3)
    assert not forwards.widths


def test_pieces_of_padded_prompts(kind):
    """The first piece is as long as the padding asks for."""
    target = make_target(kind)
    rows, ids, mask = batch_of(target, [4, 30, 17])
    forwards = Forwards(target)
    output = make_draft(target).generate(
        ids, target=target, attention_mask=mask, max_new_tokens=9, prefill_chunk_size=8, **DICT
    )
    assert forwards.widths[:2] == [27, 3]
    for row, text in zip(output.sequences, rows):
        assert torch.equal(row[30:], plain_greedy(target, text, 9)[0, text.shape[1] :])


# Processors and criteria, row by row


PROCESSED = [
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[3], [1, 2]]},
    {"min_new_tokens": 9, "eos_token_id": 5},
    {"encoder_repetition_penalty": 2.0},
    {"forced_eos_token_id": 7},
    {"sequence_bias": [[[2], 3.0], [[1, 4], -4.0]]},
    {"suppress_tokens": [0, 1], "begin_suppress_tokens": [2]},
]


@pytest.mark.parametrize("options", PROCESSED, ids=str)
def test_processors_see_each_row_by_itself(options):
    target = make_target("qwen3")
    rows, ids, mask = batch_of(target, [3, 12, 7])
    common = {"max_new_tokens": 20, **DICT, **options}
    texts = [target.generate(row, attention_mask=torch.ones_like(row), **common).sequences for row in rows]
    draft = scripted(target, texts, places())
    output = draft.generate(ids, target=target, attention_mask=mask, **common)
    for row, text, prompt in zip(output.sequences, texts, rows):
        new = text[0, prompt.shape[1] :]
        assert torch.equal(row[12 : 12 + len(new)], new) and (row[12 + len(new) :] == 10).all()


def test_a_constraint_is_told_the_number_of_its_row():
    target = make_target("text")
    _, ids, mask = batch_of(target, [3, 5])
    plans = [[1, 2, 3, 4], [6, 5, 4, 3]]
    lengths = [3, 5]
    output = make_draft(target).generate(
        ids,
        target=target,
        attention_mask=mask,
        max_new_tokens=4,
        prefix_allowed_tokens_fn=lambda row, text: [plans[row][len(text) - lengths[row]]],
        **DICT,
    )
    assert output.sequences[:, 5:].tolist() == plans


def test_own_processors_and_criteria_get_one_row_at_a_time():
    target = make_target("text")
    rows, ids, mask = batch_of(target, [3, 5])
    seen = {"processor": set(), "criterion": set()}

    def processor(input_ids, scores):
        seen["processor"].add((input_ids.shape[0], scores.shape[0]))
        return scores

    class Criterion(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen["criterion"].add(tuple(input_ids[0, :3].tolist()))
            return torch.tensor([input_ids.shape[1] == 12])

    output = make_draft(target).generate(
        ids,
        target=target,
        attention_mask=mask,
        max_new_tokens=20,
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=StoppingCriteriaList([Criterion()]),
        **DICT,
    )
    assert seen["processor"] == {(1, 1)}
    assert seen["criterion"] == {tuple(row[0, :3].tolist()) for row in rows}
    for row, text, new in zip(output.sequences, rows, (9, 7)):
        assert torch.equal(row[5 : 5 + new], plain_greedy(target, text, new)[0, text.shape[1] :])
        assert (row[5 + new :] == 10).all()


def test_scores_of_rows_that_have_ended_are_zero():
    target = make_target("qwen3")
    rows, ids, mask = batch_of(target, [3, 6])
    end = plain_greedy(target, rows[0], 2)[0, -1].item()
    output = make_draft(target).generate(
        ids,
        target=target,
        attention_mask=mask,
        max_new_tokens=12,
        eos_token_id=end,
        output_scores=True,
        output_logits=True,
        **DICT,
    )
    steps = output.sequences.shape[1] - 6
    assert len(output.scores) == len(output.logits) == steps and output.scores[0].shape == (2, 12)
    for step in range(steps):
        for row in range(2):
            token = output.sequences[row, 6 + step].item()
            if token == 10:
                assert (output.scores[step][row] == 0).all()
            else:
                assert output.scores[step][row].argmax().item() == token


def test_what_works_with_one_row_only_is_refused_for_more():
    target = make_target("wrapper")
    draft, ids = make_draft(target), random_ids(4).repeat(2, 1)
    with pytest.raises(ValueError, match="streamer"):
        draft.generate(ids, target=target, max_new_tokens=4, streamer=transformers.TextStreamer(None))
    images = {"pixel_values": torch.zeros(4, 3, 14, 14), "grid_thws": torch.tensor([[1, 2, 2]])}
    with pytest.raises(ValueError, match="pixel_values.*2 rows"):
        draft.generate(ids, target=target, max_new_tokens=4, **images)
    target = make_target("qwen3")
    target.generation_config.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id"):
        make_draft(target).generate(ids, target=target, max_new_tokens=4)


def test_a_padded_prompt_with_images_is_refused():
    target = make_target("wrapper")
    ids, mask = pad_left([torch.tensor([[1, 2, target.config.media_placeholder_token_id, 3]]), random_ids(8)])
    images = {"pixel_values": torch.randn(16, 3, 14, 14), "grid_thws": torch.tensor([[1, 4, 4]])}
    with pytest.raises(ValueError, match="padded prompt"):
        make_draft(target).generate(ids[:1], target=target, attention_mask=mask[:1], max_new_tokens=3, **images)


def test_a_constraint_with_several_answers_is_told_the_prompt():
    target = make_target("text")
    ids, mask = pad_left([random_ids(2), random_ids(6)])
    seen = set()

    def allow(prompt, text):
        seen.add(prompt)
        return [prompt, prompt + 3]

    output = make_draft(target).generate(
        ids,
        target=target,
        attention_mask=mask,
        max_new_tokens=4,
        do_sample=True,
        num_return_sequences=2,
        pad_token_id=10,
        prefix_allowed_tokens_fn=allow,
    )
    for row, new in enumerate(output[:, 6:].tolist()):
        assert set(new) <= {row // 2, row // 2 + 3}
    assert seen == {0, 1}


def test_the_budget_of_padded_rows_holds_beyond_the_targets_positions():
    target = make_target("qwen3", max_position_embeddings=16)
    rows, ids, mask = batch_of(target, [3, 8])
    options = {"max_new_tokens": 20, "forced_eos_token_id": 7, **DICT}
    output = make_draft(target).generate(ids, target=target, attention_mask=mask, **options)
    assert output.sequences.shape == (2, 28)
    for row, text in zip(output.sequences, rows):
        alone = target.generate(text, attention_mask=torch.ones_like(text), **options).sequences
        assert torch.equal(row[8:], alone[0, text.shape[1] :])


# Turns


@pytest.mark.parametrize("batch", [1, 3])
def test_going_on_equals_a_fresh_run(kind, batch):
    target = make_target(kind)
    draft = make_draft(target)
    rows, state = [random_ids(length) for length in (5, 11, 3)[:batch]], None
    forwards = Forwards(target)
    for turn in range(3):
        ids, mask = pad_left(rows)
        forwards.widths.clear()
        output = draft.generate(
            ids, target=target, attention_mask=mask, max_new_tokens=13, past_key_values=state, **DICT
        )
        if turn:
            assert forwards.widths[0] == max(1 + length for length in (4, 9, 1)[:batch])
        state = output.cache
        for number, row in enumerate(rows):
            text = plain_greedy(target, row, 13)
            assert torch.equal(output.sequences[number, ids.shape[1] :], text[0, row.shape[1] :]), f"turn {turn}"
            rows[number] = torch.cat([text, random_ids((4, 9, 1)[number])], dim=1)
    forwards.remove()


def test_a_long_turn_is_prefilled_in_pieces(kind):
    target, prompt = make_target(kind), random_ids(5)
    draft = make_draft(target)
    output = draft.generate(prompt, target=target, max_new_tokens=6, **DICT)
    longer = torch.cat([output.sequences, random_ids(20)], dim=1)
    forwards = Forwards(target)
    mask = torch.ones_like(longer)
    again = draft.generate(
        longer,
        target=target,
        attention_mask=mask,
        max_new_tokens=6,
        cache=output.cache,
        prefill_chunk_size=8,
        **DICT,
    )
    assert forwards.widths[:3] == [8, 8, 5]
    assert torch.equal(again.sequences, plain_greedy(target, longer, 6))


def test_a_state_that_does_not_fit_is_refused():
    target, prompt = make_target("text"), random_ids(5)
    draft = make_draft(target)
    output = draft.generate(prompt, target=target, max_new_tokens=6, **DICT)
    longer = torch.cat([output.sequences, random_ids(2)], dim=1)
    other = longer.clone()
    other[0, 2] = (other[0, 2] + 1) % 7
    forwards = Forwards(target)

    def refused(message, ids=longer, draft=draft, target=target, **options):
        with pytest.raises(ValueError, match=message):
            draft.generate(ids, target=target, max_new_tokens=3, **{"past_key_values": output.cache, **options})
        assert not forwards.widths

    refused("row 0.*does not go on", ids=other)
    refused("row 0.*does not go on", ids=prompt)
    refused("row 0.*does not go on", ids=longer[:, :10])
    refused("2 rows|1 rows", ids=longer.repeat(2, 1))
    refused("another draft or target", draft=make_draft(target))
    refused("another draft or target", target=make_target("text"))
    refused("both given", cache=output.cache)
    refused("DynamicCache", past_key_values=transformers.DynamicCache())
    again = draft.generate(longer, target=target, max_new_tokens=3, past_key_values=output.cache, **DICT)
    assert torch.equal(again.sequences, plain_greedy(target, longer, 3))
    forwards.widths.clear()
    refused("used up")


def test_a_failed_turn_uses_its_state_up_and_leaves_the_target_alone():
    target, prompt = make_target("text"), random_ids(5)
    draft = make_draft(target)
    output = draft.generate(prompt, target=target, max_new_tokens=6, **DICT)
    longer = torch.cat([output.sequences, random_ids(2)], dim=1)

    def fail(input_ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draft.generate(
            longer,
            target=target,
            max_new_tokens=6,
            cache=output.cache,
            logits_processor=LogitsProcessorList([fail]),
        )
    with pytest.raises(ValueError, match="used up"):
        draft.generate(longer, target=target, max_new_tokens=6, cache=output.cache)
    assert torch.equal(
        draft.generate(longer, target=target, max_new_tokens=6, do_sample=False), plain_greedy(target, longer, 6)
    )


def test_images_belong_to_the_first_turn():
    target = make_target("wrapper")
    draft = make_draft(target)
    placeholder = target.config.media_placeholder_token_id
    prompt = torch.tensor([[1, 2, placeholder, 3]])
    images = {"pixel_values": torch.randn(16, 3, 14, 14), "grid_thws": torch.tensor([[1, 4, 4]])}
    output = draft.generate(prompt, target=target, max_new_tokens=2, **images, **DICT)
    assert (output.sequences == placeholder).sum() == 1
    longer = torch.cat([output.sequences, random_ids(3)], dim=1)
    with pytest.raises(ValueError, match="first turn"):
        draft.generate(longer, target=target, max_new_tokens=9, cache=output.cache, **images, **DICT)
    again = draft.generate(longer, target=target, max_new_tokens=9, cache=output.cache, **DICT)
    assert torch.equal(again.sequences, plain_greedy(target, longer, 9, **images))


@pytest.mark.parametrize("inside", [(True, False), (False, True, False)], ids=str)
def test_a_state_made_in_inference_mode_goes_on_there_only(kind, inside):
    target, text = make_target(kind), random_ids(5)
    draft, state = make_draft(target), None
    for inference in inside[:-1]:
        options = {"attention_mask": torch.ones_like(text), "max_new_tokens": 9, "cache": state, **DICT}
        with torch.inference_mode(inference):
            output = draft.generate(text, target=target, **options)
        state, text = output.cache, torch.cat([output.sequences.clone(), random_ids(2)], dim=1)
    options = {"attention_mask": torch.ones_like(text), "max_new_tokens": 9, "cache": state, **DICT}
    with pytest.raises(ValueError, match="inference_mode"):
        draft.generate(text, target=target, **options)
    with torch.inference_mode():  # it has not been used up
        output = draft.generate(text, target=target, **options)
    assert torch.equal(output.sequences, plain_greedy(target, text, 9))


# Two users


def test_a_second_call_on_a_busy_target_is_refused():
    target, prompt = make_target("text"), random_ids(5)
    draft, inside, go_on = make_draft(target), threading.Event(), threading.Event()
    results = []

    def wait(input_ids, scores):
        inside.set()
        assert go_on.wait(20)
        return scores

    def first():
        options = {"max_new_tokens": 12, "do_sample": False, "logits_processor": LogitsProcessorList([wait])}
        results.append(draft.generate(prompt, target=target, **options))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(RuntimeError, match="in use"):
        draft.generate(prompt, target=target, max_new_tokens=3)
    go_on.set()
    thread.join(60)
    assert torch.equal(results[0], plain_greedy(target, prompt, 12))
    assert torch.equal(draft.generate(prompt, target=target, max_new_tokens=12, do_sample=False), results[0])


def test_a_nested_call_is_refused():
    target, prompt = make_target("qwen3"), random_ids(5)
    draft = make_draft(target)

    def nested(input_ids, scores):
        with pytest.raises(RuntimeError, match="in use"):
            draft.generate(prompt, target=target, max_new_tokens=3)
        return scores

    options = {"max_new_tokens": 9, "do_sample": False, "logits_processor": LogitsProcessorList([nested])}
    assert torch.equal(draft.generate(prompt, target=target, **options), plain_greedy(target, prompt, 9))


def test_an_interruption_never_leaves_a_target_reserved():
    """At every line that a reservation runs through."""
    model, uninterrupted = torch.nn.Linear(1, 1), 0

    def interrupt_at(place):
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            if frame.f_code.co_name != "reserved":
                return None
            count += event == "line"
            if count > place:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        return trace

    for place in range(40):
        sys.settrace(interrupt_at(place))
        try:
            with reserved(model):
                pass
            uninterrupted += 1
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        with reserved(model):
            pass
    assert 0 < uninterrupted < 36


def test_two_targets_in_two_threads(kind):
    """One draft each; the same draft for both is fine as well, for it keeps nothing between calls."""
    targets = [make_target(kind, seed=seed) for seed in (0, 3)]
    draft, prompt = make_draft(targets[0]), random_ids(6)
    expected = [plain_greedy(target, prompt, 40) for target in targets]
    results = [None, None]

    def run(number):
        results[number] = draft.generate(prompt, target=targets[number], max_new_tokens=40, do_sample=False)

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(torch.equal(result, text) for result, text in zip(results, expected))


# Chance


@pytest.mark.parametrize("options", [{}, {"verification": "block"}, {"draft_sampling": "greedy"}], ids=str)
def test_a_generator_or_the_global_seed_repeats_a_run(options):
    target, prompt = make_target("text"), random_ids(5)
    draft = make_draft(target)
    sample = {"target": target, "max_new_tokens": 30, "do_sample": True, "top_k": 0, **options}
    before = torch.get_rng_state()
    drawn = [draft.generate(prompt, generator=torch.Generator().manual_seed(seed), **sample) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before), "the global state was drawn from"
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(draft.generate(prompt, **sample))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


# Where the models are


def test_a_compiled_draft_compiles_once(kind):
    """One graph for the block pass, whatever the length of the context, and one for drawing its tokens."""
    target, prompt = make_target(kind), random_ids(6)
    draft = make_draft(target)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    draft.compile(backend=backend, dynamic=True)
    text = plain_greedy(target, prompt, 60)
    assert torch.equal(draft.generate(prompt, target=target, max_new_tokens=20, do_sample=False), text[:, :26])
    compiled = len(graphs)
    assert torch.equal(draft.generate(prompt, target=target, max_new_tokens=60, do_sample=False), text)
    assert compiled == len(graphs) == 2


@pytest.mark.parametrize("part", ["", "model", "model.layers.1", "model.layers.1.self_attn", "lm_head"])
def test_a_compiled_target_is_refused(part):
    target = make_target("text")
    draft = make_draft(target)
    target.get_submodule(part).compile(backend="eager")
    with pytest.raises(ValueError, match="compiled"):
        draft.generate(random_ids(4), target=target, max_new_tokens=3)
    with pytest.raises(ValueError, match="compiled"):
        draft.generate(random_ids(4), target=torch.compile(make_target("text"), backend="eager"), max_new_tokens=3)


class Packed(torch.nn.Module):
    """A linear layer whose weight has another name, as quantisation leaves it."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("packed", linear.weight.detach().clone())

    def forward(self, inputs):
        return inputs @ self.packed.T


class PackedEmbedding(Packed):
    def forward(self, inputs):
        return self.packed[inputs]


def pack(module):
    """Replace every projection, the head and the embedding; what the small Kimi K3 itself reads by `weight` stays."""
    for name, child in module.named_children():
        if name in ("lm_head", "embed_tokens") or (name.endswith("_proj") and "res_" not in name):
            setattr(module, name, PackedEmbedding(child) if name == "embed_tokens" else Packed(child))
        else:
            pack(child)


def test_a_target_with_packed_layers(kind):
    target, prompt = make_target(kind), random_ids(6)
    draft = make_draft(target)
    expected = plain_greedy(target, prompt, 30)
    pack(target)
    assert torch.equal(draft.generate(prompt, target=target, max_new_tokens=30, do_sample=False), expected)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_draft_and_target_of_different_precision(kind, dtypes):
    """What the draft computes in changes how much is accepted, and no token of a float32 target."""
    target, prompt = make_target(kind), random_ids(6)
    draft = make_draft(target).to(dtypes[1])
    target.to(dtypes[0])
    output = draft.generate(prompt, target=target, max_new_tokens=30, do_sample=False)
    assert output.shape == (1, 36)
    if dtypes[0] == torch.float32:
        assert torch.equal(output, plain_greedy(target, prompt, 30))


# Streaming


class Words:
    """A tokenizer of sorts: each token is its number and a space."""

    def decode(self, ids, **kwargs):
        return "".join(f"{int(token)} " for token in ids)


def test_streamers_of_transformers_show_what_is_returned(capsys):
    target, prompt = make_target("text"), random_ids(6)
    draft = make_draft(target)
    options = {"target": target, "max_new_tokens": 25, "do_sample": False}
    expected = Words().decode(plain_greedy(target, prompt, 25)[0, 6:])
    draft.generate(prompt, streamer=transformers.TextStreamer(Words(), skip_prompt=True), **options)
    assert capsys.readouterr().out.strip() == expected.strip()

    streamer = transformers.TextIteratorStreamer(Words(), skip_prompt=True)
    thread = threading.Thread(target=draft.generate, args=(prompt,), kwargs={"streamer": streamer, **options})
    thread.start()
    assert "".join(streamer).strip() == expected.strip()
    thread.join(60)

    async def follow_along():
        streamer = transformers.AsyncTextIteratorStreamer(Words(), skip_prompt=True)
        thread = threading.Thread(target=draft.generate, args=(prompt,), kwargs={"streamer": streamer, **options})
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join(60)
        return "".join(pieces)

    assert asyncio.run(follow_along()).strip() == expected.strip()
