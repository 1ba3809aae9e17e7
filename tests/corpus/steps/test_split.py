from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mens_exp.config.corpus import SplitBy, SplitStepConfig
from mens_exp.corpus.split import Side
from mens_exp.corpus.split import split as in_memory
from mens_exp.corpus.steps import arrange as module
from mens_exp.corpus.steps.arrange import split
from mens_exp.corpus.steps.step import read_rows
from mens_exp.errors import DataError
from mens_exp.rows.schema import TrainingPair


def rows(groups):
    return [
        TrainingPair(prompt=f"p{number}", response="r", group=group)
        for number, group in enumerate(groups)
    ]


def sides(work):
    files = {side: work.out / f"{side}.jsonl" for side in Side}
    return {side: list(read_rows([path])) if path.exists() else [] for side, path in files.items()}


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(st.sampled_from([f"g{number}.py" for number in range(60)]), min_size=6, max_size=90),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0.0, 0.1, 0.4]),
)
def test_files_are_split_as_rows_in_memory_are(work, groups, val_frac, heldout_frac):
    """The sides equal those of a run's own split, by hash and, for few groups, by rank."""
    pairs = rows([*groups, "a", "b", "c"])
    config = SplitStepConfig(val_frac=val_frac, heldout_frac=heldout_frac)
    work.do(split, [work.file("a.jsonl", pairs)], split=config)
    assert sides(work) == in_memory(pairs, val_frac, heldout_frac)


def test_a_project_stays_on_one_side(work):
    """With by=project all files of a project share a side; with by=file they may not."""
    groups = [f"p{project}::f{file}.py" for project in range(30) for file in range(8)]
    by_project = SplitStepConfig(by=SplitBy.project, val_frac=0.2, heldout_frac=0.2)
    result = work.do(split, [work.file("a.jsonl", rows(groups))], split=by_project)
    found = [{pair.group.split("::")[0] for pair in pairs} for pairs in sides(work).values()]
    assert sum(map(len, found)) == len(set.union(*found)) == 30
    assert sum(result.facts["groups"].values()) == 30
    by_file = SplitStepConfig(val_frac=0.2, heldout_frac=0.2)
    result = work.do(split, [work.file("b.jsonl", rows(groups))], split=by_file)
    assert sum(result.facts["groups"].values()) == 240
    found = [{pair.group.split("::")[0] for pair in pairs} for pairs in sides(work).values()]
    assert sum(map(len, found)) > 30


def test_one_content_in_two_groups_is_refused(work):
    """Equal rows of two groups would land on two sides."""
    pairs = [
        TrainingPair(prompt="same", response="same", group=f"{number}.py") for number in range(3)
    ]
    with pytest.raises(DataError, match=r"same row is on two sides.*dedupe before split"):
        work.do(split, [work.file("a.jsonl", pairs)])


def test_a_side_that_would_be_empty_is_refused(work):
    """Two groups cannot fill three sides."""
    with pytest.raises(DataError, match="no row is left for heldout"):
        work.do(split, [work.file("a.jsonl", rows(["a", "a", "b"]))])


def test_the_check_sees_a_split_that_parts_a_group(work, monkeypatch):
    """A split that was drawn by row is detected."""
    turn = iter([Side.TRAIN, Side.VAL] * 6)
    drawn = SimpleNamespace(side=lambda _: next(turn), ranked=False)
    monkeypatch.setattr(module, "bounds_of", lambda *_: drawn)
    config = SplitStepConfig(heldout_frac=0.0)
    with pytest.raises(DataError, match="a group is on two sides"):
        work.do(split, [work.file("a.jsonl", rows(["a", "b", "b", "a"] * 3))], split=config)
