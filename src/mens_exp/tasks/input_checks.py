"""Inputs of runs, hashed and encoded again where they are on this machine."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.inspection import Link, Outcome
from mens_exp.config.data import JsonlData
from mens_exp.corpus.source import cache_key, load_rows
from mens_exp.corpus.split import Side
from mens_exp.errors import MensError
from mens_exp.export.adapter import find
from mens_exp.layout.cached import hash_weights, ready
from mens_exp.plan.preflight import writable_cache
from mens_exp.rows.files import resolve_files
from mens_exp.tasks.checking import compared, linked, not_here
from mens_exp.tasks.inputs import hashes_in, tokenizer_of
from mens_exp.tasks.lineage import trained_by
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mens_exp.artifacts.inspection import Check
    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.source import Rows
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["InputChecks", "base_place"]

T = TypeVar("T")
_ENCODED = {  # of rows that are streamed, the first window's
    Side.TRAIN: ("data.train_sha256", "data.first_window.train_sha256"),
    Side.VAL: ("data.val_sha256",),
}


class InputChecks:
    """The inputs of runs, hashed again; what several runs have read is hashed once."""

    def __init__(self) -> None:
        """Begin with nothing hashed."""
        self._cache = writable_cache()
        self._found: dict[str, Any] = {}

    def of(self, run: RunDir, manifest: Manifest) -> Iterator[Check]:
        """Hash the base, its tokenizer and the rows again, where they are on this machine.

        Rows that are as they were are encoded again, past the cache.
        """
        recorded = dict(hashes_in(manifest.inputs))
        config, of = config_of(run), str(run.path)
        yield from linked(Link.BASE, of, self._base(run, config, recorded))
        rows = list(self._rows(config, recorded))
        yield from linked(Link.ROWS, of, rows)
        hold = all(check["outcome"] == Outcome.EQUAL for check in rows)
        why = "" if hold else "the rows that they are made of differ, or are not on this machine"
        yield from linked(Link.ENCODED, of, self._encoded(run, config, recorded, why))
        start = manifest.inputs.get("init_from")
        if start is not None:
            yield from linked(Link.ADAPTER, of, [_start(start, run)])

    def base_weights(self, place: Path) -> str:
        """Return the SHA-256 of a base's weights."""
        return self._once(f"base {place}", lambda: hash_weights(place))

    def _once(self, name: str, found: Callable[[], T]) -> T:
        if name not in self._found:
            self._found[name] = found()
        value: T = self._found[name]
        return value

    def _base(self, run: RunDir, config: RunConfig, recorded: dict[str, str]) -> Iterator[Check]:
        place, why = base_place(config, self._cache)
        checked = set()
        if place is not None:
            weights = self.base_weights(place)  # first: a damaged cache is made again when opened
            tokenizer = self._tokenizer(run, config)
            found = {
                "base_weights_sha256": weights,
                "tokenizer_sha256": tokenizer.sha256,
                "chat_template_sha256": tokenizer.template_sha256,
            }
            for name in found.keys() & recorded.keys():
                checked.add(name)
                yield compared(f"inputs.{name}", recorded[name], found[name])
        for name in sorted(recorded.keys() - checked):
            if "." not in name:
                yield not_here(f"inputs.{name}", recorded[name], why)

    def _tokenizer(self, run: RunDir, config: RunConfig) -> Tokenizer:
        from mens_exp.model.resolve import resolve

        return tokenizer_of(config.tokenizer, resolve(config.model, self._cache), run)

    def _rows(self, config: RunConfig, recorded: dict[str, str]) -> Iterator[Check]:
        names = ("data.rows_sha256", "data.first_rows_sha256")  # the second of streamed rows
        name = next((name for name in names if name in recorded), None)
        if name is None:
            return
        missing = _missing_files(config)
        if missing is not None:
            yield not_here(f"inputs.{name}", recorded[name], missing)
            return
        try:
            found = self._loaded(config).sha256
        except MensError as error:  # what was read then can no longer be read as it was
            found = str(error)
        yield compared(f"inputs.{name}", recorded[name], found)

    def _loaded(self, config: RunConfig) -> Rows:
        return self._once(f"rows {config.data!r}", lambda: load_rows(config.data, self._cache))

    def _encoded(
        self, run: RunDir, config: RunConfig, recorded: dict[str, str], why: str
    ) -> Iterator[Check]:
        """Encode both sides of the rows again in a folder that has no cache.

        Args:
            run: that was trained on them.
            config: of the run.
            recorded: the hashes of its inputs.
            why: they cannot be encoded; empty where they can.
        """
        for side, names in _ENCODED.items():
            name = next((name for name in names if name in recorded), None)
            if name is None:
                continue
            if why:
                yield not_here(f"inputs.{name}", recorded[name], why)
            elif base_place(config, self._cache)[0] is None:
                yield not_here(f"inputs.{name}", recorded[name], "the tokenizer is not here")
            else:
                yield compared(f"inputs.{name}", recorded[name], self._digest(run, config, side))

    def _digest(self, run: RunDir, config: RunConfig, side: Side) -> str:
        from mens_exp.data.datamodule import encoded_side

        rows, tokenizer = self._loaded(config), self._tokenizer(run, config)

        def found() -> str:
            with TemporaryDirectory() as empty:
                try:
                    counts = encoded_side(config, rows, side, tokenizer, Path(empty))[1]
                except MensError as error:
                    return str(error)
                return counts.sha256

        key = cache_key(config, rows, side, tokenizer)
        return self._once(f"encoded {side} {key!r}", found)


def base_place(config: RunConfig, cache: Path) -> tuple[Path | None, str]:
    """Return where the base lies, if it does, and what to say if it does not."""
    try:
        place = ready(config.model, cache)
    except MensError as error:
        return None, f"the base is not here: {error.what}"
    return place, "the base is not on this machine"


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
