"""The sandbox that a configuration asks for, probed before it is handed out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mens_exp.config.sandbox import (
    BubblewrapSandbox,
    ExecutingSandbox,
    SandboxConfig,
    UnsafeSandbox,
)
from mens_exp.errors import SetupError
from mens_exp.sandbox.bubblewrap import Bubblewrap
from mens_exp.sandbox.probes import probe
from mens_exp.sandbox.program import Limits
from mens_exp.sandbox.unsafe import Unsafe

if TYPE_CHECKING:
    from mens_exp.sandbox.program import Sandbox

__all__ = ["limits_of", "open_sandbox", "probed"]

_WITHOUT: Final = (
    "sandbox=none measures what needs no execution; sandbox=unsafe executes without isolation"
)


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return a sandbox that works, and never another than was asked for.

    Raises:
        SetupError: it is not there, a probe was not contained, or none was asked for.
    """
    match config:
        case BubblewrapSandbox():
            return probed(Bubblewrap())
        case UnsafeSandbox():
            return Unsafe()
    raise SetupError(
        "nothing generated is executed",
        where="sandbox",
        found=config.name,
        expected="bubblewrap",
        remedy="apt-get install bubblewrap, and leave sandbox= at its default",
    )


def probed(sandbox: Sandbox) -> Sandbox:
    """Return a sandbox that contains every probe.

    Raises:
        SetupError: one was not contained, or the sandbox cannot be made.
    """
    escaped = [result for result in probe(sandbox) if not result.contained]
    if escaped:
        raise SetupError(
            "the sandbox does not contain what it must, and is not used",
            found="; ".join(f"{result.name}: {result.found}" for result in escaped),
            expected="every probe contained",
            remedy=f"use Linux 5.14 or newer with bubblewrap 0.7 or newer; {_WITHOUT}",
        )
    return sandbox


def limits_of(config: SandboxConfig) -> Limits:
    """Return what one program may use; the defaults where the option executes nothing."""
    if not isinstance(config, ExecutingSandbox):
        return Limits()
    limits = Limits(
        memory_mib=config.memory_mib,
        cpu_s=config.cpu_s,
        wall_s=config.wall_s,
        output_kib=config.output_kib,
        file_mib=config.file_mib,
    )
    if isinstance(config, BubblewrapSandbox):
        return replace(limits, processes=config.processes)
    return limits
