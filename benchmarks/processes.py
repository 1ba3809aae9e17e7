"""Python subprocesses for benchmarks: started, awaited and timed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, NamedTuple

from mens_exp.artifacts.host import spawn_python

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


class Took(NamedTuple):
    """Wall time of a process, and CPU time of its process tree."""

    seconds: float
    cpu_seconds: float
    output: str


def timed(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    source: Path | None = None,
) -> Took:
    """Run ``python`` with these arguments to completion.

    Args:
        arguments: arguments of ``python``.
        cwd: working directory.
        environment: variables that differ from this process's.
        source: directory to import mens_exp from instead of this checkout's.

    Raises:
        SystemExit: the process failed; the message contains the end of its output.
    """
    before, began = processor_seconds(), time.perf_counter()
    with started(arguments, cwd=cwd, environment=environment, source=source) as (process, output):
        process.wait()
        seconds, cpu_seconds = time.perf_counter() - began, processor_seconds() - before
        return Took(seconds, cpu_seconds, _text(output))


@contextlib.contextmanager
def started(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    source: Path | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start ``python`` with these arguments, and wait for it at the end of the block.

    The arguments are those of `timed`. An exception in the block kills the process.

    Yields:
        The process, and its output file.

    Raises:
        SystemExit: the process failed.
    """
    variables = os.environ | dict(environment or {})
    with tempfile.TemporaryFile() as output:
        if source is None:
            process = spawn_python(arguments, output=output, environment=variables, cwd=cwd)
        else:
            process = subprocess.Popen(  # noqa: S603  # our own interpreter
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables | {"PYTHONPATH": str(source)},
                cwd=cwd,
                start_new_session=True,
            )
        try:
            yield process, output
            process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode:
            command = " ".join(["python", *arguments])
            sys.exit(f"{_text(output)[-4000:]}\n{command}: exit code {process.returncode}")


def processor_seconds() -> float:
    """Return the CPU time of all awaited children and their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode("utf-8", "replace")
