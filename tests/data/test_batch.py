from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mens_exp.data.batch import packed_batch, padded_batch
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
    """12, 13 and 21, 22 are learned from 11, 12 and 20, 21, at their places in one sequence."""
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
    """The same tokens are learned, at their places in the flattened rows of four."""
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
    """Where the pad id is also a learned token (an end marker, say), it stays learned and seen."""
    batch = padded_batch(documents, [[1], [0]], index=0, pad_id=22)
    assert batch.input_ids_BT.tolist()[0] == [20, 21, 22, 22]
    assert batch.attention_mask_BT is not None
    assert batch.attention_mask_BT.tolist()[0] == [1, 1, 1, 0]
    assert batch.targets_M.tolist() == [21, 22, 12, 13]


def test_blocks_of_a_micro_batch_join_into_one_packed_sequence(documents):
    """Two blocks give the sequence that one block of both documents gives."""
    apart, together = (packed_batch(documents, b, index=0) for b in ([[0], [1]], [[0, 1]]))
    assert torch.equal(apart.input_ids_BT, together.input_ids_BT)
    assert apart.documents == together.documents == ((0, 4), (4, 7))


def test_a_document_without_supervision_is_seen_and_not_learned(
    documents_of,
):
    """Its tokens count, its predictions do not exist."""
    documents = documents_of(IDS, [[0, 0, 0, 0], [0, 1, 1]])
    for batch in (
        packed_batch(documents, [[0, 1]], index=0),
        padded_batch(documents, [[0], [1]], index=0, pad_id=PAD),
    ):
        assert batch.tokens == 7
        assert batch.targets_M.tolist() == [21, 22]


def test_ids_and_indices_are_of_the_types_torch_indexes_with(documents):
    """int64 everywhere, whatever the cache stores."""
    for batch in (
        packed_batch(documents, [[0, 1]], index=0),
        padded_batch(documents, [[0], [1]], index=0, pad_id=PAD),
    ):
        for tensor in (batch.input_ids_BT, batch.position_ids_BT, batch.predict_M, batch.targets_M):
            assert tensor.dtype == torch.int64


def test_moving_a_batch_moves_every_tensor_and_nothing_else(documents):
    """On the meta device no tensor has values; bounds and counts stay as they are."""
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
    """In their order, packed and padded."""
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
    """In their order, within what a block holds."""
    lengths = np.random.default_rng(0).integers(2, 33, 120).tolist()
    documents = replace(random_documents(lengths), together=3)
    blocks = blocks_of(documents, packing=packing, capacity=100)
    units = [tuple(block[i : i + 3].tolist()) for block in blocks for i in range(0, len(block), 3)]
    assert sorted(units) == [(i, i + 1, i + 2) for i in range(0, 120, 3)]
    assert max(int(documents.lengths[block].sum()) for block in blocks) <= 100
    assert len(blocks) < 40 if packing else len(blocks) == 40
