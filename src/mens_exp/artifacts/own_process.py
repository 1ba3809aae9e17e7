"""Processes of this interpreter that run modules of this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["python_path", "spawn"]

_SOURCE = Path(__file__).resolve().parents[2]


def python_path(environment: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of an environment, with the directory of this package in front."""
    return os.pathsep.join(filter(None, [str(_SOURCE), environment.get("PYTHONPATH", "")]))


def spawn(
    arguments: Sequence[str],
    *,
    output: IO[bytes] | int,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Popen[bytes]:
    """Start this interpreter in a session of its own, without input.

    Neither Ctrl-C in the terminal nor closing the terminal ends such a process.

    Args:
        arguments: of ``python``.
        output: file that takes standard output and standard error.
        environment: of the process, this one's by default; this package can be imported there.
        cwd: working directory of the process, this one's by default.

    Raises:
        OSError: the system cannot start another process.
    """
    environment = os.environ if environment is None else environment
    return Popen(  # noqa: S603  # our own interpreter and modules
        [sys.executable, *arguments],
        stdin=DEVNULL,
        stdout=output,
        stderr=STDOUT,
        env={**environment, "PYTHONPATH": python_path(environment)},
        cwd=cwd,
        start_new_session=True,
    )
