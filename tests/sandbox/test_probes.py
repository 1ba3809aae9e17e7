from __future__ import annotations

import dataclasses

import pytest

from mens_exp.config.evaluation import BubblewrapSandbox, NoSandbox, SandboxConfig, UnsafeSandbox
from mens_exp.errors import SetupError
from mens_exp.sandbox.bubblewrap import Bubblewrap, _visible_options
from mens_exp.sandbox.opening import limits_of, open_sandbox, probe, probed
from mens_exp.sandbox.program import Limits, Outcome

NAMES = [
    "network",
    "write_outside",
    "fork_bomb",
    "memory_bomb",
    "endless_output",
    "ignored_signals",
    "parent_environment",
]


class WithoutLimits(Bubblewrap):
    """Bubblewrap with one protection removed."""

    def __init__(self, *, drop=(), add=()):
        super().__init__()
        self._isolated = (*(word for word in self._isolated if word not in drop), *add)


class Loose(Bubblewrap):
    """Bubblewrap with one limit that is not enforced."""

    def __init__(self, **limits):
        super().__init__()
        self._limits = limits

    def run(self, program, limits):
        return super().run(program, dataclasses.replace(limits, **self._limits))


@pytest.fixture(autouse=True)
def bubblewrap(sandbox):
    """Skip if bubblewrap is missing."""


def escaped(sandbox):
    return {one.name: one.found for one in probe(sandbox) if not one.contained}


def test_bubblewrap_contains_every_probe():
    """All seven probes pass in order."""
    results = probe(Bubblewrap())
    assert [result.name for result in results] == NAMES
    assert {result.name: result.found for result in results if not result.contained} == {}


def test_network_is_found():
    """A sandbox with network access is refused."""
    with pytest.raises(SetupError) as caught:
        probed(WithoutLimits(drop=("--unshare-net",)))
    assert "network: it connected to this machine" in str(caught.value)


def test_writable_root_is_found(tmp_path):
    """The probe writes a file inside and looks for it outside."""
    home = str(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        tmp_path.chmod(0o777)
        sandbox = Bubblewrap()
        patch.setattr(sandbox, "_command", _binding(sandbox, home))
        found = escaped(sandbox)
    assert found == {"write_outside": f"it wrote into {home}"}
    assert list(tmp_path.iterdir()) == []


def _binding(sandbox, home):
    """Bind a home directory writable over the private /tmp."""
    make = sandbox._command

    def command(*arguments):
        words, passed = make(*arguments)
        at = words.index("--remount-ro")
        bind = ["--bind" if word == "--ro-bind" else word for word in _visible_options(home)]
        return [*words[:at], *bind, *words[at:]], passed

    return command


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"processes": 100}, "fork_bomb"),
        ({"memory_mib": 512}, "memory_bomb"),
        ({"output_kib": 2**20}, "endless_output"),
    ],
)
def test_limit_that_is_not_kept_is_found(limits, name):
    """Each missing limit is found by its own probe only."""
    assert list(escaped(Loose(**limits))) == [name]


def test_ignored_end_is_found():
    """A sandbox that does not kill its program is refused."""

    class Patient(Bubblewrap):
        def run(self, program, limits):
            done = super().run(program, limits)
            if done.outcome is Outcome.timeout:
                return dataclasses.replace(done, outcome=Outcome.ok)
            return done

    assert list(escaped(Patient())) == ["ignored_signals"]


def test_environment_that_leaks_is_found():
    """An unexpected environment variable is found."""
    leaking = WithoutLimits(add=("--setenv", "SECRET_TOKEN", "x"))
    assert list(escaped(leaking)) == ["parent_environment"]
    assert "SECRET_TOKEN" in escaped(leaking)["parent_environment"]


def test_each_option_opens_its_own_sandbox():
    """There is no fallback to another sandbox."""
    assert open_sandbox(BubblewrapSandbox()).kind == "bubblewrap"
    assert open_sandbox(UnsafeSandbox()).kind == "unsafe"


@pytest.mark.parametrize("config", [NoSandbox(), SandboxConfig(name="none")])
def test_without_a_sandbox_nothing_is_executed(config):
    """`sandbox=none` disables execution, with a remedy in the message."""
    with pytest.raises(SetupError, match="generated programs are not executed") as caught:
        open_sandbox(config)
    assert "apt-get install bubblewrap" in str(caught.value)


def test_missing_bubblewrap_is_no_reason_for_less(monkeypatch, tmp_path):
    """There is no fallback; the error names both alternatives."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="bwrap is not installed") as caught:
        open_sandbox(BubblewrapSandbox())
    assert "sandbox=unsafe" in str(caught.value)


def test_defaults_of_the_settings_are_those_of_the_limits():
    """The defaults in both layers are equal."""
    assert limits_of(BubblewrapSandbox()) == Limits() == limits_of(NoSandbox())


def test_every_setting_reaches_its_limit():
    """Each setting has another value and sets its own limit."""
    values = {"memory_mib": 70, "cpu_s": 2.5, "wall_s": 3.5, "output_kib": 7, "file_mib": 9}
    assert limits_of(BubblewrapSandbox(**values, processes=5)) == Limits(**values, processes=5)
    assert limits_of(UnsafeSandbox(**values)) == Limits(**values)
