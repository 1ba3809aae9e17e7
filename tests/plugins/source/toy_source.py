"""A data source of another package: the multiplication tables up to a number."""

from __future__ import annotations

from dataclasses import dataclass

from mens_exp.config.data_sources import GivenData, SourceSpec
from mens_exp.config.fields import setting


@dataclass(kw_only=True, slots=True)
class TablesData(GivenData):
    """Multiplication tables."""

    source: str = "tables"
    upto: int = setting(12, "Largest factor.", ge=2, le=99)
    language: str = setting("en", "Language of the questions, en or de.")


class Tables:
    """The rows; those of one first factor stay on one side of the split."""

    def __init__(self, upto, language):
        self.upto = upto
        self.word = {"en": "times", "de": "mal"}[language]

    def rows(self):
        for a in range(1, self.upto + 1):
            for b in range(1, self.upto + 1):
                yield {
                    "prompt": f"{a} {self.word} {b}?",
                    "response": str(a * b),
                    "group": f"table {a}",
                }


SPEC = SourceSpec(name="tables", schema=TablesData, rows="toy_source:Tables")
