from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from mens_exp.corpus.generator import generate as module
from mens_exp.corpus.generator.family import Case, Draft, Draw, Family, call
from mens_exp.corpus.generator.generate import (
    FAMILIES,
    benchmark_tasks,
    draw_task,
    families_of,
    generate,
    tasks_digest,
)
from mens_exp.corpus.split import Side
from mens_exp.errors import DataError

IN_ANOTHER_PROCESS = """
import json
from mens_exp.corpus.generator.generate import generate, tasks_digest
from mens_exp.corpus.split import Side
print(json.dumps([tasks_digest(generate(side, 70, 3, 0.5).tasks) for side in Side]))
"""


def family(*drafts, name="own"):
    """Return a family that picks one of some drafts by its random stream."""
    return Family(name=name, theme="own", side=Side.TRAIN, draft=lambda draw: draw.pick(drafts))


def draft(solution, *cases, **changes):
    values = {"does": ("returns something",), "signature": "f(x)", "difficulty": 1} | changes
    return Draft(solution=solution, cases=cases, **values)


DOUBLE = draft("def f(x):\n    return 2 * x", call("f", 1, want=2), call("f", 2, want=4))


def test_same_seed_gives_the_same_tasks_in_every_process():
    """The tasks do not depend on PYTHONHASHSEED."""
    here = [tasks_digest(generate(side, 70, 3, 0.5).tasks) for side in Side]
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert json.loads(done.stdout) == here


def test_another_seed_gives_other_tasks():
    """Two seeds have no prompt in common."""
    first, second = (generate(Side.VAL, 40, seed, 0.25).tasks for seed in (0, 1))
    assert not {task.prompt for task in first} & {task.prompt for task in second}


def test_more_tasks_begin_with_the_fewer():
    """The suite of 20 is a prefix of the suite of 60."""
    assert benchmark_tasks(5, 60)[:20] == benchmark_tasks(5, 20)


def test_families_take_turns():
    """The counts of a side's families differ by at most one."""
    made = [task.family for task in generate(Side.TRAIN, 100, 0, 0.0).tasks]
    names = [family.name for family in families_of(Side.TRAIN)]
    assert made[: len(names)] == names
    assert {made.count(name) for name in names} == {2, 3}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_repairs_have_their_share_in_all_and_in_each_family(share):
    """Of eight tasks of a family 0, 2, 4 and 8 are repairs, give or take one."""
    names = [each.name for each in families_of(Side.VAL)]
    tasks = generate(Side.VAL, 8 * len(names), 0, share).tasks
    repairs = [task for task in tasks if task.repair]
    assert len(repairs) == pytest.approx(share * len(tasks), abs=1)
    for name in names:
        assert sum(task.family == name for task in repairs) == pytest.approx(8 * share, abs=1)


def test_no_two_tasks_ask_the_same_for_the_same_answer():
    """Tasks that differ only in examples or tests are duplicates, dropped and counted."""
    made = generate(Side.HELDOUT, 600, 0, 0.25)
    assert len({task.pair.id for task in made.tasks}) == 600
    keys = [
        (task.instruction, task.solution, task.repair.program if task.repair else "")
        for task in made.tasks
    ]
    assert len(set(keys)) == 600
    assert made.dropped.keys() <= {"duplicate", "weak_tests"}


def test_a_family_that_is_used_up_is_counted_and_then_refused(
    monkeypatch,
):
    """One draft in six wordings gives six tasks, not seven."""
    monkeypatch.setattr(module, "families_of", lambda side: [family(DOUBLE)])
    made = generate(Side.TRAIN, 6, 0, 0.0)
    assert len(made.tasks) == 6
    assert made.dropped["duplicate"] > 0
    with pytest.raises(DataError, match="not have that many different tasks") as caught:
        generate(Side.TRAIN, 7, 0, 0.0)
    assert caught.value.where == "data.rows"
    assert caught.value.found == "7 for train"
    assert str(caught.value.expected).startswith("at most 6")


def test_the_others_go_on_when_one_family_is_used_up(monkeypatch):
    """The other families take over its turns."""
    monkeypatch.setattr(module, "families_of", lambda side: [family(DOUBLE), FAMILIES[0]])
    tasks = generate(Side.TRAIN, 30, 0, 0.0).tasks
    assert [task.family for task in tasks].count("own") == 6


