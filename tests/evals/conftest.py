"""A runner of generated programs, and how to go on without one."""

from __future__ import annotations

import shutil

import pytest

from mens_exp.evals.suite import Runner
from mens_exp.sandbox.bubblewrap import Bubblewrap
from mens_exp.sandbox.program import Limits


@pytest.fixture(scope="session")
def runner():
    """Programs in a sandbox, two seconds of the processor each."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing: apt-get install bubblewrap")
    return Runner(sandbox=Bubblewrap(), limits=Limits(wall_s=5, cpu_s=2))
