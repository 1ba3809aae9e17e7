"""The rows of a run: read or extracted, and split by group."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import digest
from mens_exp.config.data import (
    DataConfig,
    JsonlData,
    MixData,
    OnBadRow,
    RowsData,
    StdlibData,
    SyntheticData,
    WrittenData,
)
from mens_exp.config.data_sources import GivenData, in_source, sources_of
from mens_exp.corpus import stdlib, synthetic
from mens_exp.corpus.given_rows import read_given
from mens_exp.corpus.mix import mixed
from mens_exp.corpus.row_files import (
    Rows,
    RowsFile,
    bytes_of,
    described,
    is_large,
    pairs_of,
    read_apart,
    read_own,
    refuse_empty,
    refuse_leakage,
)
from mens_exp.corpus.split import Side, asked, assert_disjoint, filtered, refuse_nothing_left, split
from mens_exp.errors import DataError, MensError, Problems, RequestError
from mens_exp.rows import readers
from mens_exp.rows.cache import CacheKey
from mens_exp.rows.documents import Labelling
from mens_exp.rows.files import resolve_files
from mens_exp.rows.readers import rows_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from mens_exp.config.data import FilterConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.rows.readers import BadRow
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.load import Tokenizer


_Kept = dict[tuple[Any, ...], Rows]
_KEPT: ContextVar[_Kept | None] = ContextVar("kept", default=None)


@contextmanager
def rows_read_once() -> Iterator[None]:
    """Let readers inside the block share rows; see ``keep`` of `load_rows`.

    Checks, plan and training then use the same rows, and the cells of a sweep are checked without
    reading the rows once per cell. A file that has changed in the meantime is read again.
    """
    if _KEPT.get() is not None:
        yield
        return
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def load_rows(config: DataConfig, cache: Path, *, keep: bool = False) -> Rows:
    """Read or extract the configured rows, and split them.

    Synthetic rows are generated per side. If `data.val_path` or `data.val_split` names validation
    rows, no other row is used for validation; `heldout_frac` holds out other rows in either case.
    Rows of large files stay on disk, and each is read again on access.

    Args:
        config: the `data` group.
        cache: the cache directory for extracted rows.
        keep: keep the rows in memory for the next reader inside `rows_read_once`. Checks and plans
            do; a task does not, so that it can free them.

    Raises:
        DataError: a file or a row in it is invalid, too many rows are bad, no row passes the
            filters, a side of the split is empty, a validation row is also one of the others, or
            more synthetic rows are requested than exist.
        Problems: several of them.
        MensError: a dataset of the Hub is not available.
    """
    kept = _KEPT.get()
    files = None if kept is None else _files_of(config)
    if kept is None or files is None:
        return _loaded(config, cache)
    key = (repr(config), cache, *files)
    rows = kept.get(key) or _loaded(config, cache)
    kept.clear()
    if keep:
        kept[key] = rows
    return rows


def _files_of(config: DataConfig) -> list[tuple[Any, ...]] | None:
    """Identify the source files of rows; None if the files do not determine the rows."""
    if isinstance(config, RowsData) and config.streaming:
        return None
    found: list[tuple[Any, ...]] = []
    try:
        if isinstance(config, MixData):
            parts = [_files_of(source.data) for source in sources_of(config)]
            known = [one for one in parts if one is not None]
            return [one for part in known for one in part] if len(known) == len(parts) else None
        if not isinstance(config, JsonlData):
            return [] if isinstance(config, StdlibData) else None
        for setting, names in (("data.path", config.path), ("data.val_path", config.val_path)):
            for path in resolve_files(names or [], setting):
                seen = path.stat()
                found.append((path.resolve(), seen.st_size, seen.st_mtime_ns, seen.st_ino))
    except (MensError, OSError):  # reported when they are read
        return None
    return found


def _loaded(config: DataConfig, cache: Path) -> Rows:
    if isinstance(config, RowsData) and config.streaming:
        return _first_rows(config)
    if isinstance(config, JsonlData) and is_large(config):
        from mens_exp.corpus import large_files  # not needed for small files

        return large_files.load(config, cache)
    taken: dict[str, Any] = {}
    corpora = _corpora(config, cache)
    bad = tuple(row for corpus in corpora.values() for row in corpus.bad)
    if isinstance(config, WrittenData) and config.on_bad_row is OnBadRow.quarantine:
        rows = len(bad) + sum(file.rows for corpus in corpora.values() for file in corpus.files)
        taken["quarantined"] = readers.quarantine_summary(bad, rows, config.max_bad_frac)
    if asked(config.filter):
        taken["filtered"] = _filtered(list(corpora.values()), config.filter)
    pairs = [pair for corpus in corpora.values() for pair in corpus.pairs]
    apart = [corpus.val for corpus in corpora.values() if corpus.val is not None]
    val = apart[0] if apart else None  # sources of a mix have none
    if val is not None:
        refuse_leakage(pairs, val)
    sides = _sides(config, pairs, val)
    if isinstance(config, MixData):
        sides[Side.TRAIN], taken["mixed"] = _mixed(config, corpora, sides[Side.TRAIN])
    return Rows(
        source=config.source,
        train=sides[Side.TRAIN],
        val=sides[Side.VAL],
        heldout=sides[Side.HELDOUT],
        sha256=rows_digest([*pairs, *(val or [])]),
        files=tuple(file for corpus in corpora.values() for file in corpus.files),
        taken=taken,
        bad=bad,
    )


def _first_rows(config: RowsData) -> Rows:
    """Read the first window of streamed rows, and the validation rows."""
    from mens_exp.corpus.mix import RowStream

    apart = read_apart(config)
    val = None if apart is None else filtered(pairs_of(apart), config.filter)[0]
    window = RowStream(config, val).next_window()
    sides = window.sides
    if val is not None:
        sides[Side.VAL] = val
    for side in (Side.TRAIN, Side.VAL):
        if not sides[side] and window.totals["rows"] < config.shuffle_buffer:
            raise refuse_empty(side, window.totals["rows"])
        if not sides[side]:
            raise DataError(
                f"no row is left for {side.value}",
                where="data.shuffle_buffer",
                found=f"{window.totals['rows']} rows",
                expected="first rows of several groups that pass the filters",
                remedy="raise data.shuffle_buffer, or name rows to validate on "
                "(data.val_path, data.val_split)",
            )
    bad = window.bad + tuple(row for file in apart or [] for row in file.bad)
    streamed = {"shuffle_buffer": config.shuffle_buffer, "first_rows": window.totals}
    return Rows(
        source=config.source,
        train=sides[Side.TRAIN],
        val=sides[Side.VAL],
        heldout=sides[Side.HELDOUT],
        sha256=rows_digest([pair for side in Side for pair in sides[side]]),
        files=tuple(described(config, apart or [], "validation")),
        taken={"streaming": streamed | bytes_of(config)},
        bad=bad,
        streamed=True,
    )


@dataclass(slots=True)
class _Corpus:
    """The rows of one source, with separate validation rows if it has any."""

    pairs: list[TrainingPair]
    val: list[TrainingPair] | None = None
    files: tuple[RowsFile, ...] = ()
    bad: tuple[BadRow, ...] = ()
    weight: float = 1.0
    refused: dict[str, int] = field(default_factory=dict)


def _corpora(config: DataConfig, cache: Path) -> dict[str, _Corpus]:
    """Read and filter each source, and report all problems together."""
    if not isinstance(config, MixData):
        return {config.source: _read(config, cache)}
    found: dict[str, _Corpus] = {}
    problems: list[MensError] = []
    for number, source in enumerate(sources_of(config)):
        try:
            corpus = found[source.name] = _read(source.data, cache)
            if corpus.val is not None:
                raise DataError(
                    "provides its own validation rows",
                    where="data.source",
                    found=source.data.source,
                    expected="a class without validation_rows: a mix is split as a whole",
                )
            corpus.weight = source.weight
            if asked(source.data.filter):
                corpus.refused = _filtered([corpus], source.data.filter)["refused"]
        except RequestError as error:
            problems += [in_source(one, number) for one in getattr(error, "problems", [error])]
    Problems.raise_if(problems)
    return found


def _read(config: DataConfig, cache: Path) -> _Corpus:
    """Read all rows of one source, unfiltered."""
    if isinstance(config, SyntheticData):
        return _Corpus(synthetic.load(config, cache).pairs)
    if isinstance(config, GivenData):
        given = read_given(config)
        val = given.validation
        return _Corpus(
            list(given.rows.pairs),
            None if val is None else list(val.pairs),
            tuple(given.files()),
            (*given.rows.bad, *(() if val is None else val.bad)),
        )
    if not isinstance(config, RowsData):
        return _Corpus(stdlib.load(cache).pairs)
    own, apart = read_own(config)
    return _Corpus(
        pairs_of(own),
        None if apart is None else pairs_of(apart),
        (*described(config, own, "rows"), *described(config, apart or [], "validation")),
        tuple(row for file in [*own, *(apart or [])] for row in file.bad),
    )


def _filtered(corpora: Sequence[_Corpus], config: FilterConfig) -> dict[str, Any]:
    """Apply the same filters to all rows in place, and return the counts."""
    refused: Counter[str] = Counter()
    before = kept = 0
    for role in ("pairs", "val"):
        sides = [(one, side) for one in corpora if (side := getattr(one, role)) is not None]
        gone: Counter[str] = Counter()
        for corpus, side in sides:
            left, failed = filtered(side, config)
            setattr(corpus, role, left)
            gone += failed
            kept += len(left)
        rows = sum(len(side) for _, side in sides)
        refuse_nothing_left(rows, gone)
        before, refused = before + rows, refused + gone
    counts = {name: refused[name] for name in asked(config)}
    return {"rows": before, "kept": kept, "refused": counts}


def _sides(
    config: DataConfig, pairs: list[TrainingPair], val: list[TrainingPair] | None
) -> dict[Side, list[TrainingPair]]:
    if isinstance(config, SyntheticData):
        sides = synthetic.sides_of(pairs)
    else:
        sides = split(pairs, config.val_frac if val is None else 0, config.heldout_frac)
    if val is not None:
        sides[Side.VAL] = val
    assert_disjoint(sides)
    for side in (Side.TRAIN, Side.VAL):
        if not sides[side]:
            raise refuse_empty(side, len(pairs))
    return sides


def _mixed(
    config: MixData,
    corpora: Mapping[str, _Corpus],
    train: list[TrainingPair],
) -> tuple[list[TrainingPair], dict[str, Any]]:
    """Draw the training rows of a mix, which is split as a whole: no prompt is on two sides.

    Returns:
        The rows, and the record of the draw.
    """
    trained = {id(pair) for pair in train}
    own = {
        name: [pair for pair in corpus.pairs if id(pair) in trained]
        for name, corpus in corpora.items()
    }
    weights = {name: corpus.weight for name, corpus in corpora.items()}
    rows, shares = mixed(own, weights, config)
    for name, corpus in corpora.items():
        shares[name] |= {"refused": corpus.refused} if corpus.refused else {}
    return rows, {"rows": len(rows), "stop": config.stop.value, "sources": shares}


def labelling_of(config: RunConfig) -> Labelling:
    """Return the configured labelling: how rows become token ids and masks."""
    settings, spec = config.objective, config.objective.spec
    selected = spec.selected(settings)
    truncation = config.data.truncation
    return Labelling(
        objective=settings.labels,
        seq_len=config.data.seq_len,
        truncation=spec.truncation if truncation is None else truncation.value,
        **{name: selected.pop(name) for name in ("turns", "k") if name in selected},
        options=tuple(selected.items()),
        virtual_tokens=config.lora.spec.virtual_tokens(config.lora),
    )


def cache_key(config: RunConfig, rows: Rows, side: Side, tokenizer: Tokenizer) -> CacheKey:
    """Return the cache key of the encoding of one side of the rows."""
    return CacheKey(
        rows_sha256=rows.side_sha256(side),
        tokenizer_sha256=tokenizer.sha256,
        template_sha256=tokenizer.template_sha256,
        special_tokens_sha256=digest(tokenizer.special_tokens),
        date=tokenizer.date if tokenizer.is_dated else None,
        allow_control_text=tokenizer.allow_control_text,
        labelling=labelling_of(config),
    )
