from __future__ import annotations

import pytest

from mens_exp.config.data import SyntheticData
from mens_exp.config.rules.data import data_problems
from mens_exp.corpus import synthetic
from mens_exp.corpus.generator import generate as module
from mens_exp.corpus.generator.generate import benchmark_tasks, families_of
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import Side
from mens_exp.corpus.synthetic import counts, is_cached, load, made_by
from mens_exp.errors import DataError


@pytest.fixture
def config():
    return SyntheticData(rows=100)


def test_shares_are_of_the_rows(config):
    """Shares are rounded to at least one row; the rest is for training."""
    assert counts(config) == {Side.TRAIN: 90, Side.VAL: 5, Side.HELDOUT: 5}
    few = SyntheticData(rows=10, val_frac=0.01, heldout_frac=0.3)
    assert counts(few) == {Side.TRAIN: 6, Side.VAL: 1, Side.HELDOUT: 3}


def test_sides_are_families_of_their_own(tmp_path):
    """Sides follow the catalogue; each row has its family and theme, and bare code."""
    rows = load_rows(SyntheticData(rows=200, val_frac=0.2, heldout_frac=0.2), tmp_path)
    assert (rows.source, len(rows.train), len(rows.val), len(rows.heldout)) == (
        "synthetic",
        120,
        40,
        40,
    )
    for side in Side:
        themes = {family.name: family.theme for family in families_of(side)}
        assert all(themes[pair.group] == pair.category for pair in getattr(rows, side.value))
    everyone = [*rows.train, *rows.val, *rows.heldout]
    assert len({pair.id for pair in everyone}) == 200
    assert not any("```" in pair.response for pair in everyone)


def test_held_out_rows_are_the_benchmark(tmp_path):
    """They equal what a suite makes from the same seed and share."""
    rows = load_rows(SyntheticData(rows=100, generator_seed=4, repair_frac=0.5), tmp_path)
    assert rows.heldout == [task.pair for task in benchmark_tasks(4, 5, 0.5)]


def test_second_load_reads_the_cache(config, tmp_path, monkeypatch):
    """Rows and counts are the same, and nothing is generated."""
    assert not is_cached(config, tmp_path)
    first = load(config, tmp_path)
    assert is_cached(config, tmp_path)
    monkeypatch.setattr(module, "generate", None)
    assert load(config, tmp_path) == first


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-9], lambda whole: whole.replace(b"dropped", b"droped", 1)]
)
def test_damaged_cache_is_made_anew(config, tmp_path, damage):
    """The new cache is equal byte for byte, whether a row or the header was damaged."""
    first = load(config, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert load(config, tmp_path) == first
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [{"rows": 101}, {"generator_seed": 1}, {"repair_frac": 0.5}, {"heldout_frac": 0.1}],
    ids=str,
)
def test_what_changes_the_rows_names_another_cache(config, tmp_path, change):
    """Settings that do not change the rows, such as data.seq_len, keep the cache."""
    load(config, tmp_path)
    assert is_cached(SyntheticData(rows=100, seq_len=64), tmp_path)
    assert not is_cached(SyntheticData(**{"rows": 100} | change), tmp_path)


def test_another_generator_or_interpreter_names_another_cache(config, tmp_path, monkeypatch):
    """Repair rows quote error messages, which depend on the interpreter."""
    load(config, tmp_path)
    said = made_by()
    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "_python", lambda: "3.99")
        assert not is_cached(config, tmp_path)
        assert made_by() == said.rpartition(" ")[0] + " 3.99"
    monkeypatch.setattr(synthetic, "generator_sha256", lambda: "0" * 64)
    assert not is_cached(config, tmp_path)
    assert made_by() != said


def test_more_rows_than_there_are_is_refused(tmp_path, monkeypatch):
    """The error gives the number available, and the cache stays empty."""
    first = families_of(Side.TRAIN)[0]
    monkeypatch.setattr(module, "families_of", lambda side: [first])
    monkeypatch.setattr(module, "_FRUITLESS", 0)
    with pytest.raises(DataError, match="not have that many different tasks"):
        load_rows(SyntheticData(rows=10), tmp_path)
    assert not list(tmp_path.iterdir())


def test_shares_that_leave_nothing_to_train_on_are_refused(tmp_path, tiny_config):
    """Ten rows with five for validation and five held out are refused before any is generated."""
    config = tiny_config("data=synthetic")
    config.data = SyntheticData(rows=10, val_frac=0.48, heldout_frac=0.5)
    (problem,) = data_problems(config)
    assert (problem.where, "no rows are left to train on" in str(problem)) == ("data.rows", True)
    with pytest.raises(DataError, match="no row is left for train"):
        load_rows(config.data, tmp_path)
    config.data = SyntheticData(rows=10, val_frac=0.38, heldout_frac=0.5)
    assert list(data_problems(config)) == []


def test_shares_of_one_and_more_are_told_once(tiny_config):
    """Their sum is reported once, as for every source; NaN is left to the range check."""
    config = tiny_config("data=synthetic")
    config.data = SyntheticData(rows=10, val_frac=float("nan"))
    assert list(data_problems(config)) == []
    config.data = SyntheticData(rows=10, val_frac=0.6, heldout_frac=0.5)
    assert [problem.where for problem in data_problems(config)] == ["data.val_frac"]
