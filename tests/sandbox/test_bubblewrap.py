from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from mens_exp.errors import MensError, SetupError
from mens_exp.sandbox import bubblewrap
from mens_exp.sandbox.bubblewrap import WORK, Bubblewrap
from mens_exp.sandbox.program import PYTHON, Limits, Outcome, Program, files_in, python_program

LIMITS = Limits(memory_mib=128, wall_s=8, output_kib=4)
SYSTEM_PYTHON = Path("/usr/bin/python3")


def shell(text):
    return Program(argv=("/bin/sh", "-c", text))


def test_program_has_its_input_and_writes_both_outputs(sandbox):
    """Text passes through stdin, stdout and stderr unchanged."""
    source = "import sys; print(input() + '!'); print('ö', file=sys.stderr)"
    done = sandbox.run(python_program(source, stdin="später\n"), LIMITS)
    assert (done.outcome, done.exit_code, done.signal) == (Outcome.ok, 0, None)
    assert (done.stdout, done.stderr, done.cut) == ("später!\n", "ö\n", ())
    assert done.sandbox == "bubblewrap"
    assert 0 < done.wall_s < 8


def test_program_finds_its_files_and_only_these(sandbox):
    """Files are text or bytes in a writable working directory."""
    files = {"a.txt": "one", "b.bin": b"\xff\x00"}
    program = Program(argv=("/bin/sh", "-c", "ls; pwd; cat a.txt; wc -c < b.bin; > c"), files=files)
    done = sandbox.run(program, LIMITS)
    assert done.stdout == f"a.txt\nb.bin\n{WORK}\none2\n"
    assert done.outcome is Outcome.ok


def test_each_execution_begins_anew(sandbox):
    """Nothing of an earlier execution remains."""
    first = sandbox.run(shell("echo x > /tmp/left; echo x > left; ls /tmp"), LIMITS)
    second = sandbox.run(shell("ls /tmp; ls"), LIMITS)
    assert (first.stdout, second.stdout) == ("left\nprogram\n", "program\n")


def test_environment_is_the_sandbox_s_own(sandbox, monkeypatch):
    """There are four variables, and those that the program sets."""
    monkeypatch.setenv("TOKEN", "secret")
    program = Program(argv=("/usr/bin/env",), env={"MINE": "1"})
    names = {line.partition("=")[0] for line in sandbox.run(program, LIMITS).stdout.splitlines()}
    assert names == {"HOME", "LANG", "MINE", "PATH", "PWD", "TMPDIR"}


def test_large_input_does_not_wait_for_its_reader(sandbox):
    """One mebibyte of input may be ignored or read in full without a deadlock."""
    big = "x" * 2**20
    assert sandbox.run(python_program("pass", stdin=big), LIMITS).outcome is Outcome.ok
    source = "import sys; text = sys.stdin.read(); print(len(text))"
    assert sandbox.run(python_program(source, stdin=big), LIMITS).stdout == "1048576\n"


@pytest.mark.parametrize(
    ("text", "outcome", "code", "number"),
    [
        ("exit 0", Outcome.ok, 0, None),
        ("exit 3", Outcome.failed, 3, None),
        ("exit 127", Outcome.failed, 127, None),
        ("kill -SEGV $$", Outcome.killed_signal, None, 11),
        ("kill -TERM $$", Outcome.killed_signal, None, 15),
        ("kill -XCPU $$", Outcome.cpu_time, None, 24),
    ],
)
def test_exit_status_is_told(sandbox, text, outcome, code, number):
    """There is either an exit code or a signal."""
    done = sandbox.run(shell(text), LIMITS)
    assert (done.outcome, done.exit_code, done.signal) == (outcome, code, number)


@pytest.mark.parametrize(("extra", "outcome"), [(0, Outcome.ok), (1, Outcome.output)])
def test_output_up_to_the_limit_is_kept(sandbox, extra, outcome):
    """4,096 bytes are kept; one more is cut, and the result says so."""
    done = sandbox.run(python_program(f"print('x' * {4096 + extra}, end='')"), LIMITS)
    assert done.outcome is outcome
    assert len(done.stdout) == 4096
    assert done.cut == (("stdout",) if extra else ())


def test_time_is_over_for_a_program_that_waits(sandbox):
    """Output before the timeout is kept."""
    limits = Limits(wall_s=0.4)
    done = sandbox.run(shell("echo begun; sleep 60"), limits)
    assert (done.outcome, done.exit_code, done.signal) == (Outcome.timeout, None, signal.SIGKILL)
    assert done.stdout == "begun\n"
    assert 0.4 <= done.wall_s < 3


def test_memory_that_processes_share_is_counted_once(sandbox):
    """Eight processes that share 32 MiB stay below 128 MiB."""
    source = """
        import os, time
        held = bytearray(b"x") * (32 * 2**20)
        for _ in range(3):
            os.fork()
        time.sleep(0.4)
    """
    done = sandbox.run(python_program(textwrap.dedent(source)), LIMITS)
    assert done.outcome is Outcome.ok


