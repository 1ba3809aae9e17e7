"""Settings of the corpus step report: its measurements."""

from __future__ import annotations

from dataclasses import dataclass

from mens_exp.config.fields import setting

__all__ = ["ReportConfig"]


@dataclass(kw_only=True, slots=True)
class ReportConfig:
    """The measurements of the step report."""

    token_rows: int | None = setting(
        10_000,
        "Rows that are encoded, drawn evenly, to count tokens; of more rows, totals are estimated "
        "and carry a standard error. Null encodes all.",
        ge=1,
    )
    duplicates: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Look for what is still a duplicate, as corpus.dedupe says.",
    )
    processes: int = setting(
        2, "Processes that parse and screen rows; the result is the same for any number.", ge=1
    )
