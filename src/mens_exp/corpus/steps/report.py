"""The step report: measures the rows, and hands them on as they are."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.corpus_report import (
    Constructs,
    CorpusReport,
    Diversity,
    NGrams,
    Parsed,
    Remaining,
    Safety,
    Share,
)
from mens_exp.corpus.duplicates import duplicates
from mens_exp.corpus.quality.constructs import KINDS_IN, all_kinds
from mens_exp.corpus.quality.measures import Measures, measured
from mens_exp.corpus.quality.screen import without_secrets
from mens_exp.corpus.quality.token_counts import drawn, token_counts
from mens_exp.corpus.side_by_side import in_order, pieces
from mens_exp.corpus.source import labelling_of
from mens_exp.corpus.steps.step import RowWriter, StepResult, read_rows, read_sides
from mens_exp.errors import MensError, MissingExtra
from mens_exp.layout.cached import ready
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.corpus_report import Tokens
    from mens_exp.corpus.steps.step import StepInput
    from mens_exp.rows.schema import TrainingPair

__all__ = ["RECORD", "report"]

RECORD: Final = "corpus_report.json"
_ROWS_AT_ONCE: Final = 500
_MOST_SHARES: Final = 50  # sources listed; the rest is one of them
