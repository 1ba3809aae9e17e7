"""Runs in a directory that is moved, read-only, full or slow.

And a clock that jumps, and a W&B service that accepts connections and never answers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import shutil
import signal
import socket
import sys
import time

import disk_faults
import fork_server
import planned_signals
import pytest
from disk_faults import Watcher

from mens_exp import cli
from mens_exp.artifacts import manifest as manifests
from mens_exp.artifacts.host import lock_holder
from mens_exp.artifacts.manifest import Manifest, Status, SyncRecord
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts; run it on Linux")
WEIGHTS = "adapter/adapter.safetensors"
# Only the process itself sees the mount, because it has its own mount namespace.
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
    """Run a command with a read-only directory, or with a disk of a given size."""
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
    planned = [{"at": "micro-batch", "call": 7, "signal": "SIGKILL"}]
    done = fork_server.run(
        command, cwd=tmp_path, before=planned_signals.source(planned), capture_output=True
    )
    assert done.returncode == -9
    return RunDir(tmp_path / "killed")


def test_a_run_that_was_moved_goes_on_where_it_is(killed, finished, tmp_path):
    """It produces the same adapter, and all its records are valid at the new path."""
    moved = shutil.move(killed.path, tmp_path / "elsewhere" / "moved")
    assert cli.main([f"resume={moved}"]) == 0
    assert (moved / WEIGHTS).read_bytes() == (finished.path / WEIGHTS).read_bytes()
    own = f"hydra.run.dir={tmp_path / 'inspected'}"
    assert cli.main(["task=inspect", f"path={moved}", "inspect.verify=true", own]) == 0
    assert not killed.path.exists()


@linux
def test_a_run_on_a_disk_that_can_only_be_read_is_left_as_it_is(killed, finished, tmp_path):
    """Resuming is refused with a message, and works once the disk is writable."""
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
    """Inspecting a run writes to another directory."""
    own = f"hydra.run.dir={tmp_path / 'inspected'}"
    done = typed(
        "task=inspect",
        f"path={finished.path}",
        "inspect.verify=true",
        own,
        place=finished.path,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@linux
@pytest.mark.parametrize("size", ["4k", "120k", "400k"])
def test_a_disk_without_room_ends_a_run_by_name(tiny_run, tmp_path, size):
    """The disk fills up before the record is written, in training, or at the end."""
    disk = tmp_path / "disk"
    disk.mkdir()
    own = f"hydra.run.dir={disk / 'run'}"
    done = typed(*tiny_run, own, place=disk, size=f"size={size}", cwd=tmp_path)
    assert done.returncode == 3, done.stdout[-2000:] + done.stderr
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr


@linux
def test_a_slow_disk_costs_time_alone(tiny_run, finished, tmp_path):
    """Each file operation takes 10 ms; the adapter is the same and the records are valid."""
    run, delay_s, began = RunDir(tmp_path / "run"), 0.01, time.monotonic()
    with Watcher(tmp_path, delay_s=delay_s) as watcher:
        done = fork_server.run(
            [sys.executable, "-m", "mens_exp", *tiny_run, f"hydra.run.dir={run.path}"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            before=disk_faults.source(watcher.address),
            timeout=300,
        )
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert len(watcher.calls) > 50
    assert took_s > len(watcher.calls) * delay_s  # proves the delay
    assert Manifest.read(run.manifest).status is Status.SUCCEEDED
    assert (run.path / WEIGHTS).read_bytes() == (finished.path / WEIGHTS).read_bytes()
    ours, theirs = ([e["event"] for e in read_events(it.telemetry)] for it in (run, finished))
    assert ours == theirs
    own = f"hydra.run.dir={tmp_path / 'inspected'}"
    assert cli.main(["task=inspect", f"path={run.path}", "inspect.verify=true", own]) == 0


@pytest.fixture
def silent_service(tmp_path, monkeypatch):
    """A server in place of W&B that accepts connections, but never reads or answers."""
    for name in [*os.environ]:
        if name.startswith(("WANDB", "NETRC")):
            monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("WANDB_BASE_URL", "http://{}:{}".format(*listener.getsockname()))
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        yield listener


@linux
def test_a_silent_service_delays_no_run_and_is_named(tiny_run, finished, tmp_path, silent_service):
    """The run waits for the configured one second, and the message names the service."""
    own = f"hydra.run.dir={tmp_path / 'run'}"
    online = ["logger=wandb", "logger.mode=online", "logger.wait_s=1"]
    by_key = {text.partition("=")[0]: text for text in [*tiny_run, *online, own]}
    fork_server.run([sys.executable, "-c", ""])  # the first one waits for the server
    run, began = RunDir(tmp_path / "run"), time.monotonic()
    done = fork_server.run(
        [sys.executable, "-m", "mens_exp", *by_key.values()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    took_s = time.monotonic() - began
    try:
        silent_service.settimeout(60)
        connection, _ = silent_service.accept()  # it was asked
        connection.close()
        assert done.returncode == 0, done.stderr
        assert Manifest.read(run.manifest).status is Status.SUCCEEDED
        assert (run.path / WEIGHTS).read_bytes() == (finished.path / WEIGHTS).read_bytes()
        ours, theirs = ([e["event"] for e in read_events(it.telemetry)] for it in (run, finished))
        assert ours == theirs
        (delivery,) = SyncRecord.read(run.sync).deliveries
        assert delivery["server"] == os.environ["WANDB_BASE_URL"]
        assert delivery["digest"] is None
        assert delivery["why"] == "it was being sent, and nothing says that all of it arrived"
        assert took_s < 60  # measured: 9 s on a busy machine; W&B itself waits for 90 s
    finally:
        while (found := lock_holder(run.sync_lock)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(found[0], signal.SIGKILL)
            time.sleep(0.05)


def test_a_clock_that_jumps_changes_times_alone(train_in, finished, tmp_path, monkeypatch):
    """Each reading is off by up to an hour; the adapter is the same and the records are valid."""
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
    assert cli.main(["task=inspect", f"path={run.path}", "inspect.verify=true", own]) == 0
