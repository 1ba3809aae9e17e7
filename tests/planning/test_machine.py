from __future__ import annotations

import subprocess
from types import SimpleNamespace

import psutil
import pytest

from mens_exp.planning import machine
from mens_exp.planning.machine import cores, look, space


@pytest.fixture
def driver(monkeypatch):
    """Make nvidia-smi return a text or raise an error."""

    def answers(answer):
        def run(command, **how):
            assert "--query-gpu=name,memory.total,memory.free,compute_cap" in command
            assert how["timeout"] <= 3
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(stdout=answer)

        monkeypatch.setattr(machine.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
        monkeypatch.setattr(subprocess, "run", run)

    return answers


def test_this_machine_is_described():
    """Its name, memory, torch version and bitsandbytes libraries are found."""
    found = look("cpu")
    assert found.kind == "cpu"
    assert found.name
    assert 0 < (found.free_bytes or 0) <= (found.total_bytes or 0) <= psutil.virtual_memory().total
    assert found.torch
    assert "cpu" in (found.libraries or ())


def test_gpu_is_taken_where_torch_can_use_it(driver, monkeypatch):
    """`auto` takes the GPU only with a CUDA build of torch; MiB are converted to bytes."""
    driver("A GPU, 15360, 15000, 8.9\nAnother, 1, 1, 8.9\n")
    monkeypatch.setattr(machine, "_torch", lambda: ("2.13.0", "12.8"))
    found = look("auto")
    assert (found.kind, found.name, found.capability) == ("cuda", "A GPU", "8.9")
    assert (found.total_bytes, found.free_bytes) == (15360 * 2**20, 15000 * 2**20)
    assert found.has_bf16 is True
    assert look("cpu").kind == "cpu"
    monkeypatch.setattr(machine, "_torch", lambda: ("2.13.0+cpu", None))
    assert look("auto").kind == "cpu"


@pytest.mark.parametrize(
    ("capability", "has_bf16"), [("7.5", False), ("8.0", True), ("12.0", True)]
)
def test_bf16_came_with_ampere(driver, capability, has_bf16):
    """Compute capability 8.0 is Ampere."""
    driver(f"A GPU, 1, 1, {capability}\n")
    assert look("gpu").has_bf16 is has_bf16


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "No devices were found",
        "A GPU, [N/A], 1, 8.0",
        subprocess.TimeoutExpired("nvidia-smi", 3),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        OSError("not executable"),
    ],
)
def test_gpu_that_does_not_answer_is_unknown(driver, answer):
    """`auto` uses the CPU; an explicit `gpu` stays, with unknown numbers."""
    driver(answer)
    assert look("auto").kind == "cpu"
    found = look("gpu")
    assert (found.kind, found.total_bytes, found.free_bytes) == ("cuda", None, None)
    assert found.has_bf16 is None


@pytest.mark.parametrize(
    ("flags", "has_bf16"),
    [("sse avx512_bf16", True), ("fp bf16", True), ("sse avx2", False)],
)
def test_processor_tells_its_formats(tmp_path, monkeypatch, flags, has_bf16):
    """CPU flags in /proc/cpuinfo, which x86 and Arm spell differently."""
    file = tmp_path / "cpuinfo"
    key = "Features" if flags.startswith("fp") else "flags"
    file.write_text(f"model name\t: A CPU\n{key}\t\t: {flags}\n", "utf-8")
    monkeypatch.setattr(machine, "_CPUINFO", file)
    found = look("cpu")
    assert (found.name, found.has_bf16) == ("A CPU", has_bf16)


def test_processor_that_tells_nothing_is_unknown(tmp_path, monkeypatch):
    """The support for bf16 is unknown, not guessed."""
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "absent")
    assert look("cpu").has_bf16 is None


def test_container_bounds_memory(tmp_path, monkeypatch):
    """A limit of 1,000 bytes, and 600 used, of which 100 are reclaimable cache: 500 free."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n", "ascii")
    (tmp_path / "memory.current").write_text("600\n", "ascii")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n", "ascii")
    found = look("cpu")
    assert (found.total_bytes, found.free_bytes) == (1000, 500)
    (tmp_path / "memory.max").write_text("max\n", "ascii")
    assert look("cpu").total_bytes == psutil.virtual_memory().total


def test_absent_packages_are_unknown(monkeypatch):
    """Planning works without torch and bitsandbytes."""

    def absent(name):
        raise machine.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "distribution", absent)
    found = look("cpu")
    assert (found.torch, found.torch_cuda, found.libraries) == (None, None, None)


def test_space_is_that_of_the_nearest_directory(tmp_path):
    """A path that does not exist yet is on its parent's disk."""
    place, free = space(tmp_path / "a" / "b")
    assert place == tmp_path
    assert free > 0


def test_cores_are_at_least_one(monkeypatch):
    """In some containers the number is unknown."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert cores() == 1
