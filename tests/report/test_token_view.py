from __future__ import annotations

import io

import pytest
from rich.console import Console

from mens_exp.report.plan_view import ShownDocument, dropped_row, shown_document, token_legend

TOKENS = {
    0: b"<|end|>",
    1: b"Say",
    2: b" hi",
    3: b"\n",
    4: b"\xc3",
    5: b"\xa9",
    6: b"  ",
    7: b"\x1b[31m",
}


class Tokens:
    """A byte-level tokenizer with eight tokens."""

    @property
    def special_ids(self):
        return {0}

    def spell(self, ids):
        return b"".join(TOKENS[token] for token in ids).decode("utf-8", "replace")


def drawn(ids, supervised, cut=0):
    document = ShownDocument(
        title="Row 1", ids=ids, supervised=list(map(bool, supervised)), cut=cut
    )
    return shown_document(document, Tokens())


def lines(text):
    """Return the lines for a pipe."""
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(text, soft_wrap=True, end="")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_trained_tokens_stand_in_brackets():
    """Bars separate tokens, and no colour is needed."""
    assert lines(drawn([1, 2, 1, 0, 1], [0, 0, 1, 1, 0])) == [
        "Row 1: 5 tokens, 2 trained",
        "Say│·hi⟦Say│<|end|>⟧Say",
    ]


def test_colour_says_the_same():
    """Supervised tokens are coloured and underlined, control tokens bold."""
    text = drawn([1, 0], [0, 1])
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["<|end|>"] == "cyan underline bold magenta"
    assert "Say" not in styles
    assert not text.style


def test_first_token_can_be_trained():
    """If the last token is supervised, the bracket is closed."""
    assert lines(drawn([1, 2], [1, 1]))[1] == "⟦Say│·hi⟧"


def test_tokens_of_one_character_stand_together():
    """Tokens that share one character are grouped with their count."""
    assert lines(drawn([1, 4, 5, 1], [0, 0, 0, 0]))[1] == "Say│é‥2│Say"


def test_half_a_character_at_an_edge_is_shown_as_such():
    """Supervised and other bytes of one character are never merged."""
    assert lines(drawn([4, 5], [0, 1]))[1].startswith("\ufffd⟦")
    assert lines(drawn([1, 4], [0, 0]))[1] == "Say│\ufffd"


def test_white_space_and_control_characters_are_visible():
    """They are never sent to the terminal."""
    assert lines(drawn([6, 3, 7], [0, 0, 0]))[1:] == ["··│⏎", "│\\x1b[31m"]


@pytest.mark.parametrize(("cut", "told"), [(0, False), (7, True)])
def test_what_the_limit_took_is_counted(cut, told):
    """Otherwise a truncated row would look complete."""
    assert ("7 cut off" in lines(drawn([1], [0], cut))[0]) is told


def test_dropped_row_is_told():
    """It is not trained on."""
    assert lines(dropped_row("Row 2", 1, 64))[0].startswith("Row 2: a document of it is dropped")
    assert "2 documents of it are dropped" in lines(dropped_row("Row 2", 2, 64))[0]


def test_legend_names_every_sign():
    """Brackets, bars, dots and newlines are explained."""
    assert all(sign in token_legend().plain for sign in "⟦⟧│·⏎")
