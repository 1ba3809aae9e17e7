"""Rules for `data`: the split, and the requirements of each source of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.config.data import (
    NEEDED_FIELDS,
    HubData,
    JsonlData,
    MixData,
    MixStop,
    RowFormat,
    RowsData,
    SyntheticData,
)
from mens_exp.config.fields import range_problems
from mens_exp.config.mix import in_source, sources_of
from mens_exp.errors import ConfigError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.data import DataConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

_FILES = "a file, a list such as [a.jsonl,b.jsonl], or a glob such as rows/*.jsonl"


def data_problems(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems of `data`."""
    data = config.data
    shares = data.val_frac + data.heldout_frac
    if shares >= 1:
        yield ConfigError(
            "no rows are left to train on",
            where="data.val_frac",
            found=f"{data.val_frac} + heldout_frac {data.heldout_frac}",
            expected="a sum under 1",
        )
    elif isinstance(data, SyntheticData) and shares < 1 and not data.rows_by_side()[0]:
        yield ConfigError(
            "no rows are left to train on",
            where="data.rows",
            found=f"{data.rows} for val_frac {data.val_frac} and heldout_frac {data.heldout_frac}",
            expected="rows for all three sides, each share rounded",
            remedy="raise data.rows, or lower a share",
        )
    yield from _of_source(data)
    if isinstance(data, MixData):
        yield from _mix(data)
    if isinstance(data, RowsData) and data.streaming:
        yield from _streamed(config, data)


def _of_source(data: DataConfig) -> Iterator[ConfigError]:
    """Yield the problems specific to one source."""
    least, most = data.filter.min_chars, data.filter.max_chars
    if least is not None and most is not None and least > most:
        yield ConfigError(
            "no row can pass",
            where="data.filter.min_chars",
            found=least,
            expected=f"at most data.filter.max_chars ({most})",
        )
    if isinstance(data, JsonlData):
        yield from _files("data.path", data.path)
        if data.val_path is not None:
            yield from _files("data.val_path", data.val_path)
    if isinstance(data, HubData) and data.val_split == data.split:
        yield ConfigError(
            "training rows would be used for validation",
            where="data.val_split",
            found=data.val_split,
            expected="another split than data.split",
        )
    if isinstance(data, RowsData):
        yield from _columns(data)


def _streamed(config: RunConfig, data: RowsData) -> Iterator[ConfigError]:
    """Yield the settings that streamed rows do not support."""
    if config.task.name in {"train", "plan"}:
        if config.trainer.max_steps <= 0:
            yield ConfigError(
                "is needed with data.streaming=true",
                where="trainer.max_steps",
                found=config.trainer.max_steps,
                expected="a number of steps, because the number of rows is unknown",
            )
        if config.trainer.max_epochs > 0:
            yield ConfigError(
                "cannot be computed with data.streaming=true",
                where="trainer.max_epochs",
                found=config.trainer.max_epochs,
                expected="-1, because the number of rows is unknown",
                remedy="give trainer.max_steps alone",
            )
    if isinstance(data, HubData):
        for name, split in (("split", data.split), ("val_split", data.val_split)):
            if split is not None and set(split) & set("[]+:"):
                yield ConfigError(
                    "part of a split cannot be streamed",
                    where=f"data.{name}",
                    found=split,
                    expected="the name of one split",
                )


def _mix(data: MixData) -> Iterator[MensError]:
    """Yield the problems of a mix and of each of its sources."""
    if data.stop is MixStop.budget and data.budget_tokens is None:
        yield ConfigError(
            "is needed with data.stop=budget",
            where="data.budget_tokens",
            expected="a number of tokens",
        )
    try:
        sources = sources_of(data)
    except Problems as several:
        yield from several.problems
        return
    except ConfigError as problem:
        yield problem
        return
    for number, source in enumerate(sources):
        for one in (*range_problems(source.data, "data."), *_of_source(source.data)):
            yield in_source(one, number)


def _files(where: str, value: Any) -> Iterator[ConfigError]:
    names = value if isinstance(value, list) else [value]
    if not names or "" in names:
        yield ConfigError("no file given", where=where, expected=f"the path of {_FILES}")
    elif not all(isinstance(name, str) for name in names):
        yield ConfigError("wrong type", where=where, found=value, expected=f"the path of {_FILES}")


def _columns(data: RowsData) -> Iterator[ConfigError]:
    given = data.columns.given
    if data.group_column is not None and "group" in given:
        yield ConfigError(
            "two columns split the rows",
            where="data.group_column",
            found=f"{data.group_column} and data.columns.group={given['group']}",
            expected="one of the two",
        )
    for column in sorted({one for one in given.values() if list(given.values()).count(one) > 1}):
        twice = ", ".join(name for name, one in given.items() if one == column)
        yield ConfigError(
            "a column is named twice",
            where="data.columns",
            found=f"{column} for {twice}",
            expected="each column for one field",
        )
    ways = [needed for way, needed in NEEDED_FIELDS.items() if data.format in {way, RowFormat.auto}]
    if given and not any(set(needed) <= given.keys() for needed in ways):
        yield ConfigError(
            "the columns name no answer to learn from",
            where="data.columns",
            found=", ".join(f"{name}:{column}" for name, column in given.items()),
            expected=" or ".join(dict.fromkeys(" and ".join(needed) for needed in ways)),
        )
