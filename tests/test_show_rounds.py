"""`scripts/show_rounds.py`: every token gets the label that its round gave it, and no character is broken."""

import io
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from common import TINY_TARGET
from conftest import follow, make_scripted_draft, make_target, plain_greedy
from show_rounds import BROKEN, KINDS, Piece, html_text, label_pieces, print_pieces, terminal_text
from transformers import AutoTokenizer

LETTERS = "0123456789ab"
LEGEND = "prompt  {+the target's first token, before any draft+}  draft, accepted  [-draft, rejected-]  "


class Letters:
    """Spells the twelve ids of the small targets."""

    def decode(self, ids, clean_up_tokenization_spaces):
        return "".join(LETTERS[number] for number in ids)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_TARGET, trust_remote_code=True)


def round_of(draft_tokens, accepted, tokens, confidence=None):
    rows = None if confidence is None else torch.tensor([confidence])
    tensors = {"draft_tokens": torch.tensor([draft_tokens]), "tokens": torch.tensor([tokens]), "confidence": rows}
    return SimpleNamespace(accepted=accepted, **tensors)


def text_of(pieces, *kinds):
    return "".join(piece.text for piece in pieces if piece.kind in kinds)


STAYING = [kind for kind in KINDS if kind != "rejected"]


# Labels


def test_labels_are_what_verification_said():
    """Accepted 0, 3, 7 and, cut by the budget, 2 of 7; what each round drafted is known from the plain text."""
    target, prompt = make_target("text"), torch.tensor([[1, 2, 3]])
    text, schedule = plain_greedy(target, prompt, 40), [0, 3, 7, 7]
    draft = make_scripted_draft(target, follow(text, iter(schedule).__next__))
    options = {"max_new_tokens": 1 + 1 + 4 + 8 + 2, "return_dict_in_generate": True, "output_rounds": True}
    output = draft.generate(prompt, target=target, do_sample=False, **options)
    pieces = label_pieces(Letters(), prompt[0], output.sequences[0], output.rounds)

    ids, expected, at = text[0].tolist(), [("prompt", "123", None, None)], 4
    expected.append(("first", LETTERS[ids[3]], None, None))
    for number, accepted in enumerate(schedule, start=1):
        drafted = ids[at : at + 7]
        if accepted < 7:
            drafted[accepted] = (drafted[accepted] + 1) % 12
        kinds = ["accepted"] * accepted + ["rejected"] * (7 - accepted)
        for place, (kind, token) in enumerate(zip(kinds, drafted), start=1):
            if number < 4 or place <= 2:
                expected.append((kind, LETTERS[token], number, place))
        if number < 4:
            expected.append(("bonus", LETTERS[ids[at + accepted]], number, None))
        at += accepted + 1
    assert [(piece.kind, piece.text, piece.round, piece.place) for piece in pieces] == expected
    assert text_of(pieces, *STAYING) == Letters().decode(output.sequences[0].tolist(), False)

    confidences = iter([p for step in output.rounds for p in torch.sigmoid(step.confidence[0]).tolist()][:23])
    drafts = [piece for piece in pieces if piece.place is not None]
    assert len(drafts) == 23 and [piece.confidence for piece in drafts] == pytest.approx(list(confidences))


def test_a_draft_without_confidence_head_and_a_text_without_rounds():
    pieces = label_pieces(Letters(), torch.tensor([1]), torch.tensor([1, 2, 3]), [round_of([4], 0, [3])])
    assert [(piece.kind, piece.confidence) for piece in pieces[2:]] == [("rejected", None), ("bonus", None)]
    assert label_pieces(Letters(), torch.tensor([1]), torch.tensor([1, 2]), ()) == [
        Piece("prompt", "1"),
        Piece("first", "2", 2),
    ]


# Characters of several tokens


def random_trace(ids: list[int], wrong: list[int], prompt_length: int, generator: torch.Generator):
    """Rounds over the text `ids` that accept random numbers of tokens, and then draft from `wrong`."""
    rounds, at = [], prompt_length + 1
    while at < len(ids):
        accepted = int(torch.randint(0, 8, (), generator=generator))
        kept = ids[at : at + accepted + 1]
        start = int(torch.randint(0, len(wrong) - 7, (), generator=generator))
        drafted = (ids[at : at + accepted] + [0] * 7)[:accepted] + wrong[start : start + 7 - accepted]
        rounds.append(round_of(drafted, accepted, kept))
        at += accepted + 1
    return rounds


