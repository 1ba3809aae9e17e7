"""The plugin of the marker `slow`: checking the list of slow tests, and selecting by it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import slow_tests

HERE = "tests/test_slow_tests.py"


def test_what_is_listed_wrongly_is_named():
    """Slow but not listed, fast but listed, or deleted; a cost near the limit is left alone."""
    costs = {f"{HERE}::a": 9.0, f"{HERE}::b": 0.1, f"{HERE}::c": 0.25, f"{HERE}::d[1]": 0.18}
    listed = {f"{HERE}::b", f"{HERE}::d", f"{HERE}::e", "tests/no_file.py::f", "tests/conftest.py"}
    assert list(slow_tests.wrong(costs, listed)) == [
        f"   9.0 s, not listed: {HERE}::a",
        f"   0.1 s, listed: {HERE}::b",
        "   gone, listed: tests/no_file.py::f",
        f"   gone, listed: {HERE}::e",
    ]


def test_a_function_is_listed_once_where_all_its_cases_are_slow():
    """Otherwise its slow cases are listed; lines of files that did not run stay."""
    other = "tests/conftest.py::x"
    costs = {f"{HERE}::a[1]": 5, f"{HERE}::a[2]": 6, f"{HERE}::b[1]": 5, f"{HERE}::b[2]": 0}
    assert slow_tests.lines(costs, {other, f"{HERE}::gone"}) == [
        other,
        f"{HERE}::a",
        f"{HERE}::b[1]",
    ]


def test_a_test_that_forks_costs_the_start_of_a_server(request, monkeypatch):
    """The first test to fork waits for the server, whichever it is."""
    item = request.node
    monkeypatch.setattr(slow_tests.fork_server, "forked", slow_tests.fork_server.forked + 1)
    stub = SimpleNamespace(stash=item.stash, user_properties=[], _fixtureinfo=item._fixtureinfo)
    slow_tests.pytest_runtest_teardown(stub)
    assert slow_tests.SERVER in dict(stub.user_properties)[slow_tests.USES]
    assert slow_tests.Costs(item.config)._shared[slow_tests.SERVER] > slow_tests.LIMIT_S


@pytest.fixture(scope="module")
def dear():
    return 1


@pytest.fixture
def own(dear):
    return dear


def test_a_shared_fixture_is_dear_for_each_test_that_uses_it(own, request):
    """The first test waits for the fixture, and each test would be first if it ran alone."""
    item = request.node
    shared = f"fixture {HERE}::dear"
    assert shared in dict(item.user_properties)
    costs = slow_tests.Costs(item.config)
    for name, took in ("first", 5.0), ("second", 0.1):
        report = pytest.TestReport(
            *(f"{HERE}::{name}", (HERE, 1, name), {}, "passed", None, "call"),
            duration=took,
        )
        costs.pytest_runtest_logreport(report)
        report.when, report.duration = "teardown", 0.0
        report.user_properties = [(slow_tests.USES, [shared])]
        if name == "first":
            report.user_properties.append((shared, 4.5))
        costs.pytest_runtest_logreport(report)
    assert costs.costs() == {f"{HERE}::first": 4.5, f"{HERE}::second": 4.5}


def test_listed_tests_are_marked(tmp_path, monkeypatch):
    """A line names a whole function or one of its cases; other tests are not marked."""
    path = tmp_path / "slow.txt"
    path.write_text("tests/a.py::one\ntests/a.py::two[x]\n", "utf-8")
    monkeypatch.setattr(slow_tests, "LIST", path)
    marks = {}
    names = ("one", "one[z]", "two", "two[x]", "two[y]", "three")
    items = [
        SimpleNamespace(nodeid=f"tests/a.py::{name}", add_marker=partial(marks.__setitem__, name))
        for name in names
    ]
    slow_tests.pytest_collection_modifyitems(items)
    assert marks == {"one": "slow", "one[z]": "slow", "two[x]": "slow"}
