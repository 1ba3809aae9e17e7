from __future__ import annotations

from itertools import zip_longest

import pytest

from mens_exp.data.stream import MicroBatches
from mens_exp.errors import RequestError

BLOCKS = [[0], [1, 2], [3], [4], [5, 6]]


@pytest.fixture
def stream(documents_of):
    """Return a stream over seven documents; document i is [100 + i, i]."""
    documents = documents_of([[100 + i, i] for i in range(7)], [[0, 1]] * 7)

    def made(
        *,
        seed=0,
        size=1,
        total=15,
        packing=True,
        blocks=BLOCKS,
        places=None,
        rank=0,
        world_size=1,
    ):
        batches = MicroBatches(
            documents,
            blocks,
            micro_batch_size=size,
            total=total,
            seed=seed,
            packing=packing,
            pad_id=0,
            places=places,
        )
        batches.share(rank, world_size)
        return batches

    return made


def documents_in(batch):
    """Return the documents of a batch by their first tokens."""
    return [token - 100 for token in batch.input_ids_BT.flatten().tolist() if token >= 100]


def order(batches):
    return [documents_in(batch) for batch in batches]


def test_the_same_seed_gives_the_same_order(stream):
    """Two streams with one seed are equal."""
    assert order(stream(seed=3)) == order(stream(seed=3))


def test_another_seed_gives_another_order(stream):
    """Ten seeds give more than one order."""
    assert len({str(order(stream(seed=seed))) for seed in range(10)}) > 5


