"""A pytest plugin that gives the marker `slow` by measured cost.

tests/slow.txt lists the tests that take more than `LIMIT_S`; `make quick` leaves them out. A line
is a test's node ID, without the part in brackets where all of its cases are slow.

``make slow`` runs the suite and names what is listed wrongly; with ``ARGS=--write-slow`` it also
writes the list anew. What a test costs is what it takes by itself, its own set-up included, or the
dearest fixture that it shares with others, if that takes longer: alone it would wait for that too.
A fork server is one: the first test of a process that forks waits for its imports.
"""

from __future__ import annotations

import time
from pathlib import Path

import fork_server
import pytest

LIST = Path(__file__).parents[1] / "slow.txt"
LIMIT_S = 0.2
NOISE = 1.5  # variation between runs on a busy machine; within it, a test stays as listed
SHARED, USES = "fixture ", "uses"
SERVER, SERVER_S = "fork server", 13  # measured: the seconds of a server's imports


_forked = pytest.StashKey()  # number of forked processes before the test


def pytest_addoption(parser):
    group = parser.getgroup("slow tests")
    group.addoption(
        "--check-slow", action="store_true", help="name the tests that tests/slow.txt lists wrongly"
    )
    group.addoption(
        "--write-slow", action="store_true", help="write tests/slow.txt anew from this run"
    )


def listed():
    """Return the lines of the list."""
    return set(LIST.read_text("utf-8").splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    slow = listed()
    for item in items:
        if {item.nodeid, function_of(item.nodeid)} & slow:
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            name = f"{SHARED}{fixturedef.baseid}::{fixturedef.argname}"
            request._pyfuncitem.user_properties.append((name, time.perf_counter() - began))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[_forked] = fork_server.forked


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    names = [SERVER] if fork_server.forked > item.stash[_forked] else []
    names += [
        f"{SHARED}{found[-1].baseid}::{name}"
        for name, found in item._fixtureinfo.name2fixturedefs.items()
        if found and found[-1].scope != "function"
    ]
    item.user_properties.append((USES, names))


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    asked = config.getoption("check_slow") or config.getoption("write_slow")
    if asked and not is_worker:
        config.pluginmanager.register(Costs(config), "costs")


class Costs:
    """The costs of a session's tests, and what the list says about them."""

    def __init__(self, config):
        self._write = config.getoption("write_slow")
        self._took, self._shared, self._uses = {}, {SERVER: SERVER_S}, {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        self._took[name] = self._took.get(name, 0) + report.duration
        if report.when != "teardown":
            return
        for key, value in report.user_properties:
            if key == USES:
                self._uses[name] = value
            elif key.startswith(SHARED):
                self._shared[key] = max(value, self._shared.get(key, 0))
                self._took[name] -= value

    def costs(self):
        """Return the seconds of each test."""
        return {
            name: max([took, *(self._shared.get(key, 0) for key in self._uses.get(name, ()))])
            for name, took in self._took.items()
        }

    def pytest_terminal_summary(self, terminalreporter):
        costs = self.costs()
        terminalreporter.section("slow tests")
        for line in wrong(costs, listed()):
            terminalreporter.write_line(line)
        if self._write:
            LIST.write_text("".join(f"{line}\n" for line in lines(costs, listed())), "utf-8")
            terminalreporter.write_line(f"Written: {LIST.name}")


def function_of(name):
    """Return a node ID without its parameters."""
    return name.partition("[")[0]


def file_of(name):
    """Return the file of a node ID."""
    return name.partition("::")[0]


def is_slow(name, cost, slow):
    """Return whether a test belongs on the list; near the limit it stays as listed."""
    if LIMIT_S / NOISE < cost < LIMIT_S * NOISE:
        return bool({name, function_of(name)} & slow)
    return cost > LIMIT_S


def wrong(costs, slow):
    """Yield a line for each wrongly listed test, and for each that no longer exists."""
    for name, cost in sorted(costs.items()):
        is_listed = bool({name, function_of(name)} & slow)
        if is_slow(name, cost, slow) != is_listed:
            yield f"{cost:6.1f} s, {'' if is_listed else 'not '}listed: {name}"
    for name in sorted(gone(costs, slow)):
        yield f"   gone, listed: {name}"


def gone(costs, slow):
    """Return the lines that match no test in the files that ran, or name missing files."""
    files = {file_of(name) for name in costs}
    names = {*costs, *map(function_of, costs)}
    here = LIST.parents[1]
    return {
        line
        for line in slow - names
        if file_of(line) in files or not (here / file_of(line)).exists()
    }


def lines(costs, slow):
    """Return the new list, with whole functions if all their cases are slow."""
    cases = {}
    for name, cost in costs.items():
        cases.setdefault(function_of(name), {})[name] = is_slow(name, cost, slow)
    found = {line for line in slow - gone(costs, slow) if function_of(line) not in cases}
    for function, of_cases in cases.items():
        if all(of_cases.values()):
            found.add(function)
        else:
            found |= {name for name, it in of_cases.items() if it}
    return sorted(found)
