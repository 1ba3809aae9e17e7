"""Faults of the machine, such as a full disk, are not reported as bugs."""

from __future__ import annotations

import errno

import pytest

from mens_exp.artifacts import atomic
from mens_exp.artifacts.host import is_of_disk, machine_fault
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.errors import DataError
from mens_exp.tasks.run import ended

FULL = OSError(errno.ENOSPC, "No space left on device", "/data/x.npy")
FAULTS = [
    (FULL, "the disk is full"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
    (PermissionError(errno.EACCES, "Permission denied", "/data/x"), "access is denied"),
    (OSError(errno.EROFS, "Read-only file system"), "is read-only"),
    (OSError(errno.EIO, "Input/output error"), "failed to read or write"),
    (MemoryError(), "not enough memory"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "not enough memory"),
    (
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        "the disk is full",
    ),
    (Exception("I/O error: No space left on device (os error 28)"), "the disk is full"),
    (ValueError('IoError(Os { code: 28, kind: StorageFull, message: "No'), "the disk is full"),
]


@pytest.mark.parametrize(("error", "said"), FAULTS)
def test_errors_of_the_machine_are_named(capsys, tmp_path, error, said):
    """Exit code 3 with a remedy, even if the fault caused another error."""

    def work():
        raise RuntimeError("the writer has stopped") from error

    assert ended(work, tmp_path) == 3
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert "bug" not in told
    assert "Traceback" not in told


def test_where_there_is_no_space_is_named():
    """The disk without space is named as the system reports it."""
    fault = machine_fault(FULL)
    assert fault is not None
    assert fault.where == "/data/x.npy"
    assert "MENS_EXP_CACHE" in str(fault.remedy)


@pytest.mark.parametrize(("error", "said"), FAULTS)
def test_a_fault_of_the_disk_is_known_by_its_remedy(error, said):
    """Every fault but those of memory is one of the disk, and is recognised by its remedy."""
    fault = machine_fault(error, "python -m mens_exp resume=run")
    assert fault is not None
    assert is_of_disk(fault.remedy) == ("memory" not in said)
    assert not any(map(is_of_disk, [None, "", "pip install it", "raise the"]))


OTHERS = [KeyError("x"), FileNotFoundError(2, "no such file"), OSError("disk full")]
OTHERS += [ZeroDivisionError("by our own fault"), ValueError("row 28 of the file"), OSError()]


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_stay_bugs(capsys, monkeypatch, tmp_path, error):
    """A file that the program itself failed to write is a bug."""
    monkeypatch.chdir(tmp_path)  # or else this would be a file of the user's

    def work():
        raise error

    assert machine_fault(error) is None
    assert ended(work, tmp_path) == 1
    assert "A bug in mens_exp" in capsys.readouterr().err


def test_an_error_that_was_named_already_stays():
    """An error already named stays, and so does a bug in handling a fault, unless caused by it."""
    named = DataError("cannot be read", where="/data/x")
    named.__cause__ = PermissionError(errno.EACCES, "Permission denied", "/data/x")
    assert machine_fault(named) is None
    handled = KeyError("x")
    handled.__context__, handled.__suppress_context__ = FULL, True
    assert machine_fault(handled) is None


def test_a_full_disk_leaves_a_record_that_says_so(cell, tmp_path):
    """The manifest has the message and the remedy, not a traceback."""
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.tasks.run import open_run

    def fill():
        with open_run(tmp_path / "run", cell):
            raise FULL

    with pytest.raises(OSError, match="No space left"):
        fill()
    error = Manifest.read(RunDir(tmp_path / "run").manifest).error
    assert error is not None
    assert (error["type"], error["exit_code"]) == ("OSError", 3)
    assert "hydra.run.dir" in error["remedy"]


def test_a_run_on_a_full_disk_says_so(train_in, tmp_path, monkeypatch, capsys):
    """No traceback is printed; the record has the remedy and the exit code too."""
    from mens_exp.training.module import TrainingModule

    def full(*_):
        raise FULL

    monkeypatch.setattr(TrainingModule, "training_step", full)
    run = train_in(tmp_path / "run", code=3)
    said = capsys.readouterr().err
    assert "/data/x.npy: the disk is full" in said
    assert f"resume={run.path}" in said
    assert "Traceback" not in said
    assert "bug" not in said
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.FAILED
    assert manifest.error["exit_code"] == 3


def test_a_disk_that_is_full_before_a_run_is_opened_says_so(tmp_path, monkeypatch, capsys):
    """Hydra writes first, before a run is opened."""
    from hydra.core import utils

    from mens_exp import cli

    def full(*_):
        raise FULL

    monkeypatch.setattr(utils, "_save_config", full)
    assert cli.main(["task=plan", "model=tiny_llama", f"hydra.run.dir={tmp_path / 'run'}"]) == 3
    assert "then continue with: the same command" in capsys.readouterr().err


def test_what_a_killed_run_left_half_written_is_removed(cell, tmp_path):
    """A run killed before it had a manifest leaves a temporary file of its configuration."""
    from mens_exp.tasks.run import open_run

    directory = tmp_path / "run"
    directory.mkdir()
    dead = directory / f".config.yaml.{atomic._machine()}-999999999-01234567.tmp"
    dead.write_text("half")
    with open_run(directory, cell):
        assert not dead.exists()


class Called:
    """An object whose unpickling makes torch call a function."""

    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02.",
        b"PK\x03\x04" + b"\0" * 60,
        b"\x80\x02" + b"(" * 5_000 + b".",
        b"\x80\x02cbuiltins\neval\n.",
        {"adapter": {}, "global_step": "x"},
        {"adapter": {}, "optimizer_states": [3]},
        {"adapter": {}, "optimizer_states": {"a": 1}},
        {"adapter": [1]},
        {"adapter": {}, "more": Called()},
        [1],
    ],
)
def test_a_training_state_that_is_none_is_refused(tmp_path, capsys, content):
    """Any failure of torch's reader is a refusal, and nothing in the file is called."""
    import torch

    from mens_exp.tasks.adapter_anatomy import read_state

    path = tmp_path / "step_00000001.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(DataError, match=r"not a (readable )?training state"):
        read_state(path)
    assert capsys.readouterr().out == ""


def test_a_cache_that_cannot_keep_measurements_does_not_fail_a_run(train_in, tmp_path, monkeypatch):
    """Token counts and the comparison with transformers are computed again by the next run."""
    own = tmp_path / "cache"
    own.mkdir()
    for name in ("reference", "data_contract"):
        (own / name).write_text("no directory", "utf-8")
    monkeypatch.setenv("MENS_EXP_CACHE", str(own))
    run = train_in(tmp_path / "run", "trainer.max_steps=1")
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.SUCCEEDED
    (note,) = [one for one in manifest.notes if "was not kept for later runs" in one]
    assert str(own / "reference") in note
