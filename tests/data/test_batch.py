from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.rows.documents import share_prompts
from mens_exp.rows.packing import blocks_of

PAD = 0
IDS = [[10, 11, 12, 13], [20, 21, 22]]
SUPERVISED = [[0, 0, 1, 1], [0, 1, 1]]


@pytest.fixture
def documents(documents_of):
    return documents_of(IDS, SUPERVISED)


def test_packed_batch_predicts_each_supervised_token_from_the_one_before(
    documents,
):
    """By hand: 12, 13 and 21, 22 are predicted from 11, 12 and 20, 21 in one sequence."""
    batch = packed_batch(documents, [[1, 0]], index=7)
    assert batch.input_ids_BT.tolist() == [[20, 21, 22, 10, 11, 12, 13]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.documents == ((0, 3), (3, 7))
    assert batch.attention_mask_BT is None
    assert batch.predict_M.tolist() == [0, 1, 4, 5]
    assert batch.targets_M.tolist() == [21, 22, 12, 13]
    assert (batch.tokens, batch.index) == (7, 7)


def test_padded_batch_predicts_each_supervised_token_from_the_one_before(
    documents,
):
    """The same targets have their positions in the flattened rows of four."""
    batch = padded_batch(documents, [[1], [0]], index=7, pad_id=PAD)
    assert batch.input_ids_BT.tolist() == [[20, 21, 22, PAD], [10, 11, 12, 13]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.attention_mask_BT is not None
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.documents is None
    assert batch.predict_M.tolist() == [0, 1, 5, 6]
    assert batch.targets_M.tolist() == [21, 22, 12, 13]
    assert (batch.tokens, batch.index) == (7, 7)


def test_a_padded_batch_masks_by_length_and_never_by_the_pad_id(documents):
    """A supervised token equal to the pad id, such as an end marker, stays attended and learned."""
    batch = padded_batch(documents, [[1], [0]], index=0, pad_id=22)
    assert batch.input_ids_BT.tolist()[0] == [20, 21, 22, 22]
    assert batch.attention_mask_BT is not None
    assert batch.attention_mask_BT.tolist()[0] == [1, 1, 1, 0]
    assert batch.targets_M.tolist() == [21, 22, 12, 13]


def test_blocks_of_a_micro_batch_join_into_one_packed_sequence(documents):
    """Two blocks give the same sequence as one block of both documents."""
    apart, together = (packed_batch(documents, b, index=0) for b in ([[0], [1]], [[0, 1]]))
    assert torch.equal(apart.input_ids_BT, together.input_ids_BT)
    assert apart.documents == together.documents == ((0, 4), (4, 7))


def test_a_document_without_supervision_is_seen_and_not_learned(
    documents_of,
):
    """Its tokens count, but it has no targets."""
    documents = documents_of(IDS, [[0, 0, 0, 0], [0, 1, 1]])
    for batch in (
        packed_batch(documents, [[0, 1]], index=0),
        padded_batch(documents, [[0], [1]], index=0, pad_id=PAD),
    ):
        assert batch.tokens == 7
        assert batch.targets_M.tolist() == [21, 22]


def test_ids_and_indices_are_of_the_types_torch_indexes_with(documents):
    """Ids and indices are int64, whatever type the cache stores."""
    for batch in (
        packed_batch(documents, [[0, 1]], index=0),
        padded_batch(documents, [[0], [1]], index=0, pad_id=PAD),
    ):
        for tensor in (batch.input_ids_BT, batch.position_ids_BT, batch.predict_M, batch.targets_M):
            assert tensor.dtype == torch.int64


def test_moving_a_batch_moves_every_tensor_and_nothing_else(documents):
    """On the meta device tensors have no values; bounds and counts are unchanged."""
    batch = padded_batch(documents, [[1], [0]], index=3, pad_id=PAD).to("meta", non_blocking=True)
    assert batch.attention_mask_BT is not None
    for tensor in (
        batch.input_ids_BT,
        batch.position_ids_BT,
        batch.attention_mask_BT,
        batch.predict_M,
        batch.targets_M,
    ):
        assert tensor.device.type == "meta"
    assert (batch.tokens, batch.index, batch.documents) == (7, 3, None)


def test_further_values_are_those_of_the_targets(documents):
    """Values keep the order of the targets, packed and padded."""
    values = np.arange(7, dtype=np.float32) / 4
    documents = replace(documents, extra={"weight": values})
    for batch in (
        packed_batch(documents, [[1, 0]], index=0, multiple=16),
        padded_batch(documents, [[1], [0]], index=0, pad_id=PAD),
    ):
        assert batch.targets_M.tolist() == [21, 22, 12, 13]
        assert batch.extra["weight"].tolist() == [1.25, 1.5, 0.5, 0.75]
        assert batch.to("meta").extra["weight"].device.type == "meta"


@pytest.mark.parametrize("packing", [True, False])
def test_documents_that_stay_together_are_in_one_block(random_documents, packing):
    """They keep their order within the block's capacity."""
    lengths = np.random.default_rng(0).integers(2, 33, 120).tolist()
    documents = replace(random_documents(lengths), together=3)
    blocks = blocks_of(documents, packing=packing, capacity=100)
    units = [tuple(block[i : i + 3].tolist()) for block in blocks for i in range(0, len(block), 3)]
    assert sorted(units) == [(i, i + 1, i + 2) for i in range(0, 120, 3)]
    assert max(int(documents.lengths[block].sum()) for block in blocks) <= 100
    assert len(blocks) < 40 if packing else len(blocks) == 40


@pytest.fixture
def pairs(documents_of):
    """Return pairs that share two tokens, none, and all but one of the chosen document's."""
    ids = [[10, 11, 12, 13], [10, 11, 22, 23], [30, 31], [40, 31, 42], [50, 51], [50, 51, 62, 63]]
    supervised = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 1], [0, 0, 1], [0, 1], [0, 0, 0, 1]]
    return share_prompts(replace(documents_of(ids, supervised), together=2))


