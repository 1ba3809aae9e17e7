"""What a run read, hashed again where it is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.data import JsonlData
from mens_exp.corpus.source import load_rows
from mens_exp.errors import MensError
from mens_exp.export.adapter import find
from mens_exp.layout.cached import hash_weights, ready
from mens_exp.plan.preflight import writable_cache
from mens_exp.rows.files import resolve_files
from mens_exp.tasks.checking import compared, not_here
from mens_exp.tasks.inputs import hashes_in, tokenizer_of
from mens_exp.tasks.lineage import trained_by
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.inspection import Check
    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.root import RunConfig

__all__ = ["base_place", "input_checks"]


def input_checks(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Hash the base, its tokenizer and the rows again, where they are on this machine."""
    recorded = dict(hashes_in(manifest.inputs))
    from mens_exp.model.resolve import resolve

    config, cache = config_of(run), writable_cache()
    place, why = base_place(config, cache)
    checked = set()
    if place is not None:
        tokenizer = tokenizer_of(config.tokenizer, resolve(config.model, cache), run)
        found = {
            "base_weights_sha256": hash_weights(place),
            "tokenizer_sha256": tokenizer.sha256,
            "chat_template_sha256": tokenizer.template_sha256,
        }
        for name in found.keys() & recorded.keys():
            checked.add(name)
            yield compared(f"inputs.{name}", recorded[name], found[name])
    for name in sorted(recorded.keys() - checked):
        if "." not in name:
            yield not_here(f"inputs.{name}", recorded[name], why)
    yield from _rows(config, recorded, cache)
    start = manifest.inputs.get("init_from")
    if start is not None:
        yield _start(start, run)


def base_place(config: RunConfig, cache: Path) -> tuple[Path | None, str]:
    """Return where the base lies, if it does, and what to say if it does not."""
    try:
        place = ready(config.model, cache)
    except MensError as error:
        return None, f"the base is not here: {error.what}"
    return place, "the base is not on this machine"


def _rows(config: RunConfig, recorded: dict[str, str], cache: Path) -> Iterator[Check]:
    names = ("data.rows_sha256", "data.first_rows_sha256")  # the second of rows that are streamed
    name = next((name for name in names if name in recorded), None)
    if name is None:
        return
    missing = _missing_files(config)
    if missing is not None:
        yield not_here(f"inputs.{name}", recorded[name], missing)
        return
    try:
        found = load_rows(config.data, cache).sha256
    except MensError as error:  # what was read then can no longer be read as it was
        found = str(error)
    yield compared(f"inputs.{name}", recorded[name], found)


def _missing_files(config: RunConfig) -> str | None:
    data = config.data
    if not isinstance(data, JsonlData):
        return None
    try:
        files = [
            file
            for field in ("path", "val_path")
            if (named := getattr(data, field))
            for file in resolve_files(named, f"data.{field}")
        ]
    except MensError as error:
        return str(error)
    absent = [str(file) for file in files if not file.is_file()]
    return f"{', '.join(absent)}: no such file" if absent else None


def _start(start: dict[str, Any], run: RunDir) -> Check:
    """Hash the adapter that a run began with, where that still lies."""
    name, recorded = "inputs.init_from.adapter_sha256", start["adapter_sha256"]
    try:
        place = find(Path(str(start["path"])))
    except MensError:
        owner = trained_by(str(recorded), run.path)
        if owner is None:
            return not_here(name, recorded, f"{start['path']} is no adapter any more")
        place = find(owner.path)
    return compared(name, recorded, sha256_file(place.tensors))
