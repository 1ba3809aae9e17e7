"""Two machines, which are network namespaces joined by a cable, and torchrun across them.

They share the file of rows; the second one has its own cache and no run directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events

IP = shutil.which("ip") or "ip"
STEPS = 6
F32 = ("quant.compute_dtype=f32", f"trainer.max_steps={STEPS}")
MACHINES = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=2")
ADDRESSES = ("10.77.31.1", "10.77.31.2")


def ip(*arguments):
    subprocess.run([IP, *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines():
    """Two network namespaces, joined by a virtual cable."""
    if shutil.which("ip") is None:
        pytest.skip("the program ip is missing: apt-get install iproute2")
    names, cables = (tuple(f"{kind}{os.getpid()}{side}" for side in "ab") for kind in ("m", "c"))
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable in zip(names, cables, strict=True):
            ip("link", "set", cable, "netns", name)
    except subprocess.CalledProcessError as error:
        for name in made:
            ip("netns", "delete", name)
        pytest.skip(f"no network namespaces here, which root may make: {error.stderr.strip()}")
    for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
        ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
        for each in (cable, "lo"):
            ip("-n", name, "link", "set", each, "up")
    yield names[0], names[1]
    for name in names:
        ip("netns", "delete", name)


def on_machine(number, name, arguments, place):
    """Start torchrun in a namespace."""
    place.mkdir(parents=True)
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": f"c{name[1:]}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if number:
        environment["MENS_EXP_CACHE"] = str(place / "cache")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meeting = [f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}", "--master-port=29501"]
    return subprocess.Popen(  # a user's command, in a namespace
        [IP, "netns", "exec", name, *torchrun, *meeting, "-m", "mens_exp", *arguments],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_machines_train_what_one_does(
    machines,
    tiny_run,
    train_in,
    tmp_path,
):
    """The losses and documents are equal; only the first machine has a record."""
    run = RunDir(tmp_path / "run")
    by_key = {text.partition("=")[0]: text for text in [*tiny_run, *F32, *MACHINES]}
    arguments = [*by_key.values(), f"hydra.run.dir={run.path}"]
    started = [
        on_machine(number, name, arguments, tmp_path / name) for number, name in enumerate(machines)
    ]
    said = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.SUCCEEDED
    assert manifest.facts["processes"] == 2
    alone = train_in(tmp_path / "alone", *F32)
    for ours, theirs in zip(steps(run), steps(alone), strict=True):
        assert ours["batches_sha256"] == theirs["batches_sha256"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
    assert sorted(path.name for path in (tmp_path / machines[1]).iterdir()) == ["cache"]


def steps(run):
    found = [event["payload"] for event in read_events(run.telemetry) if event["event"] == "step"]
    assert len(found) == STEPS
    return found
