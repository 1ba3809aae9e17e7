from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.corpus.overlap import Overlap, OverlapIndex, texts_of
from mens_exp.rows.schema import TrainingPair

WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=12)
ITEM = "one two three four five six"


def naive(item, row, n):
    """Shared distinct n-grams, by sets of tuples."""
    grams = [{tuple(words[i : i + n]) for i in range(len(words) - n + 1)} for words in (item, row)]
    return len(grams[0] & grams[1])


@given(item=WORDS.filter(lambda words: len(words) >= 3), row=WORDS)
def test_shared_ngrams_are_those_of_plain_sets(item, row):
    """Against an independent count, every share included."""
    found = OverlapIndex([("x", " ".join(item))], 3).overlaps([" ".join(row)])
    shared = naive(item, row, 3)
    whole = len({tuple(item[i : i + 3]) for i in range(len(item) - 2)})
    expected = [Overlap(item="x", shared=shared, share=shared / whole)] if shared else []
    assert found == expected


def test_layout_case_and_punctuation_hide_nothing():
    """Words are runs of letters, digits and underscores; n-grams go on into the next text."""
    index = OverlapIndex([("x", ITEM)], 5)
    assert index.overlaps(["ONE, two\n\tthree;", "(four) five!"]) == [
        Overlap(item="x", shared=1, share=0.5)
    ]
    assert index.overlaps(["one two three four", "5"]) == []


def test_a_script_without_spaces_hides_nothing():
    """A sentence of Chinese is no single word: all but one of its characters copied is found."""
    item = "编写一个函数返回列表中所有偶数的总和"
    (found,) = OverlapIndex([("x", item)], 13).overlaps([f"请{item[:-1]}吧"])
    assert (found.shared, found.share) == (5, 5 / 6)


def test_another_spelling_of_the_same_characters_hides_nothing():
    """Accents in one code point or two, and characters of full width."""
    index = OverlapIndex([("x", "caf\u00e9 cr\u00e8me deux trois quatre")], 5)
    for text in ("cafe\u0301 cre\u0300me deux trois quatre", "café crème ｄｅｕｘ trois quatre"):
        assert [one.share for one in index.overlaps([text])] == [1.0]


@pytest.mark.parametrize(("texts", "has"), [(["Say hi."], True), (["a", "say HI"], True)])
def test_short_items_are_looked_for_whole(texts, has):
    """A prompt, an answer or a whole row that says just the item."""
    index = OverlapIndex([("short", "Say hi"), ("long", ITEM)], 5)
    assert [one.item for one in index.overlaps(texts)] == ["short"] * has


def test_short_items_inside_longer_texts_are_no_match():
    """Two words in a row are everywhere."""
    assert OverlapIndex([("short", "Say hi")], 5).overlaps(["Please say hi to them."]) == []


def test_items_that_share_an_ngram_are_all_told_the_largest_share_first():
    """One n-gram of two items: each with its own share."""
    items = [("long", f"{ITEM} seven"), ("same", "one two three four five")]
    found = OverlapIndex(items, 5).overlaps(["zero one two three four five zero"])
    assert found == [
        Overlap(item="same", shared=1, share=1.0),
        Overlap(item="long", shared=1, share=1 / 3),
    ]


def test_an_empty_benchmark_matches_nothing():
    """Nor does an item without a word."""
    assert OverlapIndex([]).overlaps([ITEM]) == []
    index = OverlapIndex([("empty", string.punctuation.replace("_", ""))])
    assert len(index) == 1
    assert index.overlaps(["…", ITEM]) == []


def test_a_row_says_all_its_prompts_and_answers():
    """The system prompt is no row's own."""
    pair = TrainingPair(prompt="c", response="d", history=(("a", "b"),), system="s")
    assert texts_of(pair) == ["a", "b", "c", "d"]
