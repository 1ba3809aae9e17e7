from __future__ import annotations

import dataclasses
import json

import pytest

from mens_exp.config.data import DataConfig, JsonlData, MixData, StdlibData
from mens_exp.corpus import stdlib
from mens_exp.corpus.source import cache_key, load_rows, rows_read_once
from mens_exp.corpus.split import Side
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.model import sources
from mens_exp.rows.readers import rows_digest
from mens_exp.tokenizer.implementations import HfTokenizer

FUNCTION = 'def {0}(a):\n    """Do {0}."""\n    b = a + "{0}"\n    return b\n'


@pytest.fixture
def jsonl(tmp_path):
    """Write two rows for each of ten groups, and return the configuration."""

    def written(groups=10, **values):
        rows = [
            {"prompt": f"p{group}-{row}", "response": "r", "group": f"g{group}"}
            for group in range(groups)
            for row in range(2)
        ]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return JsonlData(path=str(path), **{"val_frac": 0.2, "heldout_frac": 0.2} | values)

    return written


def groups(rows, side):
    return {pair.group for pair in getattr(rows, side.value)}


def test_rows_of_a_file_are_split_by_group(jsonl, tmp_path):
    """Every row is on one side with its group, in the order of the file."""
    rows = load_rows(jsonl(), tmp_path)
    assert (rows.source, len(rows.train) + len(rows.val) + len(rows.heldout)) == ("jsonl", 20)
    sides = [groups(rows, side) for side in Side]
    assert sum(map(len, sides)) == len(set().union(*sides)) == 10
    assert all(sides)
    assert [pair.prompt for pair in rows.val] == sorted(pair.prompt for pair in rows.val)


def test_file_under_the_home_directory_is_found(jsonl, tmp_path, monkeypatch):
    """A tilde is expanded, as in a shell."""
    jsonl()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    config = JsonlData(path="~/rows.jsonl", val_frac=0.2, heldout_frac=0.2)
    assert load_rows(config, tmp_path).train


def test_standard_library_is_extracted_and_cached(tmp_path, monkeypatch):
    """Files are the groups; the second call reads the cache."""
    library = tmp_path / "lib"
    library.mkdir()
    for name in "abcdefgh":
        (library / f"{name}.py").write_text(FUNCTION.format(name))
    monkeypatch.setattr(stdlib, "_root", lambda _root: library)
    config = StdlibData(val_frac=0.2, heldout_frac=0.2)
    rows = load_rows(config, tmp_path / "cache")
    assert rows.source == "stdlib"
    assert set().union(*(groups(rows, side) for side in Side)) == {f"{n}.py" for n in "abcdefgh"}
    monkeypatch.setattr(stdlib, "extract", None)
    assert load_rows(config, tmp_path / "cache") == rows


@pytest.mark.parametrize("count", [1, 2, 3])
def test_too_few_groups_to_validate_on_are_refused(jsonl, tmp_path, count):
    """One group cannot serve training and validation; two can."""
    if count == 1:
        with pytest.raises(DataError, match="no row is left for val") as caught:
            load_rows(jsonl(count), tmp_path)
        assert caught.value.found == "2 rows"
        assert "group" in str(caught.value.remedy)
    else:
        rows = load_rows(jsonl(count), tmp_path)
        assert (bool(rows.train), bool(rows.val), bool(rows.heldout)) == (True, True, count > 2)


def test_faults_of_the_file_are_passed_on(tmp_path):
    """All errors of the file are reported by line."""
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n[]\n", "utf-8")
    with pytest.raises(Problems) as caught:
        load_rows(JsonlData(path=str(path)), tmp_path)
    assert {str(p.where) for p in caught.value.problems} == {f"{path}:1", f"{path}:2"}