def test_a_pair_has_its_prompt_once(pairs):
    """By hand: 22 follows 11, before the chosen answer, at position 2; 62 follows 50."""
    assert pairs.shared.tolist() == [0, 2, 0, 0, 0, 1]
    assert pairs.units.tolist() == [8, 5, 6]
    assert pairs.room.tolist() == [6, 5, 5]
    batch = packed_batch(pairs, [[2, 3, 4, 5], [0, 1]], index=7)
    ids = [30, 31, 40, 31, 42, 50, 51, 51, 62, 63, 10, 11, 12, 13, 22, 23]
    assert batch.input_ids_BT.tolist() == [ids]
    positions = [0, 1, 0, 1, 2, 0, 1, 1, 2, 3, 0, 1, 2, 3, 2, 3]
    assert batch.position_ids_BT.tolist() == [positions]
    assert batch.documents == ((0, 2), (2, 5), (5, 7), (7, 10), (10, 14), (14, 16))
    assert batch.prefixes == (None, None, None, (5, 6), None, (10, 12))
    assert batch.predict_M.tolist() == [0, 3, 5, 8, 11, 12, 11, 14]
    assert batch.target_places.tolist() == [1, 4, 6, 9, 12, 13, 14, 15]
    assert batch.targets_M.tolist() == [31, 42, 51, 63, 12, 13, 22, 23]
    assert batch.document_M.tolist() == [2, 3, 4, 5, 0, 0, 1, 1]
    assert batch.tokens == 16
    lengths = [2, 2, 3, 3, 3, 2, 2, 4, 4, 4, *[4] * 6]
    assert batch.document_lengths().tolist() == [lengths]


def test_packing_uses_the_room_that_a_shared_prompt_saves(pairs):
    """Two blocks of 10 tokens hold 6 and 5+5; without sharing there are three blocks."""
    found = [block.tolist() for block in blocks_of(pairs, packing=True, capacity=10)]
    assert sorted(found) == [[0, 1], [2, 3, 4, 5]]
    assert len(blocks_of(replace(pairs, shared=None), packing=True, capacity=10)) == 3


def test_pairs_that_are_torn_apart_are_a_mistake_of_the_caller(pairs):
    """The second document would lack its prompt."""
    with pytest.raises(AssertionError, match="stay together"):
        packed_batch(pairs, [[0, 5]], index=0)
