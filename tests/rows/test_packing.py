from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.rows.packing import pack, single


def lists(blocks):
    return [block.tolist() for block in blocks]


def plain_best_fit(lengths, capacity):
    """Johnson's best fit by definition: search every block each time, oldest first."""
    blocks = []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [capacity - sum(lengths[i] for i in block) for block in blocks]
        fitting = [i for i, left in enumerate(room) if left >= lengths[document]]
        if fitting:
            blocks[min(fitting, key=room.__getitem__)].append(document)
        else:
            blocks.append([document])
    return [sorted(block) for block in blocks]


def first_fit(lengths, capacity):
    """Return the number of blocks if each document goes into the first with room."""
    room = []
    for length in lengths:
        place = next((i for i, left in enumerate(room) if length <= left), None)
        if place is None:
            room.append(capacity - length)
        else:
            room[place] -= length
    return len(room)


@st.composite
def corpora(draw):
    capacity = draw(st.integers(1, 64))
    return draw(st.lists(st.integers(1, capacity), max_size=60)), capacity


@given(corpora())
def test_every_document_is_in_exactly_one_block(corpus):
    """No document is lost or repeated."""
    lengths, capacity = corpus
    placed = [document for block in pack(lengths, capacity) for document in block.tolist()]
    assert sorted(placed) == list(range(len(lengths)))


@given(corpora())
def test_no_block_holds_more_than_its_capacity(corpus):
    """The tokens of a block fit, and no block is empty."""
    lengths, capacity = corpus
    for block in pack(lengths, capacity):
        assert 1 <= sum(lengths[i] for i in block) <= capacity


@given(corpora())
def test_blocks_keep_the_order_of_their_documents(corpus):
    """Documents in a block keep their order."""
    assert all(block == sorted(block) for block in lists(pack(*corpus)))


@given(corpora())
def test_the_same_lengths_pack_the_same(corpus):
    """The result depends only on the lengths."""
    lengths, capacity = corpus
    assert lists(pack(lengths, capacity)) == lists(pack(list(lengths), capacity))


@given(corpora())
def test_never_worse_than_the_proven_bound_over_first_fit(corpus):
    """Best-fit-decreasing needs at most 11/9 OPT + 6/9 blocks, and OPT is at most first-fit's."""
    lengths, capacity = corpus
    blocks = len(pack(lengths, capacity))
    assert math.ceil(sum(lengths) / capacity) <= blocks
    assert blocks <= (11 * first_fit(lengths, capacity) + 6) // 9


@pytest.mark.parametrize("seed", range(5))
def test_packs_document_like_lengths_tighter_than_first_fit(seed):
    """On log-normal lengths it fills over 99 %, and first-fit needs at least as many blocks."""
    draw = random.Random(seed)  # lengths, not a secret
    lengths = [min(512, max(8, int(draw.lognormvariate(5, 0.8)))) for _ in range(2000)]
    blocks = len(pack(lengths, 512))
    assert blocks <= first_fit(lengths, 512)
    assert sum(lengths) / (blocks * 512) > 0.99


def test_each_document_goes_into_the_fullest_block_it_fits():
    """By hand: 6, 5, 4, 3, 2 in 10 give 6+4 and 5+3+2."""
    assert lists(pack([6, 5, 4, 3, 2], 10)) == [[0, 2], [1, 3, 4]]


def test_equal_lengths_pack_in_their_own_order():
    """Ties are resolved by index, whatever the sort does."""
    assert lists(pack([5, 5, 5, 5], 10)) == [[0, 1], [2, 3]]


def test_nothing_packs_into_no_block():
    """Without documents there are no blocks."""
    assert lists(pack([], 16)) == []


def test_a_document_over_the_capacity_is_no_packing_problem():
    """Encoding truncates documents, so a longer one here is a bug."""
    with pytest.raises(AssertionError, match="sequence length"):
        pack([17], 16)


@given(corpora())
def test_packs_as_looking_at_every_block_does_or_tighter(corpus):
    """The result equals best fit by definition, or has fewer blocks."""
    found, plain = lists(pack(*corpus)), plain_best_fit(*corpus)
    assert len(found) < len(plain) or found == plain


def test_blocks_are_filled_where_that_makes_fewer():
    """Best fit gives 5+4, 3+3+3 and 2 in 10; filling gives 5+3+2 and 4+3+3."""
    assert len(plain_best_fit([5, 4, 3, 3, 3, 2], 10)) == 3
    assert lists(pack([5, 4, 3, 3, 3, 2], 10)) == [[0, 2, 5], [1, 3, 4]]


def test_lengths_like_the_standard_librarys_fill_98_in_100():
    """A third of the rows exceed half a block and a tenth fill one, as at 512 tokens."""
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(5.35, 0.75, 4347), 512).astype(np.int64)
    assert 0.25 < (lengths > 256).mean() < 0.45
    assert lengths.sum() / (len(pack(lengths, 512)) * 512) > 0.98


def test_blocks_of_chosen_documents_name_those():
    """Packing works on lengths, and indices are mapped to documents afterwards."""
    blocks = pack([6, 5, 4], 10).of(np.array([20, 30, 40]))
    assert lists(blocks) == [[20, 40], [30]]


def test_blocks_are_a_sequence():
    """Negative indices and slices work; an index out of range is an error."""
    blocks = single(4)
    assert (len(blocks), blocks[-1].tolist()) == (4, [3])
    assert [block.tolist() for block in blocks[1:3]] == [[1], [2]]
    with pytest.raises(IndexError):
        blocks[4]


def test_time_to_pack_grows_with_the_documents():
    """A search of all blocks per document would be quadratic: a hundred times slower here."""
    lengths = np.random.default_rng(0).integers(1, 2049, 500_000)
    seconds = []
    for count in (50_000, 500_000):
        began = time.process_time()
        blocks = pack(lengths[:count], 2048)
        seconds.append(time.process_time() - began)
        assert len(blocks.order) == count
    assert seconds[1] < 40 * seconds[0]
