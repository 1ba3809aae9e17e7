"""The files of rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.config.data import JsonlData
from mens_exp.config.validate import range_problems
from mens_exp.corpus.source import load_rows
from mens_exp.rows.cache import cache_root
from mens_exp.rows.readers import read_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the files of rows."""
    data = config.data
    shares_hold = not any(range_problems(data)) and data.val_frac + data.heldout_frac < 1
    if isinstance(data, JsonlData) and data.path:
        if shares_hold:
            load_rows(data, cache_root())
        else:  # told already; the rows can still be judged
            read_jsonl(Path(data.path).expanduser())
    yield from ()
