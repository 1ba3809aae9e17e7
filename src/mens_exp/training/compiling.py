"""Compilation of the decoder layers before step 1, and the dropout generator of a resumed run."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, cast

from mens_exp.errors import SetupError
from mens_exp.lora.keyed import LOWBIAS32, SFC64
from mens_exp.planning.compiling import COMPILED, EAGER, why_compiled, why_eager, why_not
from mens_exp.training.build import device_of

if TYPE_CHECKING:
    from mens_exp.backends.protocol import Backend
    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.training.module import RunRecord


def compile_layers(
    config: RunConfig, run: RunRecord, backend: Backend, data: RowsDataModule
) -> None:
    """Compile the decoder layers if that is asked for or pays; record the decision as a fact.

    A resumed run keeps the decision that it has recorded, and the generator of its dropout masks.
    Runs of earlier releases have recorded none, and are not compiled.

    Args:
        config: the run's configuration.
        run: its record.
        backend: the model, complete and on its device.
        data: the rows.

    Raises:
        SetupError: trainer.compile=true, but torch cannot compile the layers.
    """
    facts = run.manifest.facts
    _draw_as_recorded(backend, facts)
    reason = _why_eager(config, run, data)
    made: dict[str, Any] = {"layers": EAGER, "reason": reason}
    if reason is None:
        made = _compiled(config, cast("QloraBackend", backend), data)
    facts["compile"] = made
    run.save()


def _draw_as_recorded(backend: Backend, facts: dict[str, Any]) -> None:
    recorded = (facts.get("numerics") or {}).get("dropout")
    if recorded in {SFC64, LOWBIAS32}:  # those of a device cannot be drawn on another
        cast("QloraBackend", backend).draw_with(recorded)


def _why_eager(config: RunConfig, run: RunRecord, data: RowsDataModule) -> str | None:
    """Return why the layers are not compiled; None if they are to be."""
    facts = run.manifest.facts
    before = facts.get("compile")
    if before is not None and before["layers"] == EAGER:
        return str(before["reason"])
    if before is None and "numerics" in facts:
        return "the run was started by a release that compiled none"
    kind = device_of(config.trainer.accelerator).type
    if before is not None:
        return why_not(config, kind=kind)
    return why_eager(config, kind=kind, seconds=_seconds(run, data))


def _seconds(run: RunRecord, data: RowsDataModule) -> float | None:
    """Return the training time that the run's plan expects; None if it is unknown."""
    if not run.dir.plan.is_file():
        return None
    step_s = json.loads(run.dir.plan.read_text("utf-8"))["time_s"]["step_s"]
    return None if step_s is None else float(step_s) * data.max_steps


def _compiled(config: RunConfig, backend: QloraBackend, data: RowsDataModule) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        graphs = backend.compile_layers(data.train_dataloader().batch(0))
    except SetupError as error:
        if config.trainer.compile is True:
            raise
        return {"layers": EAGER, "reason": f"{error.what}: {error.found}"}
    seconds = round(time.perf_counter() - start, 1)
    reason = why_compiled(config)
    return {"layers": COMPILED, "reason": reason, "graphs": graphs, "seconds": seconds}
