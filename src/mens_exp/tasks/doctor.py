"""task=doctor: check this machine for problems that would stop a run, each with a remedy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import Requirement

from mens_exp.config.evaluation import BubblewrapSandbox
from mens_exp.errors import MensError, SetupError
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal, wording
from mens_exp.report.document import Step
from mens_exp.report.plan_view import Finding, State, findings_part
from mens_exp.sandbox.opening import open_sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

_LEAST_DISK_BYTES = 2_000_000_000  # for a base model in the cache, checkpoints and reports
_LEAST_MEMORY_BYTES = 3_000_000_000  # measured: the main job peaks at 2.8 GB
_OLDEST_PYTHON = (3, 11)


def doctor(config: RunConfig, run: Run) -> None:
    """Show every finding and record it.

    Raises:
        SetupError: a check failed; all findings are shown first.
    """
    del config  # concerns the machine, not a run
    findings = list(examine())
    run.manifest.facts["findings"] = [finding.to_json() for finding in findings]
    terminal.show(findings_part(findings))
    bad = [finding.name for finding in findings if finding.state is State.BAD]
    if bad:
        raise SetupError(
            "this machine cannot run the task",
            found=", ".join(bad),
            expected="no line marked ✗",
            remedy="follow the advice on the lines marked ✗",
        )
    terminal.say_next([Step(wording.command(), "fine-tune a model")])


def examine() -> Iterator[Finding]:
    """Check everything that a run needs."""
    yield _python()
    yield from _packages()
    yield _torch()
    yield from _four_bit()
    yield _bundled_weights()
    yield _memory()
    yield from _folders()
    yield _sandbox()
    yield _wandb()


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info[:2] < _OLDEST_PYTHON
    return Finding(
        name="Python",
        state=State.BAD if old else State.GOOD,
        found=version,
        remedy="install Python 3.11 or newer" if old else None,
    )


def _packages() -> Iterator[Finding]:
    """Compare every installed dependency with the range that this package declares."""
    try:
        declared = metadata.requires("mens-exp") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            name="packages",
            state=State.NOTE,
            found="mens-exp is not installed, it runs from its sources",
            remedy="pip install -c constraints.txt -e .",
        )
        return
    requirements = [Requirement(text) for text in declared]
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate()]
    wrong = [problem for one in needed if (problem := _unmet(one)) is not None]
    yield from wrong
    if not wrong:
        yield Finding(
            name="packages", state=State.GOOD, found=f"{len(needed)} in their declared ranges"
        )


def _unmet(requirement: Requirement) -> Finding | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        version = None
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return None
    return Finding(
        name=requirement.name,
        state=State.BAD,
        found="not installed" if version is None else version,
        remedy=f"pip install '{requirement.name}{requirement.specifier}'",
    )


def _torch() -> Finding:
    import torch

    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        return Finding(
            name="torch",
            state=State.BAD if driver else State.GOOD,
            found=f"{torch.__version__}, no usable GPU" + (", yet a driver" if driver else ""),
            remedy="install the CUDA build of torch that pytorch.org names" if driver else None,
        )
    devices = [
        f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Finding(
        name="torch",
        state=State.GOOD if bf16 else State.NOTE,
        found=f"{torch.__version__}, {', '.join(devices)}",
        remedy=None if bf16 else "the GPU has no bf16: use quant.compute_dtype=f32",
    )


def _four_bit() -> Iterator[Finding]:
    import torch

    from mens_exp.quant.bnb import four_bit_test

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    for device in devices:
        test = four_bit_test(device)
        errors = f"forward {test.forward_error}, backward {test.backward_error} off"
        yield Finding(
            name=f"4 bits on {device}",
            state=State.GOOD if test.passed else State.BAD,
            found="forward and backward agree with torch"
            if test.passed
            else (test.reason or errors),
            remedy=None if test.passed else "pip install --force-reinstall bitsandbytes",
        )


def _bundled_weights() -> Finding:
    from mens_exp.config.compose import compose, typed
    from mens_exp.config.model import BundledModel
    from mens_exp.layout.model_cache import locate_bundled

    model = typed(compose([[]])[0].values).model
    assert isinstance(model, BundledModel), "the default model is bundled"
    try:
        locate_bundled(model)
    except MensError as error:
        return Finding(
            name="demonstration weights",
            state=State.NOTE,
            found=error.what,
            remedy=error.remedy,
        )
    if importlib.util.find_spec("gguf") is None:
        return Finding(
            name="demonstration weights",
            state=State.NOTE,
            found="there, but gguf is not installed to read them",
            remedy="pip install 'mens-exp[gguf]'",
        )
    return Finding(name="demonstration weights", state=State.GOOD, found=model.name)


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    short = free < _LEAST_MEMORY_BYTES
    return Finding(
        name="memory",
        state=State.NOTE if short else State.GOOD,
        found=f"{free / 2**30:.1f} GiB free",
        remedy="the main job needs about 2.8 GB: close something" if short else None,
    )


def _folders() -> Iterator[Finding]:
    try:
        cache = writable_cache()
    except MensError as error:
        yield Finding(name="cache", state=State.BAD, found=error.what, remedy=error.remedy)
    else:
        yield _disk("cache", cache)
    here = Path.cwd()
    if os.access(here, os.W_OK):
        yield _disk("outputs", here)
    else:
        yield Finding(
            name="outputs",
            state=State.BAD,
            found=f"{here} cannot be written",
            remedy="change to a directory of yours, or set hydra.run.dir",
        )


def _disk(name: str, directory: Path) -> Finding:
    free = shutil.disk_usage(directory).free
    full = free < _LEAST_DISK_BYTES
    return Finding(
        name=name,
        state=State.BAD if full else State.GOOD,
        found=f"{directory}, {free / 2**30:.1f} GiB free",
        remedy="free at least 2 GB there" if full else None,
    )


def _sandbox() -> Finding:
    try:
        sandbox = open_sandbox(BubblewrapSandbox())
    except SetupError as error:
        return Finding(
            name="sandbox",
            state=State.NOTE,
            found=f"{error.what}; {error.found or 'nothing generated can be executed'}",
            remedy=error.remedy,
        )
    return Finding(
        name="sandbox", state=State.GOOD, found=f"{sandbox.kind}, every hostile probe contained"
    )


def _wandb() -> Finding:
    mode = os.environ.get("WANDB_MODE")
    has_key = bool(os.environ.get("WANDB_API_KEY")) or _netrc_names("wandb")
    account = "an account is configured" if has_key else "no account configured"
    return Finding(
        name="W&B",
        state=State.GOOD,
        found=f"offline unless logger.mode=online; {account}"
        + (f"; WANDB_MODE={mode} is not read" if mode else ""),
    )


def _netrc_names(host: str) -> bool:
    path = Path.home() / ".netrc"
    try:
        return host in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
