"""Sources of a 4-bit base's error: each module alone, and all of them at once.

Everything is computed in f32 on the unquantized model, of which one weight is exchanged at a time;
what changes is then the weight's doing and nothing else's.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.causal_forward import hidden_states
from mens_exp.evals.replay import Replay, replaced
from mens_exp.quant.stored_as import Variant, activation_error, sqnr_db, stored_as

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.artifacts.attribution import Comparison, ModuleRecord, VariantError, WholeRecord
    from mens_exp.layout.targets import LinearModule

__all__ = ["Subject", "attribute_modules", "attribute_whole", "parity_with"]

_BITS = 8  # of a byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model whose error is attributed.

    Attributes:
        replay: the unquantized model in f32, over the calibration batch.
        modules: those that quantization would reach, layer by layer.
        variants: ways to quantize, the configured one first.
        transposed: whether the model keeps weights ``[in, out]``.
    """

    replay: Replay
    modules: Sequence[LinearModule]
    variants: Sequence[Variant]
    transposed: bool

    def module(self, one: LinearModule) -> Any:
        """Return torch's module (untyped)."""
        return self.replay.causal_lm.get_submodule(one.path)

    def weight(self, one: LinearModule) -> torch.Tensor:
        """Return a module's weight, ``[out, in]``."""
        weight: torch.Tensor = self.module(one).weight.data
        return weight.T.contiguous() if self.transposed else weight


def attribute_modules(
    subject: Subject, done: Callable[[int], None] = lambda _: None
) -> list[ModuleRecord]:
    """Measure every module alone; the records are in the order of the model.

    Args:
        subject: what is taken apart.
        done: told how many modules are done, after each.
    """
    records: list[ModuleRecord] = []
    for layer in dict.fromkeys(one.layer for one in subject.modules):
        assert layer is not None, "the head is never quantized"
        inside = [one for one in subject.modules if one.layer == layer]
        # Of one layer at a time, or the inputs of all modules would lie in memory.
        inputs = subject.replay.inputs_of(layer, [subject.module(one) for one in inside])
        for one, inputs_NI in zip(inside, inputs, strict=True):
            records.append(_module(subject, one, layer, inputs_NI))
            done(len(records))
    total = sum(record["kl"] for record in records)
    worst_first = sorted(records, key=lambda record: -record["kl"])
    for rank, record in enumerate(worst_first, start=1):
        record["share"] = record["kl"] / total if total else 0.0
        record["rank"] = rank
    return records


def attribute_whole(subject: Subject) -> dict[str, WholeRecord]:
    """Measure all modules at once, by variant."""
    return {one.name: _whole(subject, one) for one in subject.variants}


def _module(
    subject: Subject, one: LinearModule, layer: int, inputs_NI: list[torch.Tensor]
) -> ModuleRecord:
    weight_OI, errors = subject.weight(one), {}
    configured_OI = weight_OI
    for number, variant in enumerate(subject.variants):
        made = stored_as(weight_OI, variant.quant)
        if number == 0:
            configured_OI = made.values
        error: VariantError = {
            "sqnr_db": sqnr_db(weight_OI, made.values),
            "activation_error": activation_error(weight_OI, made.values, inputs_NI),
            "bits_per_parameter": _BITS * made.stored_bytes / weight_OI.numel(),
        }
        errors[variant.name] = error
    with replaced(subject.module(one), configured_OI, transposed=subject.transposed):
        change = subject.replay.compared(subject.replay.hidden_from(layer)).result()
    return {
        "path": one.path,
        "logical": one.logical,
        "kind": one.kind,
        "layer": layer,
        "parameters": weight_OI.numel(),
        "adapter_width": one.width + one.out,
        "variants": errors,
        "loss_change": change.nll_difference,
        "loss_change_se": change.nll_difference_se,
        "kl": change.mean_kl,
        "share": 0.0,  # this and the next need every module's
        "rank": 0,
    }


def _whole(subject: Subject, variant: Variant) -> WholeRecord:
    stored = weights = 0
    with ExitStack() as exchanged:
        for one in subject.modules:
            made = stored_as(subject.weight(one), variant.quant)
            stored, weights = stored + made.stored_bytes, weights + made.values.numel()
            exchanged.enter_context(
                replaced(subject.module(one), made.values, transposed=subject.transposed)
            )
        change = subject.replay.compared(subject.replay.hidden_from(0)).result()
    return {
        "loss_change": change.nll_difference,
        "loss_change_se": change.nll_difference_se,
        "kl": change.mean_kl,
        "bits_per_parameter": _BITS * stored / weights,
    }


def parity_with(quantized: Any, replay: Replay, position_bounds: Sequence[int]) -> Comparison:
    """Compare the 4-bit model, as training loads it, with the unquantized one in f32 (tier C).

    Args:
        quantized: a causal model of transformers, on the batches' device.
        replay: the unquantized model, over the calibration batch.
        position_bounds: see :class:`mens_exp.evals.logit_comparison.LogitComparison`.
    """
    quantized.eval()
    with torch.inference_mode():
        hidden = (hidden_states(quantized, batch) for batch in replay.batches)
        found = replay.compared(hidden, other_lm=quantized, position_bounds=position_bounds)
    values = asdict(found.result())
    comparison: Comparison = {**values, "by_position": list(values["by_position"])}  # type: ignore[typeddict-item]
    return comparison
