from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.config.data import FilterConfig, MixData, MixStop, OnBadRow
from mens_exp.corpus.mix import estimated_tokens, mixed
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import group_of
from mens_exp.errors import DataError, Problems
from mens_exp.rows.schema import TrainingPair


def corpora(*sizes):
    """Return sources a, b, … with so many rows, each named after its source and number."""
    return {
        name: [TrainingPair(prompt=f"{name}{n}", response="r") for n in range(size)]
        for name, size in zip("abcdef", sizes, strict=False)
    }


def draw(sizes, weights, **values):
    named = dict(zip("abcdef", weights, strict=False))
    rows, _ = mixed(corpora(*sizes), named, MixData(sources=[], **values))
    return [pair.prompt for pair in rows]


def by_source(prompts):
    return Counter(prompt[0] for prompt in prompts)


def test_fractional_weights_are_the_shares_of_a_hundred_thousand_rows():
    """The shares 0.5, 0.3 and 0.2 are exact to the row; the requirement is half a percent."""
    sizes = (60_000, 30_000, 40_000)
    rows = draw(sizes, (0.5, 0.3, 0.2), stop=MixStop.first_exhausted)
    assert len(rows) == 100_000
    assert by_source(rows) == {"a": 50_000, "b": 30_000, "c": 20_000}


@given(
    weights=st.lists(st.floats(0.05, 20), min_size=2, max_size=5).map(tuple),
    sizes=st.lists(st.integers(1, 40), min_size=5, max_size=5).map(tuple),
)
def test_no_count_is_more_than_a_row_per_source_off_its_share(weights, sizes):
    """This holds after any number of rows."""
    rows = draw(sizes[: len(weights)], weights, stop=MixStop.first_exhausted)
    counts = Counter()
    for total, prompt in enumerate(rows, start=1):
        counts[prompt[0]] += 1
        for name, weight in zip("abcdef", weights, strict=False):
            assert abs(counts[name] - weight / sum(weights) * total) < len(weights)


def test_only_the_ratios_of_weights_count():
    """Weights of 2 and 1 are shares of 2/3 and 1/3."""
    assert draw((9, 9), (2, 1)) == draw((9, 9), (0.5, 0.25))


def test_all_exhausted_goes_through_every_source():
    """Ten rows at 1/5 make fifty; the other ten are repeated in whole passes."""
    rows = draw((10, 10), (0.2, 0.8))
    assert by_source(rows) == {"a": 10, "b": 40}
    assert set(Counter(rows).values()) == {1, 4}


def test_first_exhausted_repeats_no_row():
    """The mix ends when a source that is due is exhausted."""
    rows = draw((10, 10), (0.2, 0.8), stop=MixStop.first_exhausted)
    assert by_source(rows) == {"a": 2, "b": 10}
    assert len(set(rows)) == len(rows)


def test_budget_ends_at_so_many_tokens():
    """The row that reaches the budget is included."""
    token = estimated_tokens(TrainingPair(prompt="a0", response="r"))
    assert token == pytest.approx(40 + 3 / 3.4)
    rows = draw((5, 5), (1, 1), stop=MixStop.budget, budget_tokens=int(20 * token))
    assert by_source(rows) == {"a": 10, "b": 10}


def test_seed_decides_which_rows_and_not_how_many():
    """The same seed gives the same rows in the same order."""
    some = {"stop": MixStop.first_exhausted}
    first, again, other = (draw((30, 9), (1, 1), mix_seed=seed, **some) for seed in (1, 1, 2))
    assert first == again != other
    assert by_source(first) == by_source(other)


def test_every_pass_has_an_order_of_its_own():
    """Each pass is complete and shuffled differently."""
    rows = [row for row in draw((20, 1), (20, 0.5)) if row[0] == "a"]
    assert (len(rows), set(rows[:20]), rows[:20] != rows[20:]) == (40, set(rows[20:]), True)


def test_shares_are_recorded():
    """Recorded are requested and actual shares and the passes over each source."""
    _, record = mixed(corpora(10, 10), {"a": 1, "b": 4}, MixData(sources=[]))
    assert record["b"] == {
        "weight": 4,
        "share_asked": 0.8,
        "share": 0.8,
        "rows": 40,
        "of": 10,
        "passes": 4.0,
    }


def test_source_without_rows_is_refused():
    """Its share could not be met."""
    with pytest.raises(DataError, match="has no row to train on · found b"):
        draw((3, 0), (1, 1))


def test_source_that_would_be_repeated_without_end_is_refused():
    """A weight that is 1,000 times too small would fill the memory with other rows."""
    with pytest.raises(DataError, match="repeated over 100 times · found b"):
        draw((10, 10), (0.001, 1))


