from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mens_exp.rows import cache as rows_cache
from mens_exp.rows.cache import CacheKey, TokenCounts, cache_root, encoded, encoded_parts, peek
from mens_exp.rows.documents import Encoded, Labelling

KEY = CacheKey(
    rows_sha256="r",
    tokenizer_sha256="t",
    template_sha256="c",
    special_tokens_sha256="s",
    date=None,
    allow_control_text=False,
    labelling=Labelling(objective="assistant", seq_len=8),
)
FILES = ["ids.npy", "supervised.npy", "offsets.npy", "meta.json"]


class Builder:
    """Counts how often documents are built."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return Encoded(
            ids=np.array([5, 6, 7, 8, 9], np.int32),
            supervised=np.array([0, 1, 1, 0, 1], bool),
            offsets=np.array([0, 3, 5], np.int64),
            truncated=2,
            dropped=1,
        )


def same(first, second):
    arrays = ("ids", "supervised", "offsets")
    return all(
        np.array_equal(getattr(first, name), getattr(second, name))
        and getattr(first, name).dtype == getattr(second, name).dtype
        for name in arrays
    ) and (first.truncated, first.dropped) == (second.truncated, second.dropped)


def test_second_call_reads_what_the_first_wrote(tmp_path):
    """Arrays, types and counts are equal, and nothing is built again."""
    build = Builder()
    first, counts = encoded(tmp_path, KEY, build)
    second, again = encoded(tmp_path, KEY, build)
    assert build.calls == 1
    assert same(first, second)
    assert counts == again


def test_counts_are_those_of_the_documents(tmp_path):
    """Two documents with five tokens, three supervised, are counted without opening the arrays."""
    _, counts = encoded(tmp_path, KEY, Builder())
    numbers = (counts.documents, counts.tokens, counts.supervised_tokens)
    assert (numbers, counts.truncated, counts.dropped) == ((2, 5, 3), 2, 1)
    assert peek(tmp_path, KEY) == counts


def test_nothing_is_known_of_what_was_never_built(tmp_path):
    """A cold cache gives None."""
    assert peek(tmp_path, KEY) is None


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CacheKey)])
def test_every_part_of_the_key_makes_another_place(tmp_path, field):
    """Every part of the key changes the directory."""
    others = {"allow_control_text": True, "labelling": Labelling(objective="causal", seq_len=8)}
    other = dataclasses.replace(KEY, **{field: others.get(field, "other")})
    encoded(tmp_path, KEY, Builder())
    assert other.directory(tmp_path) != KEY.directory(tmp_path)
    assert peek(tmp_path, other) is None


def test_another_version_of_encoding_makes_another_place(tmp_path, monkeypatch):
    """Entries of an older release are not read."""
    before = KEY.directory(tmp_path)
    monkeypatch.setattr(rows_cache, "ENCODING_VERSION", -1)
    assert KEY.directory(tmp_path) != before


def _flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _empty_array(file):
    np.save(file, np.array([], np.int32))


def _pickle(file):
    np.save(file, np.array([print]), allow_pickle=True)


@pytest.mark.parametrize("name", FILES[:3])
@pytest.mark.parametrize(
    "damage",
    [_flip, Path.unlink, _empty_array, _pickle, lambda file: file.write_bytes(b"")],
    ids=["flipped bit", "gone", "other array", "pickle", "empty"],
)
def test_damaged_array_is_built_again(tmp_path, damage, name):
    """The rebuilt entry is complete."""
    build = Builder()
    encoded(tmp_path, KEY, build)
    damage(KEY.directory(tmp_path) / name)
    documents, _ = encoded(tmp_path, KEY, build)
    assert build.calls == 2
    assert same(documents, build())
    calls = build.calls
    encoded(tmp_path, KEY, build)
    assert build.calls == calls


@pytest.mark.parametrize("meta", ["", "{", "[]", "{}", '{"counts": {}}', '{"counts": {"x": 1}}'])
def test_damaged_counts_are_no_counts(tmp_path, meta):
    """Documents with damaged counts are built again."""
    build = Builder()
    encoded(tmp_path, KEY, build)
    (KEY.directory(tmp_path) / "meta.json").write_text(meta, "utf-8")
    assert peek(tmp_path, KEY) is None
    encoded(tmp_path, KEY, build)
    assert build.calls == 2


def test_half_written_directory_is_ignored_and_replaced(tmp_path):
    """An entry without its last file, left by a killed writer, is ignored."""
    directory = KEY.directory(tmp_path)
    directory.mkdir(parents=True)
    np.save(directory / "ids.npy", np.array([1], np.int32))
    build = Builder()
    encoded(tmp_path, KEY, build)
    assert build.calls == 1
    assert sorted(file.name for file in directory.iterdir()) == sorted(FILES)


def test_failing_build_leaves_nothing(tmp_path):
    """No empty directory is left either."""

    def fail():
        raise RuntimeError("no documents")

    with pytest.raises(RuntimeError):
        encoded(tmp_path, KEY, fail)
    assert list(tmp_path.iterdir()) == []


def test_key_is_stored_beside_the_arrays(tmp_path):
    """The key is stored in readable form."""
    encoded(tmp_path, KEY, Builder())
    meta = json.loads((KEY.directory(tmp_path) / "meta.json").read_text("utf-8"))
    assert meta["key"] == KEY.record()
    assert TokenCounts(**meta["counts"]) == peek(tmp_path, KEY)


def test_lengths_are_counted_over_all_parts(tmp_path):
    """By hand: the longest document, and the sum of squared lengths."""
    parts = [
        Encoded(
            ids=np.ones(offsets[-1], np.int32),
            supervised=np.ones(offsets[-1], bool),
            offsets=np.array(offsets, np.int64),
            truncated=0,
            dropped=0,
        )
        for offsets in ([0, 3, 12], [0, 4])
    ]
    _, counts = encoded_parts(tmp_path, KEY, lambda _: parts)
    assert (counts.longest, counts.squares) == (9, 9 + 81 + 16)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MENS_EXP_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/mens_exp")),
        ({}, Path("/home/me/.cache/mens_exp")),
        ({"MENS_EXP_CACHE": "", "XDG_CACHE_HOME": ""}, Path("/home/me/.cache/mens_exp")),
    ],
)
def test_cache_folder_is_named_by_the_environment(monkeypatch, environment, expected):
    """The order is our variable, XDG_CACHE_HOME, the home directory."""
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for name in ("MENS_EXP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == expected