@pytest.mark.parametrize("seed", range(20))
def test_characters_of_several_tokens_never_break(tokenizer, seed):
    """Wherever rounds, rejections and the prompt end: within a character, too."""
    text = "naïve 日本語 😀👍🏽 é\n\tok Ω≈ç — 漢字かな交じり文 🇯🇵 fin"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > len(text)  # most characters take several tokens
    generator = torch.Generator().manual_seed(seed)
    prompt_length = 1 + int(torch.randint(0, 12, (), generator=generator))
    wrong = tokenizer("über 東京 🎉 naïf déjà 北京 x = 1", add_special_tokens=False).input_ids
    rounds = random_trace(ids, wrong, prompt_length, generator)
    pieces = label_pieces(tokenizer, torch.tensor(ids[:prompt_length]), torch.tensor(ids), rounds)

    staying = [piece for piece in pieces if piece.kind != "rejected"]
    assert "".join(piece.text for piece in staying) == text and not any(BROKEN in piece.text for piece in staying)
    # A character is spelled by the token that ends it.
    ends = [tokenizer.decode(ids[:count]).count(BROKEN) == 0 for count in range(prompt_length + 1, len(ids) + 1)]
    assert [bool(piece.text) for piece in staying[1:]] == ends
    # What a rejected run says is what the text would have gone on with.
    at = prompt_length
    for number, step in enumerate(rounds, start=1):
        at += len(rounds[number - 2].tokens[0]) if number > 1 else 1
        run = [piece for piece in pieces if piece.kind == "rejected" and piece.round == number]
        taken = ids[: at + step.accepted]
        whole = tokenizer.decode(taken).rstrip(BROKEN)
        if run:
            branch = taken + step.draft_tokens[0, step.accepted :].tolist()
            assert "".join(piece.text for piece in run) == tokenizer.decode(branch)[len(whole) :]


def test_a_text_that_ends_within_a_character_says_so(tokenizer):
    ids = tokenizer("a日", add_special_tokens=False).input_ids
    pieces = label_pieces(tokenizer, torch.tensor(ids[:1]), torch.tensor(ids[:-1]), [round_of([0], 0, ids[2:-1])])
    assert text_of(pieces, *STAYING) == tokenizer.decode(ids[:-1]) and pieces[-1].text == BROKEN


# What is shown

PIECES = [
    Piece("prompt", "x ="),
    Piece("first", "\n", 1),
    Piece("accepted", "if", 2, 1, 1, 0.9),
    Piece("accepted", " a\n", 3, 1, 2, 0.8),
    Piece("rejected", " <b>", 4, 1, 3, 0.25),
    Piece("rejected", "\n", 5, 1, 4, 0.5),
    Piece("bonus", " &", 6, 1),
    Piece("rejected", "c", 7, 2, 1, 0.1),
    Piece("bonus", "", 8, 2),
]


def printed(monkeypatch, **environment) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "40", **environment}.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    print_pieces(PIECES, file)
    return file.getvalue()


def test_without_colours_there_are_marks(monkeypatch):
    expected = "x ={+⏎+}\nif a\n[- <b>⏎-]{+ &+}[-c-]\n\n" + LEGEND + "{+the target's own token+}\n"
    assert printed(monkeypatch) == expected  # a file is no terminal
    assert printed(monkeypatch, FORCE_COLOR="1", NO_COLOR="1") == expected
    assert printed(monkeypatch, FORCE_COLOR="1", TERM="dumb") == expected


def test_in_colours_rejected_tokens_are_struck_through(monkeypatch):
    shown = printed(monkeypatch, FORCE_COLOR="1")
    assert "\x1b[2;9;31m <b>⏎\x1b[0m" in shown and "[-" not in re.sub(r"\x1b\[[0-9;]*m", "", shown)
    styles = {kind: set() for kind in KINDS}
    for span in terminal_text(PIECES, colour=True).spans:
        plain = terminal_text(PIECES, colour=True).plain[span.start : span.end]
        styles |= {kind: {str(span.style)} for kind, legend in KINDS.items() if plain == legend}
    assert len({*map(tuple, styles.values())}) == 4  # the target's tokens look alike, first or not


class Spans(HTMLParser):
    """The spans of a page: class, tooltip and text of each."""

    def __init__(self, page: str):
        super().__init__()
        self.spans, self.open = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "span":
            self.spans.append([dict(attributes)["class"], dict(attributes).get("title"), ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "span":
            self.spans[-1][2] += data


def test_html_has_a_span_a_token_and_a_legend():
    spans = Spans(html_text(PIECES)).spans
    assert spans[:8] == [
        ["prompt", None, "x ="],
        ["first", None, "⏎\n"],
        ["accepted", "round 1, draft token 1, confidence 0.90, accepted", "if"],
        ["accepted", "round 1, draft token 2, confidence 0.80, accepted", " a\n"],
        ["rejected", "round 1, draft token 3, confidence 0.25, rejected", " <b>"],
        ["rejected", "round 1, draft token 4, confidence 0.50, rejected", "⏎"],
        ["bonus", "round 1, bonus", " &"],
        ["rejected", "round 2, draft token 1, confidence 0.10, rejected", "c"],
    ]
    assert [(kind, text) for kind, _, text in spans[8:]] == list(KINDS.items())
