"""Where training pairs come from, and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["DataConfig", "JsonlData", "StdlibData"]


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """What every source of rows has."""

    source: str = setting(MISSING, "Where rows come from; set by the option.")
    seq_len: int = setting(
        512, "Longest sequence, in tokens (measured: matmul attention is fastest to here).", ge=8
    )
    micro_batch_size: int = setting(
        1,
        "Sequences in one forward pass (measured: 1 × 4 is as fast as 4 × 1, in less memory).",
        ge=1,
    )
    packing: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Put several documents into one sequence, attention kept inside each; false pads.",
    )
    val_frac: float = setting(0.05, "Share of the groups kept for validation.", gt=0, lt=1)
    heldout_frac: float = setting(0.05, "Share of the groups kept for the suite.", gt=0, lt=1)
    val_max_tokens: int = setting(
        8192, "Validation stops after about so many tokens (about 7 s on two cores).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class StdlibData(DataConfig):
    """Documented functions of the running interpreter's standard library."""

    source: str = "stdlib"


@dataclass(kw_only=True, slots=True)
class JsonlData(DataConfig):
    """TrainingPair rows from a JSONL file."""

    source: str = "jsonl"
    path: str = setting(MISSING, "The JSONL file.")
