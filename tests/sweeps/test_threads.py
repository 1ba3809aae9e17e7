from __future__ import annotations

import pytest

from mens_exp.config.sweep import LocalLauncher
from mens_exp.sweeps import threads
from mens_exp.sweeps.threads import environment_of, threads_per_job


@pytest.fixture(autouse=True)
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(("n_jobs", "each"), [(1, 6), (2, 3), (4, 1), (9, 1)])
def test_cores_are_shared_out(n_jobs: int, each: int) -> None:
    """Rounded down, so that jobs do not fight, and never less than one."""
    assert threads_per_job(LocalLauncher(n_jobs=n_jobs)) == each


def test_what_the_user_says_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting before the environment, and that before the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_per_job(LocalLauncher(n_jobs=1)) == 2
    assert threads_per_job(LocalLauncher(n_jobs=1, threads=5)) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads_per_job(LocalLauncher(n_jobs=2)) == 3


def test_without_gpus_the_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job sees what the launcher sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    made = environment_of(3, threads=2, gpus=[])
    assert (made["CUDA_VISIBLE_DEVICES"], made["OMP_NUM_THREADS"]) == ("5", "2")
    assert environment_of(3, threads=2, gpus=["a", "b"])["CUDA_VISIBLE_DEVICES"] == "b"
