from __future__ import annotations

import pytest

from mens_exp.config.sweep import LocalLauncher
from mens_exp.sweeps import process
from mens_exp.sweeps.process import environment_of, gpu_problems, jobs_at_a_time, threads_per_job


@pytest.fixture(autouse=True)
def six_cores(monkeypatch):
    monkeypatch.setattr(process, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(("n_jobs", "each"), [(1, 6), (2, 3), (4, 1), (9, 1)])
def test_cores_are_shared_out(n_jobs, each):
    """Rounded down, and never less than one."""
    assert threads_per_job(LocalLauncher(n_jobs=n_jobs)) == each


@pytest.mark.parametrize(("n_jobs", "many"), [(-1, 6), (-2, 5), (-6, 1), (-9, 1), (9, 9)])
def test_jobs_may_be_counted_back_from_the_cores(n_jobs, many):
    """-1 means one for each of six cores, -2 all but one, and never less than one."""
    launcher = LocalLauncher(n_jobs=n_jobs)
    assert (jobs_at_a_time(launcher), threads_per_job(launcher)) == (many, max(1, 6 // many))


def test_what_the_user_says_wins(monkeypatch):
    """The setting first, then the environment, then the number of cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_per_job(LocalLauncher(n_jobs=1)) == 2
    assert threads_per_job(LocalLauncher(n_jobs=1, threads=5)) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads_per_job(LocalLauncher(n_jobs=2)) == 3


def test_without_gpus_the_device_is_left_alone(monkeypatch):
    """A job sees the same device as the launcher."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    made = environment_of(3, threads=2, gpus=[])
    assert (made["CUDA_VISIBLE_DEVICES"], made["OMP_NUM_THREADS"]) == ("5", "2")
    assert environment_of(3, threads=2, gpus=["a", "b"])["CUDA_VISIBLE_DEVICES"] == "b"


@pytest.mark.parametrize(("processes", "each"), [(1, "6"), (2, "3"), (4, "1"), (8, "1")])
def test_the_processes_of_a_job_share_its_threads(processes, each):
    """Rounded down, and never less than one, because each process of torch reads the number."""
    made = environment_of(0, threads=6, gpus=[], processes=processes)
    assert (made["OMP_NUM_THREADS"], made["MKL_NUM_THREADS"]) == (each, each)


def test_a_job_of_several_processes_has_gpus_of_its_own():
    """As many as the largest job needs; a smaller job sees only the GPUs that it uses."""
    gpus = ["4", "5", "6", "7"]

    def seen(slot, processes):
        made = environment_of(slot, threads=1, gpus=gpus, each=2, processes=processes)
        return made["CUDA_VISIBLE_DEVICES"]

    assert (seen(0, 2), seen(1, 2), seen(1, 1)) == ("4,5", "6,7", "6")


def test_jobs_of_one_process_may_share_a_gpu_and_those_of_several_may_not():
    """Three jobs of two GPUs do not fit on five; unknown GPUs are not counted."""
    gpus = ["0", "1", "2", "3", "4"]
    assert gpu_problems(gpus, 1, 9) == []
    assert gpu_problems(gpus, 2, 2) == []
    assert gpu_problems([], 2, 3) == []
    (found,) = gpu_problems(gpus, 2, 3)
    assert (found.where, found.exit_code) == ("hydra.launcher.n_jobs", 2)
    assert found.found == "3 of 2 GPUs each (trainer.devices), and 5 are here"
    assert found.remedy == "choose hydra.launcher.n_jobs=2"