@pytest.mark.parametrize(
    "weak",
    [
        draft("def f(x):\n    return 4", call("f", 1), call("f", 2)),
        draft("def f(x):\n    return x", Case("1"), Case("2")),
    ],
    ids=["one result", "no call"],
)
def test_draw_whose_tests_tell_nothing_apart_is_dropped(weak):
    """A draw is dropped if a constant or every mutant passes its tests."""
    assert draw_task(family(weak), "0/own/0", repair=False) is None


def test_reference_that_contradicts_its_second_source_is_a_bug():
    """The message has the call and both values; True and 1 are different values."""
    wrong = dataclasses.replace(DOUBLE, cases=[call("f", 1, want=3), call("f", 2)])
    with pytest.raises(AssertionError, match=r"f\(1\) gave 2, not 3"):
        draw_task(family(wrong), "0/own/0", repair=False)
    kinds = draft("def f(x):\n    return x > 0", call("f", 1, want=1), call("f", 0))
    with pytest.raises(AssertionError, match=r"f\(1\) gave True, not 1"):
        draw_task(family(kinds), "0/own/0", repair=False)


def test_reference_that_raises_otherwise_than_told_is_a_bug():
    """It is a bug if the wrong exception, an unexpected one, or none is raised."""
    program = "def f(x):\n    return 1 // x"
    wanted = {"raises": "ValueError"}
    for case in (call("f", 0, **wanted), call("f", 0), call("f", 1, **wanted)):
        with pytest.raises(AssertionError, match=r"f\([01]\) (raised|did not raise)"):
            draw_task(family(draft(program, case, call("f", 2))), "0/own/0", repair=False)


def test_wanted_exception_becomes_a_test():
    """The test fails for a program that raises nothing."""
    refused = call("f", 0, raises="ZeroDivisionError")
    one = draft("def f(x):\n    return 4 // x", refused, call("f", 2))
    task = draw_task(family(one), "0/own/0", repair=False)
    assert task is not None
    assert "except ZeroDivisionError:" in task.tests[0]
    exec("\n".join([task.solution, *task.tests]), {})  # the task above
    with pytest.raises(AssertionError, match=r"f\(0\) must raise ZeroDivisionError"):
        exec("\n".join(["def f(x):\n    return 2", *task.tests]), {})  # the task above


def test_error_with_an_address_is_not_told():
    """The address would differ in the next process."""
    program = "def f(x):\n    y = object()\n    return x"
    one = draft(program, *(Case(f"[1, 2].index(f({n}))", want=n - 1) for n in (1, 2)))
    found = [draw_task(family(one), f"0/own/{n}", repair=True) for n in range(40)]
    programs = {task.repair.program for task in found if task and task.repair}
    assert len(programs) > 2
    assert "def f(x):\n    y = object()\n    return y" not in programs


def test_benchmark_is_frozen():
    """A change of this digest makes a new suite, whose scores do not compare with earlier ones."""
    tasks = benchmark_tasks(0, 200)
    assert {task.family for task in tasks} == {family.name for family in families_of(Side.HELDOUT)}
    assert sum(task.repair is not None for task in tasks) == 49
    assert tasks_digest(tasks) == FROZEN


def test_digest_sees_every_part_of_every_task():
    """Order, prompt, solution and tests enter the digest."""
    tasks = benchmark_tasks(0, 2)
    others = [
        tasks[::-1],
        tasks[:1],
        *(
            [dataclasses.replace(tasks[0], **{name: "x"}), tasks[1]]
            for name in ("prompt", "solution")
        ),
        [dataclasses.replace(tasks[0], tests=()), tasks[1]],
    ]
    assert len({tasks_digest(each) for each in [tasks, *others]}) == 6


def test_a_draw_depends_on_its_name_alone():
    """A draw does not depend on earlier draws."""
    first = draw_task(FAMILIES[0], "7/x/1", repair=False)
    draw_task(FAMILIES[1], "7/x/1", repair=True)
    Draw("7/x/1").number(0, 9)
    assert draw_task(FAMILIES[0], "7/x/1", repair=False) == first


FROZEN = "0f932dbcc0ebc44752da1a052ef0d95b03f19eec337b8b0e170c8a312427306f"
