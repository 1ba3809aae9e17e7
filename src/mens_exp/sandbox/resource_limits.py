"""The limits that the kernel keeps for each process of a program."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING, Final

from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from mens_exp.sandbox.program import Limits

__all__ = ["found_tool", "limiting_command"]

_OPEN_FILES: Final = 256  # a linker opens every library at once
_KILL_AFTER_S: Final = 1  # from SIGXCPU, which can be ignored, to SIGKILL, which cannot


def found_tool(name: str, *, package: str) -> str:
    """Return where a program of this machine is.

    Raises:
        SetupError: it is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise SetupError(
            f"{name} is not installed, and generated programs are executed with it alone",
            remedy=f"apt-get install {package}; sandbox=none measures what needs no execution; "
            "sandbox=unsafe executes without isolation",
        )
    return found


def limiting_command(prlimit: str, limits: Limits, *, processes: int | None) -> list[str]:
    """Return the words before a command that lower its limits.

    Args:
        prlimit: where util-linux's prlimit is.
        limits: what they are.
        processes: most processes of the user id, or None to leave that as it is.
    """
    cpu_s = max(1, math.ceil(limits.cpu_s))
    words = [
        prlimit,
        f"--as={limits.memory_mib * 2**20}",
        f"--cpu={cpu_s}:{cpu_s + _KILL_AFTER_S}",
        f"--fsize={limits.file_mib * 2**20}",
        f"--nofile={_OPEN_FILES}",
        "--core=0",
    ]
    if processes is not None:
        words.append(f"--nproc={processes}")
    return words
