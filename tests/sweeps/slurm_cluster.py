"""A Slurm cluster of one or more nodes, munge included, in its own directory.

:func:`cluster` starts and ends it. The system's own configuration is neither read nor written, and
only processes that were started here are ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

LIMIT_S = 60

# No cgroups, which a container may not create, and two processors on every machine. A requeued
# job may start again as soon as its credential has expired (cred_expire).
CONFIGURATION = """
ClusterName=mens
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool{each}
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd{each}.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd{each}.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2
"""
NODE = """
NodeName=DEFAULT CPUs=2 RealMemory=2000 State=UNKNOWN
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}
"""


def missing():
    """Return the reason why no cluster can be started here, if any."""
    names = ("munged", "slurmctld", "slurmd", "sbatch")
    where = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    absent = [name for name in names if shutil.which(name, path=where) is None]
    if absent:
        return f"{', '.join(absent)} is missing: apt-get install slurm-wlm munge"
    return "Slurm's daemons need root here" if os.geteuid() != 0 else None


@contextmanager
def cluster(more="", names=()):
    """Start a cluster; at the end, stop it with all its jobs.

    Args:
    more: further lines of its configuration.
    names: the names of its nodes, each with a daemon on this machine; by default one node with
    this machine's own name.

    Yields:
    The environment variables that its commands need.
    """
    place = Path(tempfile.mkdtemp(prefix="slurm_"))  # a socket's path has at most 107 bytes
    environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
    environment["PATH"] += os.pathsep + "/usr/sbin"
    started = []
    try:
        _configure(place, environment, more, names)
        _munge(place, environment, started)
        of_nodes = {f"slurmd.{name}": ["slurmd", "-N", name] for name in names}
        daemons = {"slurmctld": ["slurmctld"], **(of_nodes or {"slurmd": ["slurmd"]})}
        for name, command in daemons.items():
            _run([*command, "-f", str(place / "slurm.conf")], environment)
            started.append(place / f"{name}.pid")
            _pid(started[-1])
        _wait_until(environment, "idle")
        yield {"SLURM_CONF": environment["SLURM_CONF"], "PATH": environment["PATH"]}
        _end_jobs(environment)
    finally:
        for file in reversed(started):
            _end(_pid(file))  # the current one: a test may have restarted it
        shutil.rmtree(place, ignore_errors=True)


def _configure(place, environment, more, names):
    host = socket.gethostname().partition(".")[0]
    for name in ("state", *(f"spool.{name}" for name in names), *(() if names else ("spool",))):
        (place / name).mkdir()
    with ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(1 + max(1, len(names)))]
        for one in free:
            one.bind(("127.0.0.1", 0))
        controller_port, *ports = (one.getsockname()[1] for one in free)
    text = "".join(
        NODE.format(name=name, host=host, port=port)
        for name, port in zip(names or (host,), ports, strict=True)
    )
    each = ".%n" if names else ""
    text += CONFIGURATION.format(host=host, place=place, controller_port=controller_port, each=each)
    (place / "slurm.conf").write_text(text + more, "ascii")
    # 23.11 and newer work without the plugin; older ones load it, and use nothing of it.
    said = _run(["slurmd", "-V"], environment).split()[-1]
    version = tuple(int(part) for part in said.split(".")[:2])
    plugin = "disabled" if version >= (23, 11) else "cgroup/v1"
    (place / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n", "ascii")


def _munge(place, environment, started):
    key = place / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log"}
    names["seed-file"] = "seed"
    files = [f"--{option}={place}/munge.{name}" for option, name in names.items()]
    _run(["munged", "--force", *files], environment)
    started.append(place / "munge.pid")
    _pid(started[-1])


def _run(command, environment):
    program = shutil.which(command[0], path=environment["PATH"])
    assert program is not None, command[0]
    done = subprocess.run(
        [program, *command[1:]], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def _pid(path):
    began = time.time()
    while not path.exists() or not path.read_text("ascii").strip():
        assert time.time() - began < LIMIT_S, f"no {path}"
        time.sleep(0.05)
    return int(path.read_text("ascii"))


def _wait_until(environment, *states):
    """Wait until every node is in one of the given states."""
    began = time.time()
    asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
    while not set(_run(asked, environment).split()) <= set(states):
        assert time.time() - began < LIMIT_S, "the nodes did not come up"
        time.sleep(0.1)


def _end_jobs(environment):
    _run(["scancel", "--me"], environment)
    began = time.time()
    while _run(["squeue", "--noheader"], environment).strip() and time.time() - began < LIMIT_S:
        time.sleep(0.2)


def _end(pid):
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(family, timeout=10)
    for one in left:
        one.kill()
