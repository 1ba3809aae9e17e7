"""A Slurm cluster of one node, munge included, in a directory of its own.

Started and ended by whoever enters :func:`cluster`; nothing of the system's own configuration is
read or written, and only processes that were started here are ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

LIMIT_S = 60

# No cgroups, which a container may not make; two processors, whatever the machine has. A job that
# is put back may start again as soon as its credential has expired (cred_expire).
CONFIGURATION = """
ClusterName=mens
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
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
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1
PartitionName=high Nodes={host} PriorityTier=2
"""


def missing():
    """Say what keeps a cluster from being started here."""
    names = ("munged", "slurmctld", "slurmd", "sbatch")
    where = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    absent = [name for name in names if shutil.which(name, path=where) is None]
    if absent:
        return f"{', '.join(absent)} is missing: apt-get install slurm-wlm munge"
    return "Slurm's daemons need root here" if os.geteuid() != 0 else None


@contextmanager
def cluster(more=""):
    """Start a cluster, and end it with all its jobs.

    Args:
        more: further lines of its configuration.

    Yields:
        What its commands need in their environment.
    """
    place = Path(tempfile.mkdtemp(prefix="slurm_"))  # a socket's path is 107 bytes at most
    environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
    environment["PATH"] += os.pathsep + "/usr/sbin"
    started = []
    try:
        _configure(place, environment, more)
        _munge(place, environment, started)
        for name in ("slurmctld", "slurmd"):
            _run([name, "-f", str(place / "slurm.conf")], environment)
            started.append(place / f"{name}.pid")
            _pid(started[-1])
        _wait_until(environment, "idle")
        yield {"SLURM_CONF": environment["SLURM_CONF"], "PATH": environment["PATH"]}
        _end_jobs(environment)
    finally:
        for file in reversed(started):
            _end(_pid(file))  # that of today: a test may have started it again
        shutil.rmtree(place, ignore_errors=True)


def _configure(place, environment, more):
    for name in ("state", "spool"):
        (place / name).mkdir()
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(
        host=host, place=place, controller_port=ports[0], node_port=ports[1]
    )
    (place / "slurm.conf").write_text(text + more, "ascii")
    # 23.11 and newer can do without the plugin; older ones load it, and use nothing of it.
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
    began = time.time()
    asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
    while _run(asked, environment).split()[0] not in states:
        assert time.time() - began < LIMIT_S, "the node did not come up"
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
