from __future__ import annotations

import json
import pickle
from itertools import islice, zip_longest

import pytest
import torch
import two_answers

from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import Side, side_of
from mens_exp.data.datamodule import RowsDataModule
from mens_exp.data.stream import StreamedMicroBatches
from mens_exp.errors import DataError
from mens_exp.tokenizer.implementations import HfTokenizer

STREAMED = ["data.streaming=true", "data.shuffle_buffer=11"]


@pytest.fixture
def path(tmp_path):
    """Write sixty rows of many lengths."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"row {i}", "response": "x" * (1 + 5 * (i % 7))} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def module(tiny_config, tiny_base, tmp_path, path):
    """Build a datamodule of forty micro-batches over the rows."""
    tokenizer = HfTokenizer.from_directory(tiny_base.directory)

    def build(*overrides, objective=None):
        usual = ["data=jsonl", f"data.path={path}", "data.val_frac=0.3", "data.heldout_frac=0.1"]
        config = tiny_config(*usual, "data.seq_len=128", "trainer.max_steps=10", *overrides)
        config.objective = objective or config.objective
        return RowsDataModule(config, load_rows(config.data, tmp_path), tokenizer, tmp_path)

    return build


def stream_of(module, *overrides):
    stream = module(*STREAMED, *overrides).train_dataloader()
    assert isinstance(stream, StreamedMicroBatches)
    return stream


def same(first, second):
    """Return whether two lists of micro-batches are equal for the model."""
    pairs = list(zip_longest(first, second))
    return bool(pairs) and all(
        a is not None
        and b is not None
        and (a.documents, a.tokens, a.index) == (b.documents, b.tokens, b.index)
        and torch.equal(a.input_ids_BT, b.input_ids_BT)
        and torch.equal(a.position_ids_BT, b.position_ids_BT)
        and torch.equal(a.predict_M, b.predict_M)
        and torch.equal(a.targets_M, b.targets_M)
        for a, b in pairs
    )


def documents_in(batches):
    found = []
    for batch in batches:
        if batch.documents is not None:
            ids = batch.input_ids_BT[0].tolist()
            found += [tuple(ids[start:end]) for start, end in batch.documents]
        else:
            assert batch.attention_mask_BT is not None
            rows = zip(batch.input_ids_BT, batch.attention_mask_BT, strict=True)
            found += [tuple(ids[mask.bool()].tolist()) for ids, mask in rows]
    return found


@pytest.mark.parametrize("other", [[], ["data.packing=false"], ["data.micro_batch_size=3"]])
def test_with_all_rows_in_the_buffer_it_is_the_run_that_read_them_first(module, other):
    """All micro-batches agree over several epochs, and so does the loss."""
    streamed = module("data.streaming=true", "data.shuffle_buffer=60", *other)
    first = module(*other)
    assert len(first.train_dataloader()) > 2 * len(first.blocks) / 3
    assert same(streamed.train_dataloader(), first.train_dataloader())
    assert documents_in(streamed.val_dataloader()) == documents_in(first.val_dataloader())


@pytest.mark.parametrize("buffer", [11, 30, 59])
def test_an_epoch_holds_each_document_once(module, buffer):
    """They are the documents of a run that reads all rows first, reordered in each epoch."""
    first = module("data.packing=false", "trainer.max_steps=30")
    count = len(first.train_documents)
    expected = documents_in(first.train_dataloader().batch(i) for i in range(count))
    overrides = ["data.packing=false", "trainer.max_steps=30", f"data.shuffle_buffer={buffer}"]
    stream = module("data.streaming=true", *overrides).train_dataloader()
    epochs = documents_in(islice(iter(stream), 2 * count))
    assert sorted(epochs[:count]) == sorted(epochs[count:]) == sorted(expected)
    assert epochs[:count] != epochs[count:]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_stopped_run_goes_on_bit_for_bit(module, packing, size):
    """Every position is tried: inside windows, at their ends, and across epochs."""
    overrides = [f"data.packing={packing}", f"data.micro_batch_size={size}"]
    through = list(stream_of(module, *overrides))
    assert len(through) == 40
    stopped = stream_of(module, *overrides)
    resumed = stream_of(module, *overrides)
    for number, batch in enumerate(stopped, start=1):
        stopped.position = batch.index + 1  # as training does, with one micro-batch prefetched
        state = pickle.loads(pickle.dumps(stopped.state_dict()))  # pickled above
        if number % 3 == 0 and number < 40:
            resumed.load_state_dict(state)
            assert same(resumed, through[number:])


def test_a_run_that_resumes_twice_goes_on(module):
    """The second resume starts from a state saved after the first."""
    through = list(stream_of(module))
    state = stream_of(module).state_dict()
    taken = []
    for count in (3, 1, 17, 2, 17):
        stream = stream_of(module)
        stream.load_state_dict(state)
        for batch in islice(iter(stream), count):
            taken.append(batch)
            stream.position = batch.index + 1
        state = stream.state_dict()
    assert same(taken, through)


def test_the_state_does_not_grow(module):
    """It has the position of one window and no rows."""
    stream = stream_of(module, "trainer.max_steps=100")
    sizes = []
    for batch in stream:
        stream.position = batch.index + 1
        sizes.append(len(pickle.dumps(stream.state_dict())))
    assert max(sizes) < min(sizes) + 200 < 4000


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_together_take_the_order_of_one(module, world):
    """This includes resuming with another number of ranks inside an epoch."""
    alone = list(stream_of(module))
    ranks = [stream_of(module) for _ in range(world)]
    for rank, stream in enumerate(ranks):
        stream.share(rank, world)
    turns = [one for turn in zip(*ranks, strict=True) for one in turn]
    assert same((one for one in turns if not one.is_filler), alone)
    assert [one.is_filler for one in turns[len(alone) :]] == [True] * (-len(alone) % world)
    stopped = stream_of(module)
    for batch in islice(iter(stopped), 12):
        stopped.position = batch.index + 1
    for rank, stream in enumerate(ranks):
        stream.load_state_dict(stopped.state_dict())
        mine = (one for one in stream if not one.is_filler)
        assert same(mine, [one for one in alone[12:] if one.index % world == rank])


def test_another_seed_gives_another_order(module):
    """The documents of each window are the same."""
    first, other = (list(stream_of(module, f"seed={seed}")) for seed in (1, 2))
    assert not same(first, other)
    assert same(first, stream_of(module, "seed=1"))


def test_what_was_consumed_is_told(module):
    """Rows and documents count up to the end of the last micro-batch's window."""
    data = module(*STREAMED, "data.packing=false")
    assert data.consumed() == {}
    stream = data.train_dataloader()
    first = len(data.train_documents)
    taken = list(islice(iter(stream), first + 1))
    stream.position = taken[-2].index + 1
    told = data.consumed()
    assert (told["epoch"], told["window"], told["rows"]["rows"]) == (0, 0, 11)
    assert told["documents"] == first
    stream.position = first + 1
    assert data.consumed()["rows"]["rows"] == 22
    assert data.consumed()["rows_sha256"] != told["rows_sha256"]


