from __future__ import annotations

import pytest

from mens_exp.corpus.row_files import Rows
from mens_exp.data.datamodule import RowsDataModule
from mens_exp.errors import DataError
from mens_exp.rows.readers import rows_digest
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import HfTokenizer


def pairs(count, *, width=5):
    """Return rows with answers of many lengths."""
    return [
        TrainingPair(prompt=f"row {i}", response="x" * (1 + width * (i % 7)), group=f"g{i}")
        for i in range(count)
    ]


def rows_of(train, val):
    return Rows(source="jsonl", train=train, val=val, heldout=[], sha256=rows_digest(train + val))


@pytest.fixture
def module(tiny_config, tiny_base, tmp_path):
    """Build a datamodule over 40 training and 30 validation rows."""
    tokenizer = HfTokenizer.from_directory(tiny_base.directory)

    def build(*overrides, rows=None):
        config = tiny_config("data.seq_len=128", "trainer.max_steps=5", *overrides)
        return RowsDataModule(
            config, rows or rows_of(pairs(40), pairs(70)[40:]), tokenizer, tmp_path
        )

    return build


def documents_in(stream):
    """Return the sorted ids of the documents in a stream."""
    return sorted(document for batch in stream for document in documents_of_batch(batch))


def documents_of_batch(batch):
    if batch.documents is not None:
        ids = batch.input_ids_BT[0].tolist()
        return [tuple(ids[start:end]) for start, end in batch.documents]
    assert batch.attention_mask_BT is not None
    rows = zip(batch.input_ids_BT, batch.attention_mask_BT, strict=True)
    return [tuple(ids[mask.bool()].tolist()) for ids, mask in rows]


def test_the_stream_holds_as_many_micro_batches_as_the_run_takes(
    module,
):
    """By hand: 5 steps of 4 micro-batches are 20."""
    assert len(module("trainer.accumulate_grad_batches=4").train_dataloader()) == 20


def test_max_epochs_alone_counts_steps_in_blocks(module):
    """By hand: 40 unpacked rows, 3 per micro-batch, 2 micro-batches per step: 14 steps in 2 epochs.

    27 micro-batches hold the 80 rows, the last of them two: nothing is trained on a third time.
    """
    data = module(
        "trainer.max_steps=-1",
        "trainer.max_epochs=2",
        "data.packing=false",
        "data.micro_batch_size=3",
        "trainer.accumulate_grad_batches=2",
    )
    assert data.max_steps == 14
    stream = data.train_dataloader()
    assert len(stream) == 27
    assert [len(stream.batch(i).input_ids_BT) for i in (0, 25, 26)] == [3, 3, 2]


@pytest.mark.parametrize(("steps", "expected"), [(5, 5), (500, 10)])
def test_the_lower_of_two_limits_holds(module, steps, expected):
    """By hand: one epoch of 40 unpacked rows is 10 steps of 4."""
    data = module(
        f"trainer.max_steps={steps}",
        "trainer.max_epochs=1",
        "data.packing=false",
        "trainer.accumulate_grad_batches=4",
    )
    assert data.max_steps == expected


def test_the_training_order_depends_on_the_seed(module):
    """The same seed gives the same first batches, and another seed gives others."""

    def first(seed):
        stream = module(f"seed={seed}").train_dataloader()
        return [stream.batch(i).input_ids_BT[0].tolist() for i in range(6)]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_no_row_is_missing_from_an_epoch(module):
    """One epoch of packed blocks holds every training row once."""
    data = module("trainer.max_steps=-1", "trainer.max_epochs=1")
    stream = data.train_dataloader()
    stream.total = len(stream.blocks)
    assert len(documents_in(stream)) == 40
    assert len(set(documents_in(stream))) == 40


@pytest.mark.parametrize("limit", [300, 100_000])
def test_arms_validate_on_the_same_documents(module, limit):
    """Seed, packing and micro-batch size do not change the validation documents."""
    cells = ([], ["seed=7"], ["data.packing=false"], ["data.micro_batch_size=3"])
    seen = [
        documents_in(module(f"data.val_max_tokens={limit}", *cell).val_dataloader())
        for cell in cells
    ]
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_validation_stops_once_it_has_its_tokens(module):
    """The document that reaches the limit is included."""
    data = module("data.val_max_tokens=300")
    tokens = sum(batch.tokens for batch in data.val_dataloader())
    assert 300 <= tokens < 300 + max(data.val_documents.lengths)


def test_validation_takes_everything_where_the_limit_is_higher(
    module,
):
    """All 30 rows are used once."""
    stream = module("data.val_max_tokens=100000", "data.micro_batch_size=4").val_dataloader()
    assert len(documents_in(stream)) == 30


def test_a_validation_sample_is_not_the_longest_documents(
    module,
):
    """The mean length of a third of the rows is within a third of the overall mean."""
    data = module("data.val_max_tokens=1000", rows=rows_of(pairs(9), pairs(300, width=12)))
    sample = documents_in(data.val_dataloader())
    mean, whole = sum(map(len, sample)) / len(sample), float(data.val_documents.lengths.mean())
    assert abs(mean / whole - 1) < 1 / 3


def test_packing_efficiency_is_the_share_of_room_that_tokens_fill(
    module,
):
    """It is the number of training tokens over blocks times capacity."""
    data = module()
    blocks = data.train_dataloader().blocks
    tokens = int(data.train_documents.lengths.sum())
    assert data.packing_efficiency_frac == pytest.approx(tokens / (len(blocks) * 128))
    assert data.documents_per_block == pytest.approx(40 / len(blocks))


@pytest.mark.parametrize("side", ["train", "val"])
def test_a_side_without_a_learned_token_is_refused(module, side):
    """Prompts longer than the sequence leave no target; the message gives a remedy."""
    long = [TrainingPair(prompt="y" * 200, response="x", group="g")]
    rows = rows_of(long, pairs(3)) if side == "train" else rows_of(pairs(3), long)
    with pytest.raises(DataError, match=rf"data \({side}\).*no row has.*raise data.seq_len"):
        module(rows=rows)


def test_encoding_is_opened_from_the_cache_the_second_time(module, monkeypatch):
    """With the encoder disabled, a second datamodule over the same rows still opens."""
    first = module()
    monkeypatch.setattr("mens_exp.data.datamodule.encode_parts", None)
    assert module().train_counts == first.train_counts


def test_bytes_are_those_of_the_learned_text_that_is_validated(
    module,
):
    """With byte-level ids every target is a byte, except one end marker per document."""
    data = module("data.val_max_tokens=200")
    documents = len(documents_in(data.val_dataloader()))
    learned = sum(batch.targets_M.numel() for batch in data.val_dataloader())
    assert 0 < documents < 30
    assert len(data.validated_ids) == learned
    assert data.validated_bytes == (learned - documents, None)
