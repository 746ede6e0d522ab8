"""Turns the rounds of a generation into labelled pieces of text, and shows these in a terminal or a notebook.

`generate(..., return_dict_in_generate=True, output_rounds=True)` returns the rounds. Rejected draft tokens stand where
they were proposed: behind the accepted ones of their round and before the token that the target put in their place.
"""

import copy
import html
from collections.abc import Iterable
from dataclasses import dataclass

import torch

# What a piece can be, and what the legend says of it.
KINDS = {
    "prompt": "prompt",
    "first": "the target's first token, before any draft",
    "accepted": "draft, accepted",
    "rejected": "draft, rejected",
    "bonus": "the target's own token",
}
TERMINAL = {
    "prompt": "",
    "first": "bold cyan underline",
    "accepted": "green",
    "rejected": "red dim strike",
    "bonus": "bold cyan underline",
}
MARKS = {"rejected": ("[-", "-]"), "first": ("{+", "+}"), "bonus": ("{+", "+}")}  # as word diffs mark them
HTML = {
    "prompt": "color: #808080",
    "first": "background: #9fc5e8; color: #000000",
    "accepted": "background: #b6d7a8; color: #000000",
    "rejected": "background: #f4cccc; color: #990000; text-decoration: line-through",
    "bonus": "background: #9fc5e8; color: #000000; font-weight: bold",
}
BROKEN = "\ufffd"  # what decoders write for bytes that are no whole character


@dataclass
class Piece:
    """What one token adds to the text, or would have added.

    Args:
        kind: one of `KINDS`.
        text: empty for a token that only begins a character; the one that ends it has it whole.
        token_id: None for the prompt, which is one piece.
        round: number of the round, from 1; None before the first.
        place: of a draft token, from 1; None for others.
        confidence: of a draft token, what the draft gave for P(accepted | all before it accepted); None without a
            confidence head.
    """

    kind: str
    text: str
    token_id: int | None = None
    round: int | None = None
    place: int | None = None
    confidence: float | None = None


class Speller:
    """Spells a text token by token, so that no piece holds a part of a character and all together are the text.

    A tokenizer may write a token otherwise at the start of a text, so each is decoded behind the last whole piece.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.whole, self.spelled = 0, 0  # ids[whole:spelled] are the last piece

    def add(self, token_id: int) -> str:
        """What the text gains by the token: nothing while its last character is not complete."""
        self.ids.append(token_id)
        text = self._gained()
        if text.endswith(BROKEN):
            return ""
        self.whole, self.spelled = self.spelled, len(self.ids)
        return text

    def rest(self) -> str:
        """What a text that ends here has of a character that is not complete."""
        return self._gained()

    def branch(self) -> "Speller":
        """One for what might come next, which leaves this one as it is."""
        other = copy.copy(self)
        other.ids = self.ids.copy()
        return other

    def _gained(self) -> str:
        before = self._decode(self.ids[self.whole : self.spelled])
        return self._decode(self.ids[self.whole :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def label_pieces(tokenizer, prompt_ids: torch.Tensor, sequence: torch.Tensor, rounds: Iterable) -> list[Piece]:
    """The pieces of one row's text, special tokens included.

    Args:
        prompt_ids: `[P]` int64, without padding.
        sequence: prompt and new tokens, `[P + new]` int64.
        rounds: the row's, as `generate` returns them. Of a round that a stop or a budget cut, only what was kept is
            shown.
    """
    prompt_ids, new_ids = prompt_ids.tolist(), sequence.tolist()[len(prompt_ids) :]
    speller = Speller(tokenizer)
    pieces = [Piece("prompt", "".join(map(speller.add, prompt_ids)))]
    if new_ids:
        pieces.append(Piece("first", speller.add(new_ids[0]), new_ids[0]))
    for number, step in enumerate(rounds, start=1):
        pieces += _pieces_of_round(speller, number, step)
    pieces[-1].text += speller.rest()
    return pieces


def _pieces_of_round(speller: Speller, number: int, step) -> list[Piece]:
    """The round's pieces; `speller` goes on by those that stay in the text."""
    kept, drafted = step.tokens[0].tolist(), step.draft_tokens[0].tolist()
    confidence = [None] * len(drafted) if step.confidence is None else step.confidence[0].sigmoid().tolist()

    def draft_pieces(kind: str, places: range, spell: Speller) -> list[Piece]:
        ids = [drafted[place] for place in places]
        return [Piece(kind, spell.add(i), i, number, k + 1, confidence[k]) for k, i in zip(places, ids)]

    pieces = draft_pieces("accepted", range(min(step.accepted, len(kept))), speller)
    if len(kept) <= step.accepted:  # cut
        return pieces
    abandoned = speller.branch()
    rejected = draft_pieces("rejected", range(step.accepted, len(drafted)), abandoned)
    if rejected:
        rejected[-1].text += abandoned.rest()
    return [*pieces, *rejected, Piece("bonus", speller.add(kept[-1]), kept[-1], number)]


