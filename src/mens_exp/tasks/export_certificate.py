"""The certificate of an exported adapter: its deltas, and its graph where its run is at hand."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mens_exp.artifacts.certificate import Certificate, Evidence
from mens_exp.artifacts.digest import sha256_file
from mens_exp.export.adapter import find, read
from mens_exp.export.adapter_parity import adapter_errors
from mens_exp.export.verdict import hashes_of
from mens_exp.plan.preflight import writable_cache
from mens_exp.tasks.certifying import certify_peft, with_tensors
from mens_exp.tasks.subject import config_of
from mens_exp.tasks.trained_model import trained_run

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.conversion import Conversion

__all__ = ["certify_adapter"]


def certify_adapter(config: RunConfig, asked: Conversion, written: Path) -> Certificate:
    """Hold an adapter in its new form against the one that it was made from.

    Both are read from disk. A PEFT directory of a run is loaded on the run's quantized base too,
    as anybody would, and its graph compared with the trained one.

    Args:
        config: of the command.
        asked: what was converted.
        written: the directory, not in its place yet.
    """
    before = read(asked.place, asked.base, asked.quant)
    place = find(written)
    errors = adapter_errors(*before, *read(place, asked.base, asked.quant))
    if place.form == "peft" and asked.place.run is not None:
        theirs = config_of(asked.place.run)
        theirs.trainer.accelerator = config.trainer.accelerator
        trained = trained_run(asked.place.run, theirs, config.parity, writable_cache())
        of_graph = certify_peft(trained, written, config.parity)
        return with_tensors(of_graph, errors, accept=config.parity.accept)
    of_deltas = Certificate(
        evidence=Evidence.WEIGHTS,
        reference=f"the deltas of the {asked.place.form} adapter, in f64",
        reference_nll=None,
        probe=None,
        judged=None,
        comparisons={},
        tensors={},
        budget=dataclasses.asdict(config.parity.budget),
        passed=True,
        accepted=False,
        sources={"adapter_sha256": sha256_file(asked.place.tensors)},
        files=hashes_of(written),
        unknown={"comparisons": "deltas that are equal make equal models"},
    )
    return with_tensors(of_deltas, errors, accept=config.parity.accept)
