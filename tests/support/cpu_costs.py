"""A pytest plugin that measures CPU seconds; ``make costs`` lists the dearest tests.

Wall time says little where several processes share the cores. What a test costs is the processor
time of its process and of the processes that ended meanwhile; the first test that needs a shared
fixture pays for it.
"""

from __future__ import annotations

import resource
from collections import Counter

import pytest

COST = "CPU seconds"
MOST = 60  # rows per table


def pytest_addoption(parser):
    group = parser.getgroup("CPU costs")
    group.addoption("--costs", action="store_true", help="list what tests cost, in CPU seconds")


def pytest_configure(config):
    if config.getoption("costs"):
        config.pluginmanager.register(Meter(), "meter")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Table(), "table")


def spent():
    """Return the CPU seconds of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Meter:
    """Adds the cost of each phase to the report of a test."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._metered(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        return (yield from self._metered(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        return (yield from self._metered(item))

    def _metered(self, item):
        began = spent()
        try:
            return (yield)
        finally:
            item.user_properties.append((COST, spent() - began))


class Table:
    """The costs of a session by directory and by test function."""

    def __init__(self):
        self.costs = Counter()

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            phases = [value for key, value in report.user_properties if key == COST]
            self.costs[report.nodeid] += sum(phases)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("CPU seconds")
        terminalreporter.write_line(f"{self.costs.total():8.1f} of {len(self.costs)} tests")
        for part in (directory_of, function_of):
            terminalreporter.write_line("")
            for name, cost in summed(self.costs, part).most_common(MOST):
                terminalreporter.write_line(f"{cost:8.1f} {name}")


def summed(costs, part):
    """Return the costs, summed by a key of the tests."""
    sums = Counter()
    for name, cost in costs.items():
        sums[part(name)] += cost
    return sums


def directory_of(name):
    """Return a node ID's directory below tests/, or the file if it is directly there."""
    return "/".join(name.partition("::")[0].split("/")[:2])


def function_of(name):
    """Return a node ID without its parameters."""
    return name.partition("[")[0]