def test_documents_that_lose_everything_are_counted(module, path):
    """A long prompt in the second window leaves no target."""
    lines = path.read_text("utf-8").splitlines()
    group = next(name for name in map(str, range(99)) if side_of(name, 0.3, 0.1) is Side.TRAIN)
    lines[15] = json.dumps({"prompt": "y" * 300, "response": "z", "group": group})
    path.write_text("\n".join(lines) + "\n", "utf-8")
    data = module(*STREAMED, "data.packing=false")
    stream = data.train_dataloader()
    for batch in islice(iter(stream), len(data.train_documents) + 1):
        stream.position = batch.index + 1
    assert (data.consumed()["dropped"], data.consumed()["truncated"]) == (1, 1)


def test_first_rows_that_change_while_training_are_refused(module, path):
    """The first rows are encoded once and must not change afterwards."""
    stream = stream_of(module)
    text = path.read_text("utf-8")
    path.write_text(text.replace("xxx", "xyx"), "utf-8")
    with pytest.raises(DataError, match="first rows have changed since"):
        next(iter(stream))


def test_one_micro_batch_can_be_asked_for(module):
    """Indexing gives the same micro-batch as iterating."""
    stream = stream_of(module)
    assert same([stream.batch(i) for i in (0, 7, 25)], [list(stream)[i] for i in (0, 7, 25)])


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_documents_of_a_row_arrive_together(module, path, monkeypatch, packing, streaming):
    """This holds in training and validation, with and without streaming."""
    two_answers.offer(monkeypatch)
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    rows = [row | {"fields": {"worse": "y" * (1 + i % 5)}} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    streamed = STREAMED if streaming else ()
    data = module(*streamed, f"data.packing={packing}", objective=two_answers.SETTINGS)
    for stream in (data.train_dataloader(), data.val_dataloader()):
        for batch in stream:
            numbers = batch.document_M.unique_consecutive().tolist()
            assert [n + 1 for n in numbers[::2]] == numbers[1::2]
            worse = batch.document_M % 2 == numbers[0] % 2 ^ 1
            assert (batch.extra["place"] < 0).tolist() == worse.tolist()