def test_hashes_are_those_of_the_rows(jsonl, tmp_path):
    """Digests are per side and of all rows; a changed share moves rows between sides only."""
    rows = load_rows(jsonl(), tmp_path)
    assert rows.side_sha256(Side.TRAIN) == rows_digest(rows.train)
    assert len({rows.sha256, *(rows.side_sha256(side) for side in Side)}) == 4
    other = load_rows(jsonl(val_frac=0.4), tmp_path)
    assert other.sha256 == rows.sha256
    assert other.side_sha256(Side.VAL) != rows.side_sha256(Side.VAL)


def test_cache_key_follows_all_that_shapes_ids(jsonl, tmp_path, tiny_config):
    """The key covers rows, tokenizer, template, control tokens and labels, not seed or batch."""
    sources.write_byte_level_tokenizer(tmp_path)
    tokenizer = HfTokenizer.from_directory(tmp_path)
    rows = load_rows(jsonl(), tmp_path)
    key = cache_key(tiny_config(), rows, Side.TRAIN, tokenizer)
    assert key.rows_sha256 == rows.side_sha256(Side.TRAIN)
    assert (key.tokenizer_sha256, key.template_sha256) == (
        tokenizer.sha256,
        tokenizer.template_sha256,
    )
    unmoved = tiny_config("seed=7", "data.micro_batch_size=2", "data.packing=false", "lora.r=4")
    assert cache_key(unmoved, rows, Side.TRAIN, tokenizer) == key
    moved = [
        cache_key(tiny_config("objective=causal"), rows, Side.TRAIN, tokenizer),
        cache_key(tiny_config("data.seq_len=64"), rows, Side.TRAIN, tokenizer),
        cache_key(tiny_config(), rows, Side.VAL, tokenizer),
        cache_key(
            tiny_config(),
            rows,
            Side.TRAIN,
            dataclasses.replace(tokenizer, chat_template="{{ messages }}"),
        ),
        cache_key(tiny_config("objective.turns=last"), rows, Side.TRAIN, tokenizer),
        cache_key(tiny_config("data.truncation=left"), rows, Side.TRAIN, tokenizer),
        cache_key(
            tiny_config(),
            rows,
            Side.TRAIN,
            dataclasses.replace(tokenizer, allow_control_text=True),
        ),
        cache_key(
            tiny_config(), rows, Side.TRAIN, dataclasses.replace(tokenizer, special_tokens={})
        ),
    ]
    assert len({key, *moved}) == 9


def test_every_source_has_its_own_fields():
    """Only file sources have a path."""
    assert isinstance(JsonlData(path="x"), DataConfig)
    assert not hasattr(StdlibData(), "path")


def test_kept_rows_are_read_once_and_taken_by_a_reader_that_keeps_none(jsonl, tmp_path):
    """Changed rows or settings are read again; outside the context nothing is kept."""
    config = jsonl()
    with rows_read_once():
        first = load_rows(config, tmp_path, keep=True)
        with rows_read_once():
            assert load_rows(config, tmp_path, keep=True) is first
        assert load_rows(config, tmp_path) is first
        assert load_rows(config, tmp_path) is not first
        first = load_rows(config, tmp_path, keep=True)
        second = load_rows(jsonl(groups=20), tmp_path, keep=True)
        assert len(second.train) > len(first.train)
        third = load_rows(jsonl(groups=20, val_frac=0.4), tmp_path, keep=True)
        assert len(third.val) > len(second.val)
    assert load_rows(config, tmp_path, keep=True) is not load_rows(config, tmp_path, keep=True)


def test_a_mix_of_files_is_read_once_and_one_of_a_missing_file_is_refused(tmp_path):
    """The sources of a mix are identified by their files."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        rows = [{"prompt": f"{file.name} {n}", "response": "r"} for n in range(20)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    mixed = MixData(
        sources=[{"path": str(file), "weight": 1} for file in files],
        val_frac=0.2,
        heldout_frac=0.1,
    )
    with rows_read_once():
        first = load_rows(mixed, tmp_path, keep=True)
        assert load_rows(mixed, tmp_path, keep=True) is first
        files[1].unlink()
        with pytest.raises(MensError, match="no such file"):
            load_rows(mixed, tmp_path)
