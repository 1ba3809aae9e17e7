"""Programs as plain processes with limits: no isolation, for those who ask for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.scorecard import UNSAFE
from mens_exp.sandbox.outcomes import execution_of
from mens_exp.sandbox.process_tree import kill_tree
from mens_exp.sandbox.program import Service
from mens_exp.sandbox.resource_limits import found_tool, limiting_command
from mens_exp.sandbox.supervise import supervise

if TYPE_CHECKING:
    from mens_exp.sandbox.program import Execution, Limits, Program

__all__ = ["Unsafe"]


class Unsafe:
    """A process in a temporary directory, with your rights.

    It can read, write and send what you can. Memory, processor time, wall time, output and the
    size of each file are limited; processes are not, and one that leaves its group can survive.
    """

    kind = UNSAFE

    def __init__(self) -> None:
        """Find the tool.

        Raises:
            SetupError: it is not installed.
        """
        self._prlimit = found_tool("prlimit", package="util-linux")

    def run(self, program: Program, limits: Limits) -> Execution:
        """Execute one program; safe to call from several threads."""
        with tempfile.TemporaryDirectory(prefix="unsafe-", ignore_cleanup_errors=True) as work:
            _write_files(program, work)
            with tempfile.TemporaryFile() as stdin:
                stdin.write(program.stdin.encode("utf-8", "surrogatepass"))
                stdin.seek(0)
                started = time.monotonic()
                process = subprocess.Popen(  # noqa: S603  # asked for by name
                    [*limiting_command(self._prlimit, limits, processes=None), *program.argv],
                    stdin=stdin if program.channel is None else program.channel,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=_environment(work, program),
                    cwd=work,
                    start_new_session=True,
                )
            try:
                ended = supervise(
                    process, limits, started=started, kill=lambda: kill_tree(process.pid)
                )
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it left behind in its group
        return execution_of(ended, ended.returncode, sandbox=self.kind)

    def start(self, program: Program, limits: Limits) -> Service:
        """Start a program that lives until its channel is closed."""
        with contextlib.ExitStack() as surroundings:
            work = surroundings.enter_context(
                tempfile.TemporaryDirectory(prefix="unsafe-", ignore_cleanup_errors=True)
            )
            _write_files(program, work)
            process = subprocess.Popen(  # noqa: S603  # asked for by name
                [*limiting_command(self._prlimit, limits, processes=None), *program.argv],
                stdin=program.channel,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(work, program),
                cwd=work,
                start_new_session=True,
            )
            return Service(process=process, surroundings=surroundings.pop_all())


def _write_files(program: Program, work: str) -> None:
    for name, content in program.files.items():
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        (Path(work) / name).write_bytes(data)


def _environment(work: str, program: Program) -> dict[str, str]:
    path = os.environ.get("PATH", os.defpath)
    return {"HOME": work, "LANG": "C.UTF-8", "PATH": path, "TMPDIR": work, **program.env}