def test_refused_allocation_is_a_passed_memory_limit(sandbox):
    """CPython raises MemoryError and exits with 1."""
    done = sandbox.run(python_program("bytearray(2**30)"), LIMITS)
    assert (done.outcome, done.exit_code) == (Outcome.memory, 1)


def test_path_is_visible_only_when_named(sandbox, tmp_path):
    """A named path is read-only, and its siblings stay hidden."""
    tmp_path.chmod(0o755)
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for path in (shown, hidden):
        path.mkdir()
        (path / "file").write_text("text", "utf-8")
    reading = ("/bin/sh", "-c", f"cat {shown}/file; ls {tmp_path}; > {shown}/new")
    without = sandbox.run(Program(argv=reading), LIMITS)
    assert without.stdout == ""
    done = sandbox.run(Program(argv=reading, visible=(str(shown),)), LIMITS)
    assert done.stdout == "textshown\n"
    assert "new" in done.stderr
    assert done.exit_code != 0


def test_interpreter_has_the_standard_library_alone(sandbox):
    """No installed package can be imported, and string hashes are the same in each run."""
    source = "import json, decimal, sqlite3, ctypes\nprint(*{'a', 'b', 'c', 'd', 'e', 'f'})"
    done = [sandbox.run(python_program(source), LIMITS) for _ in range(3)]
    assert {one.outcome for one in done} == {Outcome.ok}
    assert len({one.stdout for one in done}) == 1
    for package in ("omegaconf", "torch", "mens_exp"):
        assert sandbox.run(python_program(f"import {package}"), LIMITS).exit_code == 1


@pytest.mark.parametrize("name", ["../up", "a/b", "/etc/x", "", ".", ".."])
def test_file_elsewhere_is_refused(name):
    """A program's files must be in its directory."""
    with pytest.raises(MensError, match="plain file name"):
        Program(argv=("true",), files={name: ""})


def test_sandbox_that_cannot_be_made_is_no_failed_program(monkeypatch, sandbox):
    """The error is bubblewrap's own, and no result is returned."""
    monkeypatch.setattr(sandbox, "_system", [*sandbox._system, "--no-such-option"])
    with pytest.raises(SetupError) as caught:
        sandbox.run(shell("true"), LIMITS)
    assert "--no-such-option" in str(caught.value)
    assert "sandbox=none" in str(caught.value)


def test_program_that_cannot_be_mounted_does_not_run(sandbox):
    """A missing path is refused and not skipped."""
    with pytest.raises(SetupError, match="/no/such/path"):
        sandbox.run(Program(argv=("true",), visible=("/no/such/path",)), LIMITS)


@pytest.mark.parametrize(
    ("missing", "package"), [("bwrap", "bubblewrap"), ("prlimit", "util-linux")]
)
def test_missing_tool_is_named_with_its_package(monkeypatch, tmp_path, missing, package):
    """The error exits with code 3 and says how to install it."""
    for name in {"bwrap", "prlimit", "setpriv"} - {missing}:
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=f"{missing} is not installed") as caught:
        Bubblewrap()
    assert f"apt-get install {package}" in str(caught.value)


def test_everything_dies_with_the_process_that_asked(tmp_path):
    """The parent is killed with SIGKILL and cannot clean up."""
    source = """
        from mens_exp.sandbox.bubblewrap import Bubblewrap
        from mens_exp.sandbox.program import Limits, Program
        Bubblewrap().run(Program(argv=("/bin/sleep", "54321")), Limits(wall_s=60))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)]) as asking:
        assert _within(10, lambda: len(_sleeping()) > 0)
        asking.kill()
    assert _within(5, lambda: _sleeping() == [])


def _sleeping():
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_bytes() == b"/bin/sleep\x0054321\x00":
                found.append(entry)
        except OSError:  # it has ended
            continue
    return found


def _within(seconds, holds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(
    os.geteuid() != 0 or not SYSTEM_PYTHON.exists(),
    reason="gives up root's rights: run it as root, with a Python that others may execute",
)
def test_other_users_are_isolated_alike():
    """Without root, a user namespace replaces a separate user id."""
    source, packages = (Path(one.__file__).parents[n] for one, n in ((bubblewrap, 2), (psutil, 1)))
    code = """
        import os
        from mens_exp.sandbox.bubblewrap import Bubblewrap
        from mens_exp.sandbox.opening import probe
        assert os.getuid() == 1000
        print([result for result in probe(Bubblewrap()) if not result.contained])
    """
    words = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--bounding-set=-all"]
    done = subprocess.run(
        [*words, "--inh-caps=-all", SYSTEM_PYTHON, "-B", "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": f"{source}:{packages}", "PATH": os.environ["PATH"], "HOME": "/home"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_files_of_this_machine_are_not_counted():
    """A process with our own /tmp has no file system of its own to count."""
    with subprocess.Popen(["/bin/sleep", "60"]) as sleeping:
        assert files_in(sleeping.pid, "/tmp") == 0  # the process by itself
        sleeping.kill()


def test_python_is_the_same_path_inside(sandbox):
    """The interpreter is used without its virtual environment."""
    done = sandbox.run(python_program("import sys; print(sys.executable)"), LIMITS)
    assert done.stdout.strip() == PYTHON
