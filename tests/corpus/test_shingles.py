from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.corpus.minhash import jaccard, mixed, shingles, tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f_1(a,  b):\n\ta+=b", ["f_1", "(", "a", ",", "b", ")", ":", "a", "+", "=", "b"]),
        ("naïve Straße", ["naïve", "Straße"]),
        ("漢字かな mixed語", ["漢", "字", "か", "な", "mixed", "語"]),
        (" \n\t", []),
    ],
    ids=["code", "accents", "no spaces", "nothing"],
)
def test_tokens_are_words_and_single_characters(text, expected):
    """White space is dropped; characters of scripts without spaces are single tokens."""
    assert tokens(text) == expected


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40), st.integers(1, 6))
def test_shingles_are_as_many_as_distinct_runs(words, size):
    """The oracle counts tuples; a text shorter than a shingle is one shingle."""
    runs = {tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}
    found = shingles(" ".join(words), size)
    assert len(found) == len(runs)
    assert list(found) == sorted(set(found.tolist()))


@given(
    st.lists(st.sampled_from("abc"), min_size=5, max_size=30),
    st.lists(st.sampled_from("abc"), min_size=5, max_size=30),
)
def test_jaccard_is_that_of_the_sets_of_runs(one, other):
    """The oracle is Python's sets."""
    first, second = (
        {tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (one, other)
    )
    expected = len(first & second) / len(first | second)
    assert jaccard(shingles(" ".join(one), 5), shingles(" ".join(other), 5)) == expected


def test_order_of_words_counts_and_layout_does_not():
    """Another order of the same words shares no shingle; white space does not matter."""
    assert jaccard(shingles("a b c", 2), shingles("a\nb   c", 2)) == 1
    assert jaccard(shingles("a b", 2), shingles("b a", 2)) == 0


def test_short_text_is_not_the_end_of_a_long_one():
    """A two-token text is a shingle of two, which a text of five does not have."""
    assert jaccard(shingles("a a", 5), shingles("a a a a a", 5)) == 0


def test_shingles_are_the_same_on_every_machine():
    """Fixed values: a changed hash would invalidate stored fingerprints."""
    assert shingles("def f(a): return a", 5).tolist() == EXPECTED


def test_spreading_bits_loses_none():
    """The function is bijective; its first value is that of the reference implementation."""
    values = np.arange(10_000, dtype=np.uint64)
    assert len(np.unique(mixed(values))) == len(values)
    assert mixed(values)[0] == 0
    assert int(mixed(np.array([1], np.uint64))[0]) == 0xB456BCFC34C2CB2C


def test_lone_surrogates_have_a_hash():
    """A response may contain a lone surrogate."""
    assert len(shingles("'\ud800'", 5)) == 1


EXPECTED = [1047817370, 1362025123, 2339784620, 2703554707]
