"""The sandbox that executes generated programs, and the limits of each program."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = [
    "BubblewrapSandbox",
    "ExecutingSandbox",
    "NoSandbox",
    "SandboxConfig",
    "UnsafeSandbox",
]


@dataclass(kw_only=True, slots=True)
class SandboxConfig:
    """Settings that every option has."""

    name: str = setting(MISSING, "Name of the sandbox; set by the option.")


@dataclass(kw_only=True, slots=True)
class NoSandbox(SandboxConfig):
    """Nothing generated is executed: figures that need it are null, syntax is still measured."""

    name: str = "none"


@dataclass(kw_only=True, slots=True)
class ExecutingSandbox(SandboxConfig):
    """The limits of each program."""

    memory_mib: int = setting(
        512, "Memory of one program, all its processes together, in MiB.", ge=64, le=65_536
    )
    cpu_s: float = setting(
        10.0, "Processor time of one program, all its processes together, in s.", gt=0, le=3_600
    )
    wall_s: float = setting(
        10.0, "Time until the whole process tree of one program is killed, in s.", gt=0, le=3_600
    )
    output_kib: int = setting(
        256, "Longest stdout, and longest stderr, of one program, in KiB.", ge=1, le=65_536
    )
    file_mib: int = setting(16, "What one program may write into files, in MiB.", ge=1, le=65_536)
    workers: int | None = setting(
        None, "Programs executed at once; null is one for each processor.", ge=1, le=1_024
    )


@dataclass(kw_only=True, slots=True)
class BubblewrapSandbox(ExecutingSandbox):
    """No network, a read-only root, a private /tmp, no home; probed before it is used."""

    name: str = "bubblewrap"
    processes: int = setting(32, "Processes and threads of one program at once.", ge=1, le=4_096)


@dataclass(kw_only=True, slots=True)
class UnsafeSandbox(ExecutingSandbox):
    """No isolation: a program can read, write and send what you can. No evidence for promotion."""

    name: str = "unsafe"