def test_every_epoch_is_a_permutation_of_all_blocks(stream):
    """Every five micro-batches hold each block once, and epochs differ."""
    taken = order(stream(total=15))
    epochs = [taken[start : start + 5] for start in (0, 5, 10)]
    assert all(sorted(epoch) == BLOCKS for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_micro_batches_run_over_the_end_of_an_epoch(stream):
    """With five blocks in pairs, the third micro-batch has blocks of two epochs."""
    singles = order(stream(size=1, total=10))
    pairs = order(stream(size=2, total=5))
    assert pairs == [singles[i] + singles[i + 1] for i in range(0, 10, 2)]


@pytest.mark.parametrize("position", [0, 1, 4, 5, 7, 15])
def test_a_fresh_stream_goes_on_from_a_saved_position(stream, position):
    """Micro-batch k of a resumed stream equals that of an uninterrupted one."""
    resumed = stream()
    resumed.load_state_dict({"position": position})
    assert order(resumed) == order(stream())[position:]
    assert [batch.index for batch in resumed] == list(range(position, 15))


def test_the_state_is_the_position_and_survives_a_round_trip(
    stream,
):
    """The state round-trips, and iterating alone does not change it."""
    first = stream()
    first.position = 6
    list(first)
    second = stream()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == {"position": 6}


def test_the_order_does_not_depend_on_the_global_generator(
    stream,
):
    """Other draws in between change nothing."""
    import numpy as np

    expected = order(stream())
    np.random.seed(99)  # on purpose: the global generator
    assert order(stream()) == expected


def test_the_order_is_the_same_whatever_the_length_of_the_stream(
    stream,
):
    """A longer stream begins like the shorter one."""
    assert order(stream(total=30))[:15] == order(stream(total=15))


def test_without_a_seed_blocks_come_in_their_own_order(
    stream,
):
    """Validation takes each block once; the last micro-batch has the remainder."""
    assert order(stream(seed=None, size=2, total=3)) == [[0, 1, 2], [3, 4], [5, 6]]


def test_length_counts_the_whole_stream(stream):
    """Lightning compares the length with a position, so consumed micro-batches count."""
    resumed = stream(total=15)
    resumed.load_state_dict({"position": 9})
    assert len(resumed) == 15


def test_unpacked_blocks_become_padded_rows(stream):
    """There is one row per document with a mask, in the order of the packed stream."""
    blocks = [[i] for i in range(7)]
    padded = stream(packing=False, blocks=blocks, size=2, total=7)
    packed = stream(packing=True, blocks=blocks, size=2, total=7)
    assert order(padded) == order(packed)
    assert all(b.attention_mask_BT is not None and b.documents is None for b in padded)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_whole_epochs_hold_each_document_so_many_times(stream, epochs):
    """The last micro-batch of five blocks in pairs is not filled from the next epoch."""
    places = 5 * epochs
    found = order(stream(size=2, total=-(-places // 2), places=places))
    assert sorted(document for batch in found for document in batch) == sorted([*range(7)] * epochs)


def test_without_a_bound_the_last_micro_batch_is_filled_up(
    stream,
):
    """Three micro-batches of two blocks hold six, so one block is repeated."""
    found = order(stream(size=2, total=3, blocks=[[i] for i in range(5)]))
    assert sum(map(len, found)) == 6


def interleaved(ranks):
    """Take one micro-batch of each rank in turn, as the ranks of one step do."""
    turns = zip_longest(*[order(rank) for rank in ranks])
    return [documents for turn in turns for documents in turn if documents is not None]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_together_take_the_order_of_one(stream, world, accumulate):
    """Each step has the same micro-batches for any number of ranks, over all epochs."""
    total = 4 * world * accumulate
    alone = stream(size=2, total=total)
    ranks = [stream(size=2, total=total, rank=r, world_size=world) for r in range(world)]
    assert interleaved(ranks) == order(alone)
    assert [len(rank) for rank in ranks] == [4 * accumulate] * world
    for step in range(4):  # ranks share the micro-batches of a step in any order
        first = step * world * accumulate
        mine = [list(ranks[r])[step * accumulate : (step + 1) * accumulate] for r in range(world)]
        taken = sorted(batch.index for rank in mine for batch in rank)
        assert taken == list(range(first, first + world * accumulate))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_another_number_of_ranks_goes_on_where_the_first_stopped(stream, before, after, accumulate):
    """Twelve micro-batches per step for any number of ranks, stopped after three steps."""
    step = 12 * accumulate
    total = 5 * step
    first = [stream(size=2, total=total, rank=r, world_size=before) for r in range(before)]
    for rank in first:
        rank.position = list(rank)[3 * step // before - 1].index + 1  # as training does
    states = [rank.state_dict() for rank in first]
    assert states == [{"position": 3 * step}] * before
    second = [stream(size=2, total=total, rank=r, world_size=after) for r in range(after)]
    for rank in second:
        rank.load_state_dict(states[0])
    assert interleaved(second) == order(stream(size=2, total=total))[3 * step :]


def test_a_position_inside_what_ranks_take_together_is_refused(
    stream,
):
    """Three ranks cannot continue after two of them took one; the message gives a remedy."""
    with pytest.raises(RequestError, match=r"position 4 for 3 ranks.*number of ranks that divides"):
        stream(rank=0, world_size=3).load_state_dict({"position": 4})


def test_the_end_of_the_stream_leaves_some_ranks_a_filler(
    stream,
):
    """Seven micro-batches for three ranks are three turns, with two repeats of the seventh."""
    ranks = [stream(total=7, rank=r, world_size=3) for r in range(3)]
    assert [len(rank) for rank in ranks] == [3, 3, 3]
    taken = sorted((batch for rank in ranks for batch in rank), key=lambda batch: batch.index)
    assert [batch.is_filler for batch in taken] == [False] * 7 + [True] * 2
    assert [documents_in(batch) for batch in taken[:7]] == order(stream(total=7))
    assert all(documents_in(batch) == documents_in(taken[6]) for batch in taken[7:])


def test_any_number_of_ranks_takes_over_a_stream_that_is_at_its_end(
    stream,
):
    """Two ranks end seven micro-batches at position 8, which is no multiple of three."""
    after = stream(total=7, rank=1, world_size=3)
    after.load_state_dict({"position": 8})
    assert list(after) == []
