"""Forked processes compared with started ones: tests can rely on the same behaviour."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import fork_server
import psutil
import pytest

from mens_exp.artifacts import host

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc and sets a subreaper; run it on Linux"
)

STATE = """
import json, os, signal, sys, tempfile, threading, time, torch
import numpy, random
handled = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE]
print(json.dumps({
    "arguments": sys.argv,
    "cwd": os.getcwd(),
    "path": sys.path[0],
    "environment": dict(os.environ),
    "name": __name__,
    "own main": sys.modules["__main__"].__dict__ is globals(),
    "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in handled],
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "leads a session": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "files": [n for n in os.listdir("/proc/self/fd") if int(n) > 3],
    "threads": len(threading.enumerate()),
    "torch threads": torch.get_num_threads(),
    "temporary": tempfile.gettempdir(),
    "buffering": [sys.stdin.line_buffering, sys.stdout.line_buffering, sys.stderr.line_buffering],
    "input": sys.stdin.read(),
    "zone": time.tzname,
}))
"""
SAME = ("arguments", "cwd", "path", "environment", "name", "own main", "handlers", "blocked")
SAME += ("leads a session", "parent", "threads", "torch threads", "temporary")
SAME += ("buffering", "input", "zone")


def python(*arguments):
    return [sys.executable, *arguments]


def said(way, *arguments, **options):
    with way(python(*arguments), stdout=subprocess.PIPE, text=True, **options) as process:
        output, _ = process.communicate(options and "some words")
    assert process.returncode == 0
    return json.loads(output)


def test_a_fork_has_the_state_of_a_start(tmp_path, monkeypatch):
    """Arguments, paths, environment, signals, files, threads and random numbers."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "ONLY_HERE": "1", "OMP_NUM_THREADS": "2", "PYTHONPATH": "/reach"},
        "stdin": subprocess.PIPE,
        "start_new_session": True,
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        started, forked = (
            said(way, "-c", STATE, "a", "b c", **options)
            for way in (subprocess.Popen, fork_server.Popen)
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    assert {name: forked[name] for name in SAME} == {name: started[name] for name in SAME}
    assert forked["parent"] == os.getpid()
    assert len(forked["files"]) <= 1  # the connection to its own server


@pytest.mark.parametrize("way", [subprocess.Popen, fork_server.Popen])
def test_two_processes_draw_other_numbers(way):
    """The global generators of Python, numpy and torch are seeded anew."""
    code = (
        "import json, random, numpy, torch, uuid\n"
        "print(json.dumps([random.random(), numpy.random.rand(), str(uuid.uuid4()),"
        " torch.rand(1).item()]))"
    )
    one, other = (said(way, "-c", code) for _ in range(2))
    assert [a == b for a, b in zip(one, other, strict=True)] == [False] * 4


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise ValueError('words')", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_exit_codes_are_those_of_python(code, expected):
    """The codes agree after a signal and an unhandled KeyboardInterrupt, too."""
    command = python("-c", f"import atexit; atexit.register(print, 'the end')\n{code}")
    started = subprocess.run(command, capture_output=True, text=True, check=False)
    forked = fork_server.run(command, capture_output=True, text=True)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.returncode == expected
    assert ("words" in forked.stderr) == ("words" in code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_process_and_its_group(number):
    """The handle's pid is the process itself, in a session of its own if requested."""
    for send in (os.kill, os.killpg):
        command = python("-c", "import time; print(flush=True); time.sleep(60)")
        with fork_server.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            process.stdout.read(1)
            send(process.pid, number)
            assert process.wait(120) == -number


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_a_signal_right_after_the_start_is_not_lost(send):
    """A start has its session and Python's handling of signals from its first instant."""
    for _ in range(20):
        command = python("-c", "import time; time.sleep(60)")
        with fork_server.Popen(command, start_new_session=True) as process:
            send(process.pid, signal.SIGTERM)
            assert process.wait(120) == -signal.SIGTERM


def test_the_process_table_shows_the_command_and_the_system_its_memory():
    """Launchers find processes by command line, and read the peak memory with wait4."""
    command = python("-c", "import time; print(flush=True); time.sleep(60)", "some words")
    with fork_server.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        assert [word for word in psutil.Process(process.pid).cmdline() if word] == command
        process.kill()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert isinstance(usage, resource.struct_rusage)
    assert usage.ru_maxrss > 10_000


def test_what_a_fork_starts_is_forked_too(tmp_path):
    """It is the fork's own child, and does not inherit the fork's state."""
    inner = (
        "import builtins, os, torch; print(os.getppid(), os.getpid(), torch.initial_seed(),"
        " hasattr(builtins, 'changed'))"
    )
    outer = (
        "import builtins, os, time, torch\n"
        "from pathlib import Path\n"
        "from mens_exp.artifacts import host\n"
        "torch.manual_seed(5); builtins.changed = True; torch.rand(9, 9) @ torch.rand(9, 9)\n"
        "with open('inner', 'wb') as output:\n"
        f"    inner = host.spawn_python(['-c', {inner!r}], output=output)\n"
        "assert inner.wait() == 0\n"
        "print(os.getpid(), inner.pid, type(inner).__module__)"
    )
    done = fork_server.run(
        python("-c", outer), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    pid, inner_pid, module = done.stdout.split()
    parent, own, seed, changed = (tmp_path / "inner").read_text("utf-8").split()
    assert (parent, own, module) == (pid, inner_pid, "fork_server")
    assert (int(seed) != 5, changed) == (True, "False")


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_no_server_outlives_its_process(end):
    """The server ends if its process exits or is killed."""
    code = f"import os, psutil; print(psutil.Process().children()[0].pid, flush=True); {end}"
    done = fork_server.run(python("-c", code), capture_output=True, text=True)
    (server,) = done.stdout.split()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(server)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(server)) or not psutil.Process(int(server)).is_running()


def test_what_is_read_at_import_has_a_server_of_its_own():
    """Libraries keep the values that these variables had when they were imported."""
    usual = dict(os.environ)
    assert fork_server.server_for(usual) is fork_server.server_for({**usual, "SOME": "1"})
    key = fork_server._key
    assert key({**usual, "HF_HUB_OFFLINE": "1"}) != key(usual)
    assert key({**usual, "ATEN_CPU_CAPABILITY": "default"}) != key(usual)


def test_a_server_reads_no_configuration_of_the_test_that_starts_it(tmp_path, monkeypatch):
    """The test may be in a directory with an intentionally broken conf/."""
    broken = tmp_path / "conf" / "lora" / "mine.yaml"
    broken.parent.mkdir(parents=True)
    broken.write_text("- not: [yaml", "utf-8")
    monkeypatch.chdir(tmp_path)
    server = fork_server.ForkServer.start(dict(os.environ), tmp_path / "log")
    try:
        server.wait_until_ready()
    finally:
        server.close()


def test_shells_fork_commands_of_mens_exp_and_execute_others(tmp_path):
    """Output, exit codes and signals pass through."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    fork_server.write_stubs(stubs)
    environment = {**os.environ, "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}"}
    script = (
        "python -m mens_exp --version; mens-exp --version; python -m mens_exp lora.r=0;"
        ' echo "$?"; python -c "import sys; print(sys.executable)"'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        check=False,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    first, second, code, other = done.stdout.splitlines()
    assert first == second
    assert first.startswith("mens_exp ")
    assert (code, other) == ("2", sys.executable)
    assert "lora.r" in done.stderr
    long = "import time, mens_exp; print(flush=True); time.sleep(60)"
    with subprocess.Popen([stubs / "python", "-c", long], stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM


def test_other_commands_are_refused():
    """Only this interpreter can be forked; a real start has to be explicit."""
    with pytest.raises(ValueError, match="only commands of"):
        fork_server.Popen(["/bin/true"])


def test_what_this_process_spawns_is_forked():
    """Tests replace the one function through which the package starts processes."""
    assert host.Popen is fork_server.Popen
