"""The tools of Rust on this machine, and what they need of a sandbox."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import Final

from mens_exp.errors import SetupError
from mens_exp.sandbox.program import Limits

__all__ = [
    "Clippy",
    "Rustfmt",
    "Toolchain",
    "find_clippy",
    "find_rust",
    "find_rustfmt",
    "least_rust_limits",
]

# measured: rustc 1.95 needs 0.5 s and less than 512 MiB for a task, linking included.
_LEAST: Final = Limits(memory_mib=1024, cpu_s=30, wall_s=30, processes=64, file_mib=64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """The location of the compiler and its libraries, and its version."""

    rustc: str
    sysroot: str
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Clippy:
    """The location of Clippy's compiler and its libraries, and its version."""

    driver: str
    sysroot: str
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rustfmt:
    """The location of the formatter and its libraries, and its version."""

    tool: str
    sysroot: str
    version: str


def find_rust() -> Toolchain:
    """Find the compiler of this machine.

    Raises:
        SetupError: it, or the linker that it calls, is not installed.
    """
    found = shutil.which("rustc")
    if found is None or shutil.which("cc") is None:
        raise SetupError(
            "Rust programs cannot be compiled",
            found=f"no {'cc' if found else 'rustc'}",
            expected="rustc and cc",
            remedy="install Rust (https://rustup.rs, or apt-get install rustc) and gcc",
        )
    told = subprocess.run(  # noqa: S603  # found above
        [found, "--print", "sysroot"], capture_output=True, text=True, check=False, timeout=60
    )
    if told.returncode != 0:
        raise SetupError(
            "rustc does not work", found=told.stderr.strip(), remedy="rustup default stable"
        )
    sysroot = told.stdout.strip()
    rustc = f"{sysroot}/bin/rustc"
    return Toolchain(rustc=rustc, sysroot=sysroot, version=_version(rustc, "rustc", "rustc"))


def find_clippy(toolchain: Toolchain) -> Clippy:
    """Find the Clippy that belongs to a compiler.

    Raises:
        SetupError: it is not installed, or does not start.
    """
    driver = f"{toolchain.sysroot}/bin/clippy-driver"
    return Clippy(
        driver=driver,
        sysroot=toolchain.sysroot,
        version=_version(driver, "clippy", "rust-clippy"),
    )


def find_rustfmt(toolchain: Toolchain) -> Rustfmt:
    """Find the formatter that belongs to a compiler.

    Raises:
        SetupError: it is not installed, or does not start.
    """
    tool = f"{toolchain.sysroot}/bin/rustfmt"
    version = _version(tool, "rustfmt", "rustfmt")
    return Rustfmt(tool=tool, sysroot=toolchain.sysroot, version=version)


def _version(tool: str, component: str, package: str) -> str:
    """Return the version of a tool of the toolchain.

    Args:
        tool: its path.
        component: its name for rustup.
        package: its name for apt-get.

    Raises:
        SetupError: it is not installed, or does not start.
    """
    try:
        told = subprocess.run(  # noqa: S603  # of the toolchain that was found
            [tool, "--version"], capture_output=True, text=True, check=False, timeout=60
        )
        found = told.stderr.strip() if told.returncode else None
    except OSError as error:
        found = f"{tool}: {error.strerror}"
    if found is not None:
        raise SetupError(
            f"{component} does not work, or is not installed",
            found=found,
            expected=f"{component} of the toolchain that rustc belongs to",
            remedy=f"run: rustup component add {component}, or apt-get install {package}",
        )
    return told.stdout.strip()


def least_rust_limits(limits: Limits) -> Limits:
    """Return limits that a compiler can work within, and no less than was given."""
    return replace(
        limits,
        memory_mib=max(limits.memory_mib, _LEAST.memory_mib),
        cpu_s=max(limits.cpu_s, _LEAST.cpu_s),
        wall_s=max(limits.wall_s, _LEAST.wall_s),
        processes=max(limits.processes, _LEAST.processes),
        file_mib=max(limits.file_mib, _LEAST.file_mib),
    )
