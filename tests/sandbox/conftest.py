"""A sandbox, and how to go on without one."""

from __future__ import annotations

import shutil

import pytest

from mens_exp.sandbox.bubblewrap import Bubblewrap


@pytest.fixture(scope="session")
def sandbox() -> Bubblewrap:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing: apt-get install bubblewrap")
    return Bubblewrap()
