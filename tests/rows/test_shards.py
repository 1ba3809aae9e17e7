from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
from typing import Any

import numpy as np
import pytest

from mens_exp.errors import DataError, Problems, SetupError
from mens_exp.rows import encode as shards
from mens_exp.rows.cache import CacheKey, encoded_parts
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode, encode_parts
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import VoxTokenizer

LABELLING = Labelling(objective="assistant", seq_len=64)
KEY = CacheKey(
    rows_sha256="r",
    tokenizer_sha256="t",
    template_sha256="c",
    special_tokens_sha256="s",
    date=None,
    allow_control_text=False,
    labelling=LABELLING,
)
PAIRS = [
    TrainingPair(prompt=f"row {i}", response="x" * (1 + 9 * (i % 11)), place=f"a.jsonl:{i + 1}")
    for i in range(50)
]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Use shards of ten rows, so that fifty rows are five shards of two processes."""
    monkeypatch.setattr(shards, "_SHARD", 10)
    monkeypatch.setattr(shards, "_POOL_FROM", 20)
    monkeypatch.setattr(shards, "usable_cores", lambda: 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dying(VoxTokenizer):
    """Kills its process at row 30 while a marker file exists."""

    flag: Any

    def encode_all(self, texts):
        if self.flag.exists() and any("row 30" in text for text in texts):
            os._exit(9)
        return super().encode_all(texts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusing(VoxTokenizer):
    """Refuses some rows."""

    rows: tuple[int, ...]

    def encode_all(self, texts):
        for row in self.rows:
            if any(f"row {row}<" in text for text in texts):
                wrong = [DataError("is refused", where=f"row {row}", found=i) for i in range(2)]
                raise Problems(wrong)
        return super().encode_all(texts)


def joined(parts):
    return [
        (part.ids[a:b].tolist(), part.supervised[a:b].tolist())
        for part in parts
        for a, b in zip(part.offsets[:-1], part.offsets[1:], strict=True)
    ]


@pytest.fixture(scope="module")
def together():
    """Return all rows encoded by this process at once."""
    return encode(PAIRS, VoxTokenizer(), LABELLING)


def test_shards_are_what_one_process_encodes(tmp_path, together):
    """Documents, order and counts are the same."""
    parts = encode_parts(PAIRS, VoxTokenizer(), LABELLING, tmp_path)
    assert len(parts) == 5
    assert joined(parts) == joined([together])
    assert sum(part.truncated for part in parts) == together.truncated > 0


def test_cached_parts_are_what_one_process_encodes(tmp_path, together):
    """Offsets are global, the digest is that of the arrays, and no shard is left."""
    documents, counts = encoded_parts(
        tmp_path, KEY, lambda kept: encode_parts(PAIRS, VoxTokenizer(), LABELLING, kept)
    )
    for name in ("ids", "supervised", "offsets"):
        assert np.array_equal(getattr(documents, name), getattr(together, name))
    _, alone = encoded_parts(tmp_path / "alone", KEY, lambda _: [together])
    assert counts == alone
    assert [one.name for one in (tmp_path / "encoded").iterdir()] == [KEY.directory(tmp_path).name]


def test_a_killed_build_goes_on_from_its_shards(tmp_path, together):
    """After a process died at row 30, finished shards are not encoded again."""
    flag, kept = tmp_path / "flag", tmp_path / "kept"
    flag.touch()
    encoder = Dying(flag=flag)
    with pytest.raises(SetupError, match=r"was ended.*finished are kept"):
        encode_parts(PAIRS, encoder, LABELLING, kept)
    before = {shard.name: shard.stat().st_ino for shard in kept.glob("0*")}
    assert 0 < len(before) < 5
    flag.unlink()
    parts = encode_parts(PAIRS, encoder, LABELLING, kept)
    after = {shard.name: shard.stat().st_ino for shard in kept.glob("0*")}
    assert joined(parts) == joined([together])
    assert len(after) == 5
    assert before.items() <= after.items()


def test_a_damaged_shard_is_encoded_again(tmp_path, together):
    """Shards have content digests, like the cache itself."""
    encode_parts(PAIRS, VoxTokenizer(), LABELLING, tmp_path)
    file = sorted(tmp_path.glob("0*/ids.npy"))[2]
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert joined(encode_parts(PAIRS, VoxTokenizer(), LABELLING, tmp_path)) == joined([together])


def test_the_first_shard_with_a_problem_tells_it(tmp_path):
    """All parts of the message survive the way from another process."""
    with pytest.raises(Problems) as caught:
        encode_parts(PAIRS, Refusing(rows=(45, 17)), LABELLING, tmp_path)
    told = [(type(one), one.what, one.where, one.found) for one in caught.value.problems]
    assert told == [(DataError, "is refused", "row 17", i) for i in range(2)]


def test_errors_keep_their_parts_when_pickled():
    """The remedy is kept too, and the text is not repeated."""
    error = DataError("is wrong", where="a:1", found=3, expected="2", remedy="do so")
    again = pickle.loads(pickle.dumps(error))  # pickled above
    assert (str(again), again.remedy, type(again)) == (str(error), "do so", DataError)


def test_few_rows_start_no_process(tmp_path, monkeypatch):
    """Nothing is written to disk for them either."""
    monkeypatch.setattr(shards, "_POOL_FROM", len(PAIRS) + 1)
    monkeypatch.setattr(shards, "ProcessPoolExecutor", None)
    (part,) = encode_parts(PAIRS, VoxTokenizer(), LABELLING, tmp_path / "kept")
    assert len(part) > 0
    assert not (tmp_path / "kept").exists()


def test_one_core_starts_no_process(tmp_path, monkeypatch, together):
    """A second process would not be faster; shards are still kept."""
    monkeypatch.setattr(shards, "usable_cores", lambda: 1)
    monkeypatch.setattr(shards, "ProcessPoolExecutor", None)
    parts = encode_parts(PAIRS, VoxTokenizer(), LABELLING, tmp_path)
    assert joined(parts) == joined([together])
    assert len(list(tmp_path.glob("0*"))) == len(parts) == 5


def test_a_part_of_the_shards_is_opened_when_asked(tmp_path, together):
    """A damaged shard is reported when it is opened; the others stay usable."""
    parts = encode_parts(PAIRS, VoxTokenizer(), LABELLING, tmp_path)
    file = sorted(tmp_path.glob("0*/ids.npy"))[2]
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert joined([*parts[:2]]) == joined([together])[:20]
    with pytest.raises(SetupError, match="changed when they were read back"):
        _ = parts[2]


def _build(root, log, start, sums):
    def build(_):
        with log.open("a") as file:
            file.write("built\n")
        return [encode(PAIRS * 20, VoxTokenizer(), LABELLING)]

    start.wait(30)
    documents, counts = encoded_parts(root, KEY, build)
    sums.put((int(documents.ids.sum()), counts.sha256))


def test_processes_that_want_the_same_documents_build_them_once(tmp_path):
    """Of three concurrent processes one encodes and two wait for its result."""
    context = multiprocessing.get_context("spawn")
    start, sums = context.Barrier(3), context.Queue()
    arguments = (tmp_path / "cache", tmp_path / "log", start, sums)
    processes = [context.Process(target=_build, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = {sums.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    assert (tmp_path / "log").read_text() == "built\n"
    assert [one.name for one in (tmp_path / "cache").iterdir()] == ["encoded"]
