"""Random targets, drafts, batches, widths, stops, turns and interruptions against a plain argmax loop (hypothesis).

2,000 cases; `DSPARK_CASES=20000 python -m pytest tests/test_properties.py` tries more.
"""

import os
from functools import cache

import pytest
import torch
from conftest import TARGET_KINDS, make_batch_draft, make_target, pad_left, plain_greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("DSPARK_CASES", 2000))
VOCABULARY = 12
PROMPTS = [[1], [2, 5], [0, 3, 6], [4, 4, 1, 2], [6, 5, 4, 3, 2, 1, 0], [3, 1, 4, 1, 5, 2, 6, 5, 3, 5], [2] * 17]
PLAIN_LENGTH = 40  # tokens written of each prompt once, which all cases are read off
LAYERS = {"num_hidden_layers": 3}
COSTS = st.lists(st.floats(0.1, 10), min_size=8, max_size=8)  # of rounds by width
KIMI_LAYERS = {"kda_layers": [1, 2], "full_attn_layers": [3]}


class Interruption(Exception):
    pass


@cache
def pair(kind, seed):
    """A target of three layers, two of them recurrent where the kind has any, and a draft."""
    changes = dict(LAYERS)
    if kind in ("text", "wrapper"):
        linear = {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
        changes["linear_attn_config"] = {**linear, **KIMI_LAYERS}
    if kind == "native":
        changes["layer_types"] = ["linear_attention"] * 2 + ["full_attention"]
    target = make_target(kind, seed, **changes)
    return target, make_batch_draft(target, seed + 1, target_layer_ids=[0, 2])


@cache
def plain_text(kind, seed, prompt):
    """Prompt and what the target alone writes after it, as a tuple of ids."""
    with torch.no_grad():
        return tuple(plain_greedy(pair(kind, seed)[0], torch.tensor([prompt]), PLAIN_LENGTH)[0].tolist())


def cut(text, prompt_length, max_new_tokens, ends):
    """What is left of a plain text under a budget and end tokens."""
    text = text[: prompt_length + max_new_tokens]
    stops = [place + 1 for place in range(prompt_length, len(text)) if text[place] in ends]
    return list(text[: stops[0]] if stops else text)


@st.composite
def cases(draw):
    rows = draw(st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4))
    return {
        "seed": draw(st.integers(0, 2)),
        "prompts": [tuple(prompt) for prompt in rows],
        "budgets": draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)),  # of each turn
        "ends": draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=2)),
        "script": draw(st.none() | st.lists(st.integers(0, 7), min_size=1, max_size=6)),
        "widths": draw(
            st.lists(  # of each turn, as the budgets
                st.fixed_dictionaries({"verify_width": st.integers(1, 8) | st.just("auto")})
                | st.fixed_dictionaries({"verify_width": st.just("auto"), "verify_costs": COSTS})
                | st.fixed_dictionaries(
                    {"confidence_threshold": st.floats(0, 1)}, optional={"verify_width": st.integers(1, 8)}
                )
                | st.just({}),
                min_size=3,
                max_size=3,
            )
        ),
        "chunk": draw(st.none() | st.integers(1, 9)),
        "interrupted": draw(st.none() | st.integers(0, 4)),
        "interruption": draw(st.sampled_from([Interruption, KeyboardInterrupt])),
        "where": draw(st.sampled_from(["target", "processor", "criterion", "streamer"])),
    }


def hooks_of(target):
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules()]


def repeat(values):
    while True:
        yield from values


@pytest.mark.parametrize("kind", TARGET_KINDS)
@settings(
    max_examples=CASES // len(TARGET_KINDS),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
def test_any_case_equals_the_plain_loop(kind, case):
    target, draft = pair(kind, case["seed"])
    texts = [plain_text(kind, case["seed"], prompt) for prompt in case["prompts"]]
    draft.rights = texts
    draft.script = None if case["script"] is None else repeat(case["script"])
    before = hooks_of(target)
    if case["interrupted"] is not None:
        interrupt(target, draft, case)
    lengths, state = [len(prompt) for prompt in case["prompts"]], None
    for turn, budget in enumerate(case["budgets"]):
        ids, mask = pad_left([torch.tensor([text[:length]]) for text, length in zip(texts, lengths)])
        output = draft.generate(
            ids,
            target=target,
            attention_mask=mask,
            max_new_tokens=budget,
            do_sample=False,
            eos_token_id=sorted(case["ends"]) or None,
            pad_token_id=10,
            prefill_chunk_size=case["chunk"],
            past_key_values=state,
            return_dict_in_generate=True,
            **case["widths"][turn],
        )
        expected = [cut(text, length, budget, case["ends"]) for text, length in zip(texts, lengths)]
        longest = max(len(text) - length for text, length in zip(expected, lengths))
        assert output.sequences.shape[1] == ids.shape[1] + longest
        for row, text in enumerate(expected):
            padding = [10] * (longest - (len(text) - lengths[row]))
            assert output.sequences[row, ids.shape[1] :].tolist() == text[lengths[row] :] + padding, f"turn {turn}"
        lengths, state = [len(text) for text in expected], output.cache
        # A further turn starts with the token that comes next, as if a user had written it.
        lengths = [length + 1 for length in lengths]
    assert hooks_of(target) == before


def interrupt(target, draft, case):
    """A call that ends by an exception: in the middle of a forward of the target, or in a helper of the caller's."""
    calls = []

    def count(*_):
        calls.append(1)
        if len(calls) > case["interrupted"]:
            raise case["interruption"]

    class Streamer:
        put = staticmethod(count)

        def end(self):
            pass

    layer = next(module for name, module in target.named_modules() if name.endswith("layers.1"))
    handle = layer.register_forward_pre_hook(count if case["where"] == "target" else lambda *_: None)
    prompts = case["prompts"][:1] if case["where"] == "streamer" else case["prompts"]
    helpers = {
        "target": {},
        "processor": {"logits_processor": [lambda input_ids, scores: count() or scores]},
        "criterion": {"stopping_criteria": [lambda input_ids, scores: count() or torch.tensor([False])]},
        "streamer": {"streamer": Streamer()},
    }
    ids, mask = pad_left([torch.tensor([prompt]) for prompt in prompts])
    options = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False, "pad_token_id": 10}
    try:
        with pytest.raises(case["interruption"]):
            draft.generate(ids, target=target, **options, **helpers[case["where"]])
    finally:
        handle.remove()
