"""Runs whose directory moves, can only be read or has no room, and a clock that jumps."""

from __future__ import annotations

import datetime as dt
import itertools
import shutil
import sys

import fork_server
import planned_signals
import pytest

from mens_exp import cli
from mens_exp.artifacts import manifest as manifests
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts; run it on Linux")
WEIGHTS = "adapter/adapter.safetensors"
# Only the process itself sees the mount: it has a namespace of its own.
MOUNT = """
import ctypes, os
_libc = ctypes.CDLL(None, use_errno=True)
def _must(code):
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
_ids = os.getuid(), os.getgid()
_must(_libc.unshare(0x00020000 | (0x10000000 if _ids[0] else 0)))
if _ids[0]:
    open("/proc/self/setgroups", "w").write("deny")
    for _name, _id in zip(("uid_map", "gid_map"), _ids):
        open(f"/proc/self/{{_name}}", "w").write(f"{{_id}} {{_id}} 1")
_must(_libc.mount(None, b"/", None, 0x4000 | 0x40000, None))
_place = {place!r}.encode()
if {size!r} is None:
    _must(_libc.mount(_place, _place, None, 0x1000, None))
    _must(_libc.mount(None, _place, None, 0x1000 | 0x20 | 0x1, None))
else:
    _must(_libc.mount(b"tmpfs", _place, b"tmpfs", 0, {size!r}.encode()))
"""


def typed(*command, place, size=None, cwd):
    """Type a command where a directory can only be read, or is a disk of a size."""
    return fork_server.run(
        [sys.executable, "-m", "mens_exp", *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        before=MOUNT.format(place=str(place), size=size),
        timeout=300,
    )


@pytest.fixture
def killed(tiny_run, tmp_path):
    """A run that was killed between its first and its second checkpoint."""
    command = [sys.executable, "-m", "mens_exp", *tiny_run, f"hydra.run.dir={tmp_path / 'killed'}"]
    planned = [{"at": "micro-batch", "call": 13, "signal": "SIGKILL"}]
    done = fork_server.run(
        command, cwd=tmp_path, before=planned_signals.source(planned), capture_output=True
    )
    assert done.returncode == -9
    return RunDir(tmp_path / "killed")


def test_a_run_that_was_moved_goes_on_where_it_is(killed, finished, tmp_path):
    """To the same adapter, and every record of it holds at the new place."""
    moved = shutil.move(killed.path, tmp_path / "elsewhere" / "moved")
    assert cli.main([f"resume={moved}"]) == 0
    assert (moved / WEIGHTS).read_bytes() == (finished.path / WEIGHTS).read_bytes()
    own = f"hydra.run.dir={tmp_path / 'inspected'}"
    assert cli.main(["task=inspect", f"path={moved}", "verify=true", own]) == 0
    assert not killed.path.exists()


@linux
def test_a_run_on_a_disk_that_can_only_be_read_is_left_as_it_is(killed, finished, tmp_path):
    """It cannot go on there, says so, and goes on once the disk can be written."""
    before = {path: path.read_bytes() for path in killed.path.rglob("*") if path.is_file()}
    done = typed(f"resume={killed.path}", place=killed.path, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "the file system is read-only" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in killed.path.rglob("*") if path.is_file()} == before
    assert cli.main([f"resume={killed.path}"]) == 0
    assert (killed.path / WEIGHTS).read_bytes() == (finished.path / WEIGHTS).read_bytes()


@linux
def test_a_run_that_can_only_be_read_is_verified(finished, tmp_path):
    """What looks at a run writes elsewhere."""
    own = f"hydra.run.dir={tmp_path / 'inspected'}"
    done = typed(
        "task=inspect",
        f"path={finished.path}",
        "verify=true",
        own,
        place=finished.path,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@linux
@pytest.mark.parametrize("size", ["4k", "120k", "400k"])
def test_a_disk_without_room_ends_a_run_by_name(tiny_run, tmp_path, size):
    """Before its record, while it trains, or at its end."""
    disk = tmp_path / "disk"
    disk.mkdir()
    own = f"hydra.run.dir={disk / 'run'}"
    done = typed(*tiny_run, own, place=disk, size=f"size={size}", cwd=tmp_path)
    assert done.returncode == 3, done.stdout[-2000:] + done.stderr
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_clock_that_jumps_changes_times_alone(train_in, finished, tmp_path, monkeypatch):
    """By an hour to and fro at every look: the same adapter, and records that hold."""
    jumps = itertools.cycle([dt.timedelta(hours=1), dt.timedelta(hours=-1)])

    class Clock(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + next(jumps)

    with monkeypatch.context() as patch:
        patch.setattr(manifests, "datetime", Clock)
        run = train_in(tmp_path / "run")
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.SUCCEEDED
    assert manifest.results["wall_s"] < 600
    assert (run.path / WEIGHTS).read_bytes() == (finished.path / WEIGHTS).read_bytes()
    own = f"hydra.run.dir={tmp_path / 'inspected'}"
    assert cli.main(["task=inspect", f"path={run.path}", "verify=true", own]) == 0
