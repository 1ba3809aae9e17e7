"""The first process of a distributed run, and the files it leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from contextlib import nullcontext

import pytest

from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.tasks import coordinator
from mens_exp.tasks.coordinator import distributed_run
from mens_exp.tasks.run import Run
from mens_exp.training import distributed


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX processes; run it on Linux")
def test_one_that_waits_for_the_dead_for_ever_gives_up_and_clears_up(
    finished,
    tiny_config,
    tmp_path,
    monkeypatch,
):
    """It exits without unwinding its blocks, which would wait for a GPU collective for ever."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(distributed, "STUCK_S", 0.1)
    monkeypatch.setattr(distributed, "joined", lambda *_: nullcontext())
    monkeypatch.setattr(coordinator, "command", lambda *_: ("-S", "-c", "raise SystemExit(3)"))
    ends = []
    has_ended = threading.Event()

    def end(code):
        ends.append((code, list((tmp_path / "tmp").iterdir())))
        has_ended.set()

    monkeypatch.setattr(os, "_exit", end)
    directory = RunDir(shutil.copytree(finished.path, tmp_path / "run"))
    run = Run(directory, Manifest.read(directory.manifest))
    config = tiny_config("trainer=ddp", "trainer.accelerator=cpu")
    with distributed_run(config, run, None):
        (place,) = (tmp_path / "tmp").iterdir()
        assert place.name.startswith(coordinator.PLACE)
        assert has_ended.wait(60)
    assert ends == [(1, [])]
    left = Manifest.read(directory.manifest)
    assert left.status is Status.FAILED
    assert left.error is not None
    assert "process 1 of 2 has ended" in left.error["message"]
