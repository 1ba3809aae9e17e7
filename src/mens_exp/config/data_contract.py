"""Requirements that a run's data must meet before its first step."""

from __future__ import annotations

from dataclasses import dataclass

from mens_exp.config.fields import setting, unless

__all__ = ["ContractConfig"]


_LEARNS_ENDS = unless("objective.labels", "last_k", why="which learns the end of a text as it is")


@dataclass(kw_only=True, slots=True)
class ContractConfig:
    """Limits of the data-contract certificate; what is over one ends the run with exit code 4."""

    min_supervised_frac: float = setting(
        0.01,
        "Share of the training tokens that are learned, at least (unverified guess; measured: 0.51 "
        "for the stdlib rows; mens gates at 0.1).",
        ge=0,
        lt=1,
        only_if=_LEARNS_ENDS,
    )
    max_truncation_loss_frac: float = setting(
        0.99,
        "Share of the learned tokens that seq_len cuts off, at most (unverified guess; measured: "
        "0.94 for the stdlib rows under experiment=smoke, 0.14 by default).",
        ge=0,
        le=1,
    )
    max_nothing_frac: float = setting(
        0.95,
        "Share of the documents that keep nothing to learn, at most (unverified guess; measured: "
        "0.47 for the stdlib rows under experiment=smoke, 0.01 by default).",
        ge=0,
        le=1,
    )
    allow_untrained_end: bool = setting(
        False,  # a model that never learns to stop is nearly always an accident
        "Train documents whose answer's end marker is not learned.",
        only_if=_LEARNS_ENDS,
    )
    max_overlap_frac: float = setting(
        0.05,
        "Share of the benchmark's items of which one training row has half the 13-grams of words "
        "or more, at most (unverified guess; measured: 0 for the stdlib and synthetic rows).",
        ge=0,
        le=1,
    )
    max_repeated_answer_frac: float = setting(
        0.5,
        "Share of the conversations in which an answer is given again word for word, at most "
        "(unverified guess).",
        ge=0,
        le=1,
    )
    probe: bool = setting(
        True,  # the default of a certificate is to have it
        "Try packing, the shift of labels and gradient accumulation on a few of the run's own "
        "documents before step 1 (measured: 6 s of one core for SmolLM2); nothing that is "
        "trained changes.",
    )
