from __future__ import annotations

import json

import pytest

from mens_exp.config.data import FilterConfig, JsonlData, StdlibData
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import filtered
from mens_exp.errors import DataError
from mens_exp.rows.schema import TrainingPair


def row(**fields):
    return TrainingPair(**{"prompt": "p", "response": "r", **fields})


def passes(pair, **filters):
    return filtered([pair], FilterConfig(**filters))[0] == [pair]


@pytest.mark.parametrize(("rating", "passing"), [(None, True), (2, False), (3, True), (5, True)])
def test_rating_is_a_floor_that_unrated_rows_pass(rating, passing):
    """The filter is a minimum; rows without a rating pass."""
    assert passes(row(rating=rating), min_rating=3) is passing


@pytest.mark.parametrize(
    ("category", "passing"),
    [(None, False), ("Idiomatic Rust", True), ("unidiomatic", True), ("docs", False), ("", False)],
)
def test_category_is_part_of_a_tag_that_every_row_needs(category, passing):
    """The match is a case-insensitive substring; rows without a category fail."""
    assert passes(row(category=category), category="IDIOM") is passing
    assert passes(row(category=category), exclude_category="IDIOM") is not passing


@pytest.mark.parametrize(
    ("filters", "passing"),
    [
        ({"min_chars": 10}, True),
        ({"min_chars": 11}, False),
        ({"max_chars": 10}, True),
        ({"max_chars": 9}, False),
    ],
)
def test_length_is_that_of_all_turns(filters, passing):
    """Characters of all turns count (here four, three, two and one), without the system prompt."""
    pair = row(prompt="ab", response="c", history=(("defg", "hij"),), system="long " * 9)
    assert passes(pair, **filters) is passing


@pytest.mark.parametrize(
    ("fields", "passing"),
    [
        ({"language": "Rust"}, True),
        ({"language": "python", "response": "```rust\nfn f() {}\n```"}, False),
        ({"response": "See:\n\n```rust\nfn f() {}\n```\n"}, True),
        ({"response": "```rust,ignore\nfn f() {}\n```"}, True),
        ({"response": "~~~~ RUST title=a\nfn f() {}\n~~~~"}, True),
        ({"response": "```rusty\nx\n```"}, False),
        ({"response": "```\nrust\n```"}, False),
        ({"prompt": "```rust\nfn f() {}\n```"}, False),
        ({"history": (("q", "```rust\nx\n```"),)}, True),
        ({}, False),
    ],
)
def test_language_is_the_rows_own_or_that_of_a_fence_of_an_answer(fields, passing):
    """The row's field decides; otherwise the fence of an answer does, never one of a prompt."""
    assert passes(row(**fields), language="rust") is passing


def test_row_counts_for_the_first_filter_that_it_fails():
    """Each row counts for one filter, and the remaining rows keep their order."""
    pairs = [row(rating=1), row(rating=5, category="b"), row(category="a"), row(rating=1)]
    kept, refused = filtered(pairs, FilterConfig(min_rating=3, category="a"))
    assert kept == [pairs[2]]
    assert refused == {"min_rating": 2, "category": 1}


def test_no_filter_takes_every_row():
    """Without filters every row passes."""
    assert filtered([row(), row()], FilterConfig()) == ([row(), row()], {})


@pytest.fixture
def load(tmp_path):
    """Load ten rows rated 1 to 5 twice, and two validation rows if asked."""

    def loaded(*, count=10, val=False, **filters):
        path, other = tmp_path / "rows.jsonl", tmp_path / "val.jsonl"
        rows = [{"prompt": f"p{n}", "response": "r", "rating": n % 5 + 1} for n in range(count)]
        path.write_text("".join(json.dumps(one) + "\n" for one in rows), "utf-8")
        more = [{"prompt": f"v{n}", "response": "r", "rating": n} for n in (1, 4)]
        other.write_text("".join(json.dumps(one) + "\n" for one in more), "utf-8")
        config = JsonlData(
            path=str(path),
            val_path=str(other) if val else None,
            val_frac=0.2,
            heldout_frac=0.2,
            filter=FilterConfig(**filters),
        )
        return load_rows(config, tmp_path)

    return loaded


def test_counts_of_filters_are_recorded(load):
    """A filter that removed nothing is recorded with zero."""
    rows = load(min_rating=3, max_chars=99)
    assert len(rows.train) + len(rows.val) + len(rows.heldout) == 6
    assert rows.record()["filtered"] == {
        "rows": 10,
        "kept": 6,
        "refused": {"min_rating": 4, "max_chars": 0},
    }
    assert "filtered" not in load().record()


def test_filters_move_no_row_to_another_side(load):
    """Filters run before the split, which depends only on groups if there are enough."""
    every, some = load(count=200), load(count=200, min_rating=2)
    assert set(some.val) <= set(every.val)
    assert set(some.train) <= set(every.train)
    assert some.sha256 != every.sha256


def test_rows_to_validate_on_are_filtered_alike(load):
    """Validation rows pass through the same filters."""
    rows = load(val=True, min_rating=3)
    assert [pair.prompt for pair in rows.val] == ["v4"]
    assert rows.record()["filtered"]["rows"] == 12


@pytest.mark.parametrize("val", [False, True])
def test_filters_that_leave_nothing_are_refused(load, val):
    """The error gives the count of each filter."""
    with pytest.raises(DataError, match="no row passes the filters") as caught:
        load(val=val, min_rating=5, max_chars=2)
    assert caught.value.where == "data.filter"
    assert caught.value.found == "10 rows: min_rating refused 8, max_chars refused 2"


def test_rows_to_validate_on_that_no_filter_leaves_are_refused(load):
    """This is an error even if training rows remain."""
    with pytest.raises(DataError, match="2 rows: min_rating refused 2"):
        load(val=True, min_rating=5)


def test_filters_work_on_every_source(tmp_path, monkeypatch):
    """Generated and extracted rows have categories too."""
    from mens_exp.corpus import stdlib

    for name in "abcdefgh":
        source = f'def {name}(a):\n    """Do {name}."""\n    b = a + "{name}"\n    return b\n'
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(stdlib, "_root", lambda _root: tmp_path)
    taken = StdlibData(filter=FilterConfig(category="stdlib"))
    assert load_rows(taken, tmp_path / "cache").record()["filtered"]["kept"] == 8
    with pytest.raises(DataError, match="category refused 8"):
        load_rows(StdlibData(filter=FilterConfig(category="test")), tmp_path / "cache")


def test_filters_that_contradict_are_refused(tiny_config):
    """Contradicting filters are refused before any row is read."""
    from mens_exp.config.validate import problems_of

    (problem,) = problems_of(tiny_config("data.filter.min_chars=9", "data.filter.max_chars=8"))
    assert problem.where == "data.filter.min_chars"
    (problem,) = problems_of(tiny_config("data.filter.min_rating=6"))
    assert (problem.where, problem.what) == ("data.filter.min_rating", "out of range")
