from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mens_exp.planning import machine
from mens_exp.planning.checks.machine import check_machine, findings
from mens_exp.planning.forecast import Disk
from mens_exp.planning.machine import Machine
from mens_exp.planning.memory import Memory

CPU = Machine(
    kind="cpu",
    name="a CPU",
    total_bytes=100,
    free_bytes=100,
    has_bf16=True,
    torch="2.13.0",
    libraries=frozenset({"cpu", "cuda128"}),
)
GPU = dataclasses.replace(CPU, kind="cuda", name="a GPU", torch_cuda="12.9", capability="9.0")
FITS = Memory(components={"all": 80}, low=70, high=90, outside=0, basis="")
SMALL = Disk(
    adapter=1,
    peft=1,
    checkpoint=1,
    checkpoints_kept=2,
    checkpoints_saved=3,
    base=1,
    merged=1,
)


@pytest.fixture
def told(tiny_config, tmp_path):
    """Return the problems of a device for a tiny_llama run."""

    def asked(
        device=CPU,
        memory=FITS,
        disk=SMALL,
        overrides=(),
    ):
        return findings(tiny_config(*overrides), device, memory, disk, tmp_path)

    return asked


def test_machine_that_holds_the_run_is_no_problem(told):
    """There is neither an error nor a warning, on CPU and on GPU."""
    assert told() == ([], [])
    assert told(GPU) == ([], [])


def test_lower_bound_over_the_memory_is_refused(told):
    """The message has the free memory, and the exit code is 3."""
    (error,), warnings = told(memory=dataclasses.replace(FITS, low=101, high=120))
    assert "does not fit into the memory of a CPU" in str(error)
    assert (error.found, error.exit_code, warnings) == ("100 B free", 3, [])


def test_upper_bound_over_the_memory_is_a_warning(told):
    """Such a run may still succeed."""
    errors, (warning,) = told(memory=dataclasses.replace(FITS, low=100, high=101))
    assert errors == []
    assert "it may fail" in warning
    assert "Next: " in warning


def test_memory_that_is_unknown_refuses_nothing(told):
    """A driver that does not answer is no reason to refuse."""
    unknown = dataclasses.replace(GPU, free_bytes=None)
    assert told(unknown, dataclasses.replace(FITS, low=10**15)) == ([], [])


@pytest.mark.parametrize(
    ("device", "found"),
    [
        (dataclasses.replace(CPU, libraries=frozenset({"cuda128"})), "cuda128"),
        (dataclasses.replace(CPU, libraries=frozenset()), "no library"),
        (dataclasses.replace(CPU, libraries=None), "no bitsandbytes"),
        (dataclasses.replace(GPU, torch_cuda="13.0"), "cuda128"),
        (dataclasses.replace(GPU, libraries=frozenset({"cpu"})), "no CUDA library"),
    ],
)
def test_device_without_kernels_is_refused(told, device, found):
    """Bitsandbytes loads one library: for the CPU, or for the CUDA major version of torch."""
    (error,), _ = told(device)
    assert "no 4-bit kernels" in str(error)
    assert error.found == found


def test_cpu_build_of_torch_has_no_gpu(told):
    """trainer=gpu with a CPU build of torch is refused before torch is imported."""
    (error,), _ = told(dataclasses.replace(GPU, torch="2.13.0+cpu", torch_cuda=None))
    assert error.found == "torch 2.13.0+cpu"


def test_bf16_needs_the_device(told):
    """A GPU without bf16 is refused, a CPU gets a warning, and float32 needs neither."""
    old = dataclasses.replace(GPU, has_bf16=False, capability="7.5")
    (error,), _ = told(old)
    assert error.where == "quant.compute_dtype"
    assert told(old, overrides=("quant.compute_dtype=f32",)) == ([], [])
    slow = dataclasses.replace(CPU, has_bf16=False)
    errors, (warning,) = told(slow)
    assert errors == []
    assert "emulated" in warning
    assert told(slow, overrides=("quant.compute_dtype=f32",)) == ([], [])
    assert told(dataclasses.replace(CPU, has_bf16=None)) == ([], [])


def test_full_disk_is_refused(told, monkeypatch, tmp_path):
    """On one disk the run directory and the cache add up, here to 20,000,006 bytes."""
    needed = 2 + 3 * 1 + 20_000_000 + 1
    for free, refused in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(machine, "space", lambda _, free=free: (tmp_path, free))
        errors, _ = told()
        assert bool(errors) is refused
    assert "checkpoints 3 B, adapter 2 B, the base model 1 B" in str(errors[0])


def test_two_disks_are_judged_apart(told, monkeypatch, tmp_path):
    """Here the cache's disk is full, and the run directory's is not."""
    here = Path.cwd()
    device = {tmp_path: SimpleStat(1), here: SimpleStat(2)}
    free = {tmp_path: 0, here: 10**12}
    monkeypatch.setattr(machine, "space", lambda path: (path, free[path]))
    monkeypatch.setattr(Path, "stat", lambda self, **_: device[self])
    (error,), _ = told()
    assert error.where == str(tmp_path)


@dataclasses.dataclass
class SimpleStat:
    """The only field of a stat result that the check reads."""

    st_dev: int


def test_plan_is_not_refused_for_its_machine(tiny_config, monkeypatch):
    """A plan lists the machine's problems among its results; a run is refused."""
    poor = dataclasses.replace(CPU, free_bytes=1)
    monkeypatch.setattr(machine, "look", lambda _: poor)
    assert [error.where for error in check_machine(tiny_config())] == ["memory"]
    assert list(check_machine(tiny_config("task=plan"))) == []
