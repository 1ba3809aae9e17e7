"""The files of a run that may leave this machine, and what may not stand in them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.checkpoint_digests import NAME as CHECKPOINT_DIGESTS
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.plain_yaml import parse_yaml
from mens_exp.errors import DataError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.errors import MensError

__all__ = ["changed_files", "path_problems", "run_files", "secret_problems"]

_TEXT = {".json", ".jsonl", ".yaml", ".md", ".html"}
# What a credential of the services that a run may meet looks like, each by its own prefix.
_SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\bwandb_v1_[A-Za-z0-9_]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_ABSOLUTE = re.compile(r"(?:^|=)(/[^/\s'\"]+/[^\s'\"]*|[A-Za-z]:[\\/][^\s'\"]+|~/[^\s'\"]+)$")


def run_files(run: RunDir, *, checkpoints: bool = False) -> dict[str, Path]:
    """Return the files that make a run complete, by their path relative to its directory."""
    files = [
        run.manifest,
        run.config,
        run.plan,
        run.telemetry,
        run.scorecard,
        run.events,
        run.validation,
        run.report,
        run.model_card,
        run.run_summary,
        run.skip_stats,
        *run.scorecards.glob("step_*.jsonl"),
        *run.adapter.rglob("*"),
    ]
    if checkpoints:
        files += [*run.checkpoints.glob("*.ckpt"), run.checkpoints / CHECKPOINT_DIGESTS]
    whole = {path.relative_to(run.path): path for path in files if path.is_file()}
    return {
        name.as_posix(): whole[name]
        for name in sorted(whole)
        if not any(part.startswith(".") for part in name.parts)
    }


def changed_files(run: RunDir) -> Iterator[MensError]:
    """Yield every output that is no longer what the manifest says the run left."""
    for name, expected in Manifest.read(run.manifest).outputs.items():
        path = run.path / name
        found = sha256_file(path) if path.is_file() else "no such file"
        if found != expected:
            yield DataError(
                "is not what the run left",
                where=str(path),
                found=found,
                expected=expected,
                remedy="put it back as it was, or train again",
            )


def secret_problems(files: Iterable[tuple[str, Path]]) -> Iterator[MensError]:
    """Yield every file in which something looks like a credential; never the credential itself."""
    for name, path in files:
        if path.suffix in _TEXT and (found := _SECRET.search(path.read_text("utf-8"))):
            yield RequestError(
                "holds what looks like a credential",
                where=name,
                found=f"{found[0][:3]}… ({len(found[0])} characters)",
                expected="none",
                remedy="revoke it, and run again with it in an environment variable",
            )


def path_problems(files: Iterable[tuple[str, Path]]) -> Iterator[MensError]:
    """Yield every absolute path of this machine that a record names, once each."""
    seen = set()
    for name, path in files:
        for place, text in _texts(path):
            found = _ABSOLUTE.search(text)
            if found and found[1] not in seen:
                seen.add(found[1])
                yield RequestError(
                    "names an absolute path of this machine",
                    where=f"{name}: {place}",
                    found=found[1],
                    expected="relative paths, which mean something elsewhere",
                    remedy="run with relative paths, or add export.allow_absolute_paths=true",
                )


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every text value of a structured file with its place."""
    if path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            yield from _strings(json.loads(line), str(number))
    elif path.suffix == ".json":
        yield from _strings(json.loads(path.read_text("utf-8")), "")
    elif path.suffix == ".yaml":
        yield from _strings(parse_yaml(path.read_bytes(), str(path)), "")


def _strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in pairs:
            yield from _strings(entry, f"{place}.{key}" if place else str(key))
