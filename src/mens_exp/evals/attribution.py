"""Attribute a 4-bit base's error to its modules, separately and all together.

Everything is computed in f32 on the unquantized model, in which one weight is replaced at a time.
Each decoder layer's output is cached. A replayed layer returns its cached output without computing,
so that a change in layer n costs only the layers from n on, and measuring a layer's modules costs
only that layer. The model's own forward pass does the rest, for any family.

Shapes: B sequences, T tokens, D hidden width, M supervised positions and N tokens of one batch,
O outputs and I inputs of a module.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.frozen_base import hidden_states, logits
from mens_exp.evals.logit_comparison import LogitComparison
from mens_exp.quant.round_trip import Variant, activation_error, sqnr_db, stored_as

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from mens_exp.artifacts.attribution import Comparison, ModuleRecord, VariantError, WholeRecord
    from mens_exp.data.batch import Batch
    from mens_exp.layout.targets import LinearModule


class Replay:
    """A causal model, its calibration batches, and the cached outputs of its layers for them."""

    def __init__(
        self, causal_lm: Any, layers: str, batches: Sequence[Batch], *, chunk_tokens: int
    ) -> None:
        """Run every batch once and keep the layers' outputs, T · D numbers a layer and sequence.

        Args:
            causal_lm: the model, in evaluation mode.
            layers: path of its list of decoder layers.
            batches: on the model's device.
            chunk_tokens: positions whose logits exist at one time.
        """
        self.causal_lm = causal_lm
        self.batches = batches
        self.chunk_tokens = chunk_tokens
        self.layers = list(causal_lm.get_submodule(layers))
        self._outputs: list[list[Any]] = []
        self.reference_MD: list[torch.Tensor] = []
        for batch in batches:
            with _kept_outputs(self.layers) as outputs, torch.inference_mode():
                self.reference_MD.append(hidden_states(causal_lm, batch))
            self._outputs.append(outputs)

    def hidden_from(self, layer: int) -> Iterator[torch.Tensor]:
        """Yield each batch's hidden states ``[M, D]``, computed anew from a layer on."""
        for batch, outputs in zip(self.batches, self._outputs, strict=True):
            with self._replayed(outputs, range(layer)), torch.inference_mode():
                hidden_MD = hidden_states(self.causal_lm, batch)
            yield hidden_MD  # outside the block, so that an early exit has no effect

    def inputs_of(
        self, layer: int, modules: Collection[torch.nn.Module]
    ) -> list[list[torch.Tensor]]:
        """Return what modules of one layer read, ``[N, I]``, by module and batch; N real tokens.

        What fills a batch up is left out, unless a module of unknown code reads other rows than
        there are tokens.

        Args:
            layer: number of the decoder layer, which alone is computed.
            modules: of that layer.
        """
        found: list[list[torch.Tensor]] = [[] for _ in modules]
        hooks = [
            module.register_forward_pre_hook(lambda _, args, into=into: into.append(args[0]))
            for module, into in zip(modules, found, strict=True)
        ]
        try:
            for batch, outputs in zip(self.batches, self._outputs, strict=True):
                others = [number for number in range(len(self.layers)) if number != layer]
                with self._replayed(outputs, others), torch.inference_mode():
                    hidden_states(self.causal_lm, batch)
        finally:
            for hook in hooks:
                hook.remove()
        real = [_real_tokens(batch) for batch in self.batches]
        return [[_rows_of(*pair) for pair in zip(inputs, real, strict=True)] for inputs in found]

    def compared(
        self,
        other: Iterable[torch.Tensor],
        *,
        other_lm: Any = None,
        position_bounds: Sequence[int] = (0,),
    ) -> LogitComparison:
        """Compare next-token distributions of the original model with those of other hidden states.

        Args:
            other: hidden states ``[M, D]`` of each batch, on the batches' device.
            other_lm: the model whose head makes logits of them; None is this one.
            position_bounds: see :class:`LogitComparison`.
        """
        comparison = LogitComparison(position_bounds)
        for batch, reference_MD, other_MD in zip(
            self.batches, self.reference_MD, other, strict=True
        ):
            positions_M = batch.position_ids_BT.flatten()[batch.predict_M]
            for start in range(0, len(batch.targets_M), self.chunk_tokens):
                piece = slice(start, start + self.chunk_tokens)
                with torch.inference_mode():
                    comparison.add(
                        logits(self.causal_lm, reference_MD[piece]),
                        logits(other_lm or self.causal_lm, other_MD[piece]),
                        batch.targets_M[piece],
                        positions_M[piece],
                    )
        return comparison

    @contextmanager
    def _replayed(self, outputs: list[Any], numbers: Collection[int]) -> Iterator[None]:
        """Replay cached layer outputs; a computing layer receives the previous layer's output.

        Whatever reaches a replayed layer is not looked at, so that only its output need be right.
        """
        replayed = [self.layers[number] for number in numbers]
        try:
            for number, layer in zip(numbers, replayed, strict=True):
                layer.forward = lambda *_, _output=outputs[number], **__: _output
            yield
        finally:
            for layer in replayed:
                layer.__dict__.pop("forward", None)


def _real_tokens(batch: Batch) -> torch.Tensor:
    """Return a mask of document tokens over the flattened batch, ``[B·T]``."""
    if batch.attention_mask_BT is not None:
        return batch.attention_mask_BT.flatten().bool()
    places = torch.arange(batch.input_ids_BT.numel(), device=batch.input_ids_BT.device)
    return places < batch.tokens  # documents follow each other; what fills up comes last


def _rows_of(inputs: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    rows = inputs.flatten(0, -2)
    return rows[real] if len(rows) == len(real) else rows


@contextmanager
def _kept_outputs(layers: Sequence[torch.nn.Module]) -> Iterator[list[Any]]:
    """Collect layer outputs inside the block."""
    outputs: list[Any] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: outputs.append(output))
        for layer in layers
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replaced(module: Any, weight_OI: torch.Tensor, *, transposed: bool) -> Iterator[None]:
    """Replace a module's weight inside the block.

    Args:
        module: torch's ``Linear``, or transformers' ``Conv1D``.
        weight_OI: the other weight.
        transposed: whether the module keeps its weight as ``[I, O]``.
    """
    before = module.weight.data
    module.weight.data = weight_OI.T if transposed else weight_OI
    try:
        yield
    finally:
        module.weight.data = before


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
    """Measure every module separately, in the order of the model.

    Args:
        subject: what is taken apart.
        done: called after each module with the number of finished modules.
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