@pytest.fixture
def file(tmp_path):
    """Write rows, each a prompt or a dict, to a file of this name; return its path."""

    def written(name, *rows):
        path = tmp_path / name
        whole = [{"prompt": row, "response": "r"} if isinstance(row, str) else row for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in whole), "utf-8")
        return str(path)

    return written


def load(*sources, **values):
    from pathlib import Path

    shares = {"val_frac": 0.2, "heldout_frac": 0.2}
    return load_rows(MixData(sources=list(sources), **{**shares, **values}), Path("unused"))


def numbered(name, count):
    return [f"{name}{n}" for n in range(count)]


def test_training_rows_are_mixed_and_the_others_left_as_they_are(
    file,
):
    """Validation and held-out rows occur once, whatever the weights."""
    a, b = file("a.jsonl", *numbered("a", 200)), file("b.jsonl", *numbered("b", 50))
    rows = load({"path": a, "weight": 1}, {"path": b, "weight": 3})
    counts = by_source([pair.prompt for pair in rows.train])
    assert counts["b"] == pytest.approx(3 * counts["a"], abs=4)
    apart = [pair.prompt for pair in (*rows.val, *rows.heldout)]
    assert len(apart) == len(set(apart))
    assert len(set(apart) | {pair.prompt for pair in rows.train}) == 250
    mixed_rows = rows.record()["mixed"]
    assert (mixed_rows["rows"], mixed_rows["stop"]) == (len(rows.train), "all_exhausted")
    assert mixed_rows["sources"]["b.jsonl"]["share"] == pytest.approx(0.75, abs=0.01)
    assert [one.rows for one in rows.files] == [200, 50]


def test_prompt_of_two_sources_is_on_one_side(file):
    """All sources are split together."""
    same = [f"p{n}" for n in range(100)]
    other = [{"prompt": prompt, "response": "another"} for prompt in same]
    a, b = file("a.jsonl", *same), file("b.jsonl", *other)
    rows = load({"path": a, "weight": 1}, {"path": b, "weight": 1})
    trained = {group_of(pair) for pair in rows.train}
    assert trained.isdisjoint(group_of(pair) for pair in (*rows.val, *rows.heldout))


def test_preferred_rows_of_one_file_come_two_to_one(file):
    """Rows are selected by category within one file, as in SigilDERG's second phase."""
    rows = [
        {"prompt": f"p{n}", "response": "r", "category": "idiomatic" if n % 4 else "plain"}
        for n in range(200)
    ]
    path = file("rows.jsonl", *rows)
    drawn = load(
        {"name": "preferred", "path": path, "weight": 2, "filter": {"category": "idiomatic"}},
        {"name": "rest", "path": path, "weight": 1, "filter": {"exclude_category": "idiomatic"}},
    )
    sources = drawn.record()["mixed"]["sources"]
    assert sources["preferred"]["share"] == pytest.approx(2 / 3, abs=0.01)
    assert sources["preferred"]["refused"] == {"category": 50}
    assert sources["rest"]["refused"] == {"exclude_category": 150}


def test_every_source_is_read_in_its_own_way(file):
    """Each entry has its own format and columns."""
    a = file("a.jsonl", *numbered("a", 9))
    b = file("b.jsonl", *({"q": f"b{n}", "a": "r"} for n in range(9)))
    rows = load(
        {"path": a, "weight": 1},
        {"path": b, "weight": 1, "columns": {"prompt": "q", "response": "a"}},
    )
    assert set(by_source([pair.prompt for pair in rows.train])) == {"a", "b"}


def test_filter_and_quarantine_of_the_mix_are_for_all_sources(file):
    """Counts are over all sources."""
    a = file("a.jsonl", *numbered("a", 9), {"prompt": "p"})
    b = file("b.jsonl", *numbered("b", 8), "long enough", {"prompt": ""})
    rows = load(
        {"path": a, "weight": 1},
        {"path": b, "weight": 1},
        on_bad_row=OnBadRow.quarantine,
        max_bad_frac=0.1,
        filter=FilterConfig(max_chars=5),
    )
    record = rows.record()
    assert (record["quarantined"]["rows"], record["quarantined"]["bad"]) == (20, 2)
    assert record["filtered"] == {"rows": 18, "kept": 17, "refused": {"max_chars": 1}}


def test_problems_of_all_sources_come_together(file):
    """A bad row, a bad filter and a missing file of three sources are reported together."""
    a, b = file("a.jsonl", {"prompt": "p"}), file("b.jsonl", "b")
    with pytest.raises(Problems) as caught:
        load(
            {"path": a, "weight": 1},
            {"path": b, "weight": 1, "filter": {"min_chars": 99}},
            {"path": f"{b}x", "weight": 1},
        )
    assert [one.where for one in caught.value.problems] == [
        f"{a}:1",
        "data.sources[1].filter",
        "data.sources[2].path",
    ]
