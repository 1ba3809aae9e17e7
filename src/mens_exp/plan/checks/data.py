"""The files of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.data import RowsData, WrittenData
from mens_exp.config.fields import range_problems
from mens_exp.config.rules.data import problems as rule_problems
from mens_exp.corpus.files import read_own
from mens_exp.corpus.filters import asked
from mens_exp.corpus.source import load_rows
from mens_exp.rows.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the files of rows."""
    data = config.data
    if not isinstance(data, WrittenData):
        if asked(data.filter) and not any(range_problems(data)) and not any(rule_problems(config)):
            load_rows(data, cache_root())  # says where nothing is left
        return
    problems = {problem.where for problem in rule_problems(config)}
    if not any(range_problems(data)) and not problems:
        load_rows(data, cache_root())
    elif (
        problems <= {"data.val_frac"} and isinstance(data, RowsData) and not data.streaming
    ):  # told already; the rows can still be judged
        read_own(data)
    yield from ()
