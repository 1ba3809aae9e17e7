"""Fixture that runs generated programs in a sandbox, and skips where there is none."""

from __future__ import annotations

import shutil

import pytest

from mens_exp.evals.suite import Runner
from mens_exp.sandbox.bubblewrap import Bubblewrap
from mens_exp.sandbox.program import Limits


@pytest.fixture(scope="session")
def runner():
    """Return a runner that executes programs in a sandbox with two seconds of CPU time each."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing: apt-get install bubblewrap")
    return Runner(sandbox=Bubblewrap(), limits=Limits(wall_s=5, cpu_s=2))
