from __future__ import annotations

import pytest

from mens_exp.config.data import HubData, JsonlData, MixData, OnBadRow, RowFormat, StdlibData
from mens_exp.config.data_sources import sources_of
from mens_exp.config.overrides import check

GOOD = "{path:a.jsonl,weight:1}"


def problems(sources, *more):
    given = ("data=mix", f"data.sources={sources}", *more)
    return tuple(check(given, multirun=False).problems)


def test_sources_are_options_of_data_with_a_weight():
    """A path means jsonl, an id hub; any other source is named. The names are those in records."""
    config = MixData(
        sources=[
            {"path": "rows/a.jsonl", "weight": 0.5, "format": "alpaca"},
            {"id": "lab/rows", "split": "test", "weight": 1, "name": "hub"},
            {"source": "stdlib", "weight": 2, "filter": {"max_chars": 9}},
        ],
        on_bad_row=OnBadRow.quarantine,
        max_bad_frac=0.2,
    )
    first, second, third = sources_of(config)
    assert isinstance(first.data, JsonlData)
    assert isinstance(second.data, HubData)
    assert isinstance(third.data, StdlibData)
    assert [one.name for one in (first, second, third)] == ["a.jsonl", "hub", "stdlib"]
    assert [one.weight for one in (first, second, third)] == [0.5, 1, 2]
    assert (first.data.format, second.data.split) == (RowFormat.alpaca, "test")
    assert third.data.filter.max_chars == 9
    assert (first.data.on_bad_row, first.data.max_bad_frac) == (OnBadRow.quarantine, 0.2)


def test_mix_is_composed_from_the_command_line():
    """Globs and lists of files are written as elsewhere."""
    assert problems("[{path:rows/*.jsonl,weight:0.7},{path:[a.jsonl,b.jsonl],weight:.3}]") == ()


@pytest.mark.parametrize(
    ("sources", "where", "told"),
    [
        ("[]", "data.sources", "no source given"),
        ("a.jsonl", "data.sources", "no source given"),
        ("[a.jsonl]", "data.sources[0]", "is not a source"),
        ("[{path:a.jsonl}]", "data.sources[0].weight", "has no weight"),
        ("[{path:a.jsonl,weight:true}]", "data.sources[0].weight", "has no weight"),
        ("[{path:a.jsonl,weight:0}]", "data.sources[0].weight", "out of range"),
        ("[{path:a.jsonl,weight:nan}]", "data.sources[0].weight", "out of range"),
        ("[{path:a.jsonl,weight:inf}]", "data.sources[0].weight", "out of range"),
        ("[{weight:1}]", "data.sources[0].source", "does not say where its rows come from"),
        ("[{source:stdlb,weight:1}]", "data.sources[0].source", "the nearest is stdlib"),
        ("[{source:mix,weight:1}]", "data.sources[0].source", "does not say where"),
        ("[{source:jsonl,weight:1}]", "data.sources[0].path", "cannot be read"),
        ("[{path:a.jsonl,wieght:1,weight:1}]", "data.sources[0].wieght", "the nearest is weight"),
        ("[{path:a.jsonl,weight:1,seq_len:9}]", "data.sources[0].seq_len", "the whole mix"),
        ("[{path:a.jsonl,weight:1,val_path:b}]", "data.sources[0].val_path", "the whole mix"),
        ("[{path:a.jsonl,weight:1,format:x}]", "data.sources[0].format", "cannot be read"),
        ("[{path:'',weight:1}]", "data.sources[0].path", "no file given"),
        ("[{path:a.jsonl,weight:1,name:''}]", "data.sources[0].name", "is not a name"),
        (
            "[{path:a.jsonl,weight:1,filter:{min_rating:9}}]",
            "data.sources[0].filter.min_rating",
            "out of range",
        ),
        (
            "[{path:a.jsonl,weight:1,columns:{prompt:q}}]",
            "data.sources[0].columns",
            "no answer to learn from",
        ),
        (f"[{GOOD},{{path:b/a.jsonl,weight:1}}]", "data.sources", "two sources have the same name"),
    ],
)
def test_source_that_cannot_be_read_is_refused_by_its_place(sources, where, told):
    """The index in the path counts from 0, as in the override that sets it."""
    (problem,) = problems(sources)
    assert (problem.where, problem.exit_code) == (where, 2)
    assert told in str(problem)


def test_problems_of_all_sources_are_told_together():
    """Each problem has the path of its source."""
    told = [one.where for one in problems(f"[{{weight:1}},{GOOD},{{path:a}}]")]
    assert told == ["data.sources[0].source", "data.sources[2].weight"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("data.stop=budget",), "is required with data.stop=budget"),
        (("data.budget_tokens=9",), "has no effect with data.stop=all_exhausted"),
    ],
)
def test_budget_and_its_size_go_together(more, told):
    """Either setting without the other is a mistake."""
    (problem,) = problems(f"[{GOOD}]", *more)
    assert (problem.where, told in str(problem)) == ("data.budget_tokens", True)
    assert problems(f"[{GOOD}]", "data.stop=budget", "data.budget_tokens=9") == ()


def test_sources_stay_what_they_were_when_read(tiny_config):
    """Reading the sources leaves the configuration unchanged."""
    config = tiny_config("data=mix", f"data.sources=[{GOOD}]")
    sources_of(config.data)
    assert config.data.sources == [{"path": "a.jsonl", "weight": 1}]


def test_second_phase_of_sigilderg_prefers_rows_two_to_one():
    """The preset, with the sources from its comment: one file, split by category."""
    from pathlib import Path

    preset = Path(__file__).parents[3] / "conf" / "preset" / "sigilderg_phase2.yaml"
    lines = [line.removeprefix("#").strip() for line in preset.read_text("utf-8").splitlines()]
    first = next(n for n, line in enumerate(lines) if line.startswith("data=mix"))
    command = "".join(lines[first : first + 2]).replace("<rows>", "rows.jsonl")
    given = ("preset=sigilderg_phase2", *command.replace("'", "").split())
    checked = check(given, multirun=False)
    assert checked.problems == ()
    sources = sources_of(checked.cells[0].config.data)
    assert [(one.name, one.weight) for one in sources] == [("preferred", 2), ("rest", 1)]