def visible(piece: Piece) -> str:
    """The piece's text, with signs for line ends and tabs where else they would not show what became of them.

    A rejected line end must not break the line.
    """
    if piece.kind in ("prompt", "accepted"):
        return piece.text
    text = piece.text.replace("\r", "␍").replace("\t", "⇥")
    return text.replace("\n", "⏎" if piece.kind == "rejected" else "⏎\n")


def terminal_text(pieces: list[Piece], colour: bool):
    """The pieces and a legend, as a `rich.text.Text`: in colours, or without them in marks, as of a word diff.

    Neighbours of a kind and round share their marks.
    """
    from rich.text import Text

    text = Text()
    for run in _runs(pieces):
        _append(text, run[0].kind, "".join(map(visible, run)), colour)
    text.append("\n\n")
    for kind in _kinds(pieces):
        _append(text, kind, KINDS[kind], colour)
        text.append("  ")
    text.rstrip()
    return text


def _append(text, kind: str, words: str, colour: bool) -> None:
    before, after = ("", "") if colour else MARKS.get(kind, ("", ""))
    line_ends = words[len(words.rstrip("\n")) :]  # behind the mark
    text.append(f"{before}{words.removesuffix(line_ends)}{after}", TERMINAL[kind] if colour else "")
    text.append(line_ends)


def _kinds(pieces: list[Piece]) -> list[str]:
    """Which kinds occur, in the legend's order."""
    return [kind for kind in KINDS if any(piece.kind == kind for piece in pieces)]


def _runs(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces, in lists of neighbours of a kind and round; those without text are left out."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if not piece.text:
            continue
        if runs and (runs[-1][0].kind, runs[-1][0].round) == (piece.kind, piece.round):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def print_pieces(pieces: list[Piece], file=None) -> None:
    """Print the pieces and a legend: in colours to a terminal that has them and unless NO_COLOR is set, else in
    marks."""
    from rich.console import Console

    console = Console(file=file, highlight=False, soft_wrap=True)
    colour = console.is_terminal and console.color_system is not None and not console.no_color
    console.print(terminal_text(pieces, colour))


def html_text(pieces: list[Piece]) -> str:
    """The pieces and a legend for a notebook; pointing at a token tells its round, place and confidence."""
    tokens = "".join(_span(piece.kind, visible(piece), _tooltip(piece)) for piece in pieces if piece.text)
    legend = " ".join(_span(kind, KINDS[kind]) for kind in _kinds(pieces))
    return f'<pre style="line-height: 1.6; white-space: pre-wrap">{tokens}</pre><p>{legend}</p>'


def _span(kind: str, text: str, tooltip: str = "") -> str:
    title = f' title="{html.escape(tooltip)}"' if tooltip else ""
    return f'<span class="{kind}" style="{HTML[kind]}"{title}>{html.escape(text)}</span>'


def _tooltip(piece: Piece) -> str:
    parts = [] if piece.round is None else [f"round {piece.round}"]
    parts += [] if piece.place is None else [f"draft token {piece.place}"]
    parts += [] if piece.confidence is None else [f"confidence {piece.confidence:.2f}"]
    return ", ".join([*parts, piece.kind]) if parts else ""
