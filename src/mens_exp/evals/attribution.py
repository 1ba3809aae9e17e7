"""Attribute a 4-bit base's error to its modules, separately and all together.

Everything is computed in f32 on the unquantized model, in which one weight is replaced at a time.
Each decoder layer's output is cached. A replayed layer returns its cached output without computing,
so that a change in layer n costs only the layers from n on, and measuring a layer's modules costs
only that layer. The model's own forward pass does the rest, for any family.

Shapes: B sequences, T tokens, D hidden width, M supervised positions and N tokens of one batch,
O outputs and I inputs of a module.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mens_exp.artifacts.attribution import name_in_layer
from mens_exp.backends.forward import hidden_states, logits
from mens_exp.evals.logit_comparison import LogitComparison
from mens_exp.quant.round_trip import Variant, activation_error, sqnr_db, stored_as

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.attribution import (
        Comparison,
        Mixture,
        ModuleRecord,
        Ranks,
        VariantError,
        WholeRecord,
    )
    from mens_exp.data.batch import Batch
    from mens_exp.layout.modules import LinearModule


Choice = TypeVar("Choice", bound="str | int")


class Replay:
    """A causal model, its calibration batches, and the cached outputs of its layers for them."""

    def __init__(
        self, causal_lm: Any, layers: str, batches: Sequence[Batch], *, chunk_tokens: int
    ) -> None:
        """Run every batch once and cache layer outputs, T · D values per layer and sequence.

        Args:
            causal_lm: the model, in evaluation mode.
            layers: path of its list of decoder layers.
            batches: the calibration batches, on the model's device.
            chunk_tokens: positions whose logits exist at the same time.
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
        """Yield each batch's hidden states ``[M, D]``, recomputed from a layer on."""
        for batch, outputs in zip(self.batches, self._outputs, strict=True):
            with self._replayed(outputs, range(layer)), torch.inference_mode():
                hidden_MD = hidden_states(self.causal_lm, batch)
            yield hidden_MD  # outside the block, so that an early exit has no effect

    def inputs_of(
        self, layer: int, modules: Collection[torch.nn.Module]
    ) -> list[list[torch.Tensor]]:
        """Return the inputs of modules of one layer, ``[N, I]`` by module and batch; N real tokens.

        Padding is omitted, unless a module's number of input rows differs from that of tokens.

        Args:
            layer: number of the decoder layer; only this layer is computed.
            modules: modules of that layer.
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
            other_lm: the model whose head computes their logits; None means this model.
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

        A replayed layer ignores its input.
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
    return places < batch.tokens  # documents are contiguous, and padding comes last


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
        weight_OI: the new weight.
        transposed: whether the module stores its weight as ``[I, O]``.
    """
    before = module.weight.data
    module.weight.data = weight_OI.T if transposed else weight_OI
    try:
        yield
    finally:
        module.weight.data = before


_BITS = 8  # per byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model whose error is attributed.

    Attributes:
        replay: the unquantized model in f32, over the calibration batch.
        modules: the modules that would be quantized, layer by layer.
        variants: quantization variants, the configured one first.
        mixed: names of the variants whose KL is measured in each module separately, in addition to
            the configured one.
        transposed: whether the model stores weights as ``[in, out]``.
    """

    replay: Replay
    modules: Sequence[LinearModule]
    variants: Sequence[Variant]
    mixed: Sequence[str] = ()
    transposed: bool

    def module(self, one: LinearModule) -> Any:
        """Return the torch module (untyped)."""
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
        subject: the model.
        done: called after each module with the number of finished modules.
    """
    records: list[ModuleRecord] = []
    for layer in dict.fromkeys(one.layer for one in subject.modules):
        assert layer is not None, "the head is never quantized"
        inside = [one for one in subject.modules if one.layer == layer]
        # One layer at a time, so that memory does not hold the inputs of all modules.
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
    return {
        one.name: whole(subject, {module.path: one for module in subject.modules})
        for one in subject.variants
    }


def _module(
    subject: Subject, one: LinearModule, layer: int, inputs_NI: list[torch.Tensor]
) -> ModuleRecord:
    weight_OI, errors = subject.weight(one), {}
    change = None
    for variant in subject.variants:
        made = stored_as(weight_OI, variant.quant)
        error: VariantError = {
            "sqnr_db": sqnr_db(weight_OI, made.values),
            "activation_error": activation_error(weight_OI, made.values, inputs_NI),
            "bits_per_parameter": _BITS * made.stored_bytes / weight_OI.numel(),
        }
        errors[variant.name] = error
        if change is not None and variant.name not in subject.mixed:
            continue
        with replaced(subject.module(one), made.values, transposed=subject.transposed):
            found = subject.replay.compared(subject.replay.hidden_from(layer)).result()
        change = change or found  # the first variant is the configured one
        if variant.name in subject.mixed:
            error["kl"] = found.mean_kl
    assert change is not None, "there is a configured variant"
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
        "share": 0.0,  # share and rank are set when all modules are measured
        "rank": 0,
    }


def whole(subject: Subject, variants: Mapping[str, Variant]) -> WholeRecord:
    """Measure all modules at once, each with its variant by path."""
    stored = weights = 0
    with ExitStack() as exchanged:
        for one in subject.modules:
            made = stored_as(subject.weight(one), variants[one.path].quant)
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


def mixture_of(subject: Subject, modules: Sequence[ModuleRecord], budget_bits: float) -> Mixture:
    """Choose a variant for every module, and measure all of them at once.

    Args:
        subject: the model; its `mixed` are the variants to choose from.
        modules: the result of :func:`attribute_modules`.
        budget_bits: maximum bits per parameter, averaged over the modules; must be achievable.
    """
    configured, *_ = subject.variants
    variants = {one.name: one for one in subject.variants}
    chosen = cheapest(modules, subject.mixed, budget_bits)
    others = ", ".join(subject.mixed)
    names = {path: variants[name].quant.quant_type.value for path, name in chosen.items()}
    found = patterns(modules, names, configured.quant.quant_type.value)
    listed = ",".join(f"{pattern}:{name}" for pattern, name in found.items())
    return {
        "variants": chosen,
        "overrides": [f"quant.type_pattern={{{listed}}}"] if found else [],
        "rule": (
            f"one of {others} for every module, so that the sum of the modules' KL, each alone, is "
            f"the least at {budget_bits:.3f} bits a parameter or fewer (a multiple-choice knapsack)"
        ),
        "budget_bits": budget_bits,
        "kl_of_parts": sum(one["variants"][chosen[one["path"]]]["kl"] for one in modules),
        "whole": whole(subject, {path: variants[name] for path, name in chosen.items()}),
    }


def cheapest(
    modules: Sequence[ModuleRecord], names: Sequence[str], budget_bits: float
) -> dict[str, str]:
    """Return the variant of each module, by path, with the least summed KL within a budget of bits.

    It is a multiple-choice knapsack (Kellerer, Pferschy and Pisinger, 2004, chapter 11), solved by
    HiGHS to within a ten-thousandth of the minimum.

    Args:
        modules: the modules, with KL and bits of each variant.
        names: names of the variants; ties are broken in this order.
        budget_bits: bits per parameter, averaged over the modules.
    """
    import numpy as np
    from scipy import optimize

    errors = [[one["variants"][name] for name in names] for one in modules]
    kl = np.array([[error["kl"] for error in row] for row in errors])
    weights = np.array([one["parameters"] for one in modules], float)
    bits = np.array([[error["bits_per_parameter"] for error in row] for row in errors])
    bits *= (weights / weights.sum())[:, None]
    one_each = np.kron(np.eye(len(modules)), np.ones(len(names)))
    found = optimize.milp(
        kl.ravel() / (kl.max() or 1.0),  # the solver's tolerances are absolute
        integrality=np.ones(kl.size),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(bits.reshape(1, -1), ub=budget_bits),
        ],
    )
    assert found.x is not None, "the least bits are within the budget"
    taken = found.x.reshape(kl.shape).argmax(axis=1)
    return {one["path"]: names[place] for one, place in zip(modules, taken, strict=True)}


def ranks_of(subject: Subject, modules: Sequence[ModuleRecord], mean_rank: int) -> Ranks:
    """Choose the ranks of adapters by the quantization error that they can take away.

    The best approximation of an error matrix by one of rank r leaves the energy of all but its r
    largest singular values (Eckart and Young, 1936).

    Args:
        subject: the model; its first variant is the configured one.
        modules: the result of :func:`attribute_modules`.
        mean_rank: rank of every module that takes as many adapter parameters; at most that of each.
    """
    configured, *_ = subject.variants
    gains: list[list[float]] = []  # by module: KL of each of its singular values, falling
    for one, record in zip(subject.modules, modules, strict=True):
        weight_OI = subject.weight(one)
        lost_OI = weight_OI - stored_as(weight_OI, configured.quant).values
        energies = torch.linalg.svdvals(lost_OI).double().square()
        shares = energies / energies.sum().clamp(min=torch.finfo(energies.dtype).tiny)
        gains.append((shares * record["kl"]).tolist())
    widths = [one["adapter_width"] for one in modules]
    ranks = allocated(gains, widths, mean_rank * sum(widths))
    usual = Counter(ranks).most_common(1)[0][0]
    by_path = {one["path"]: rank for one, rank in zip(modules, ranks, strict=True)}
    found = patterns(modules, by_path, usual)
    listed = ",".join(f"{pattern}:{rank}" for pattern, rank in found.items())
    targets = dict.fromkeys(name_in_layer(one["path"]) for one in modules)
    total = sum(one["kl"] for one in modules) or 1.0
    return {
        "ranks": by_path,
        "overrides": [
            f"lora.targets=[{','.join(targets)}]",
            *(f"lora.{name}={usual}" for name in ("r", "alpha")),
            *(f"lora.{name}_pattern={{{listed}}}" for name in ("rank", "alpha") if found),
        ],
        "rule": (
            "each module's KL is divided among the singular values of its quantization error by "
            "their energy; from rank 1 in every module, ranks go to the largest remaining value "
            f"per adapter parameter, until they have the parameters of rank {mean_rank} everywhere"
        ),
        "parameters": sum(map(operator.mul, ranks, widths)),
        "parameters_uniform": mean_rank * sum(widths),
        "share": sum(sum(own[:rank]) for own, rank in zip(gains, ranks, strict=True)) / total,
        "share_uniform": sum(sum(own[:mean_rank]) for own in gains) / total,
    }


def allocated(gains: Sequence[Sequence[float]], costs: Sequence[int], budget: int) -> list[int]:
    """Return the number of values that each module takes, at least one, within a budget.

    Args:
        gains: by module, the gain of each value, falling.
        costs: by module, the cost of a value.
        budget: what all of them may cost; enough for one value in each module.
    """
    taken = [1] * len(gains)
    left = budget - sum(costs)
    heap = [
        (-own[1] / cost, at)
        for at, (own, cost) in enumerate(zip(gains, costs, strict=True))
        if len(own) > 1
    ]
    heapq.heapify(heap)
    while heap:
        _, at = heapq.heappop(heap)
        if costs[at] > left:
            continue  # a narrower module may still fit
        left -= costs[at]
        taken[at] += 1
        if taken[at] < len(gains[at]):
            heapq.heappush(heap, (-gains[at][taken[at]] / costs[at], at))
    return taken


def patterns(
    modules: Sequence[ModuleRecord], chosen: Mapping[str, Choice], usual: Choice
) -> dict[str, Choice]:
    """Return the shortest ``quant.type_pattern`` or ``lora.rank_pattern`` for a choice.

    A kind (``mlp.up_proj``) has an entry if most of its modules share a value other than the
    default; entries of modules that differ from their kind follow (``3.mlp.up_proj``).

    Args:
        modules: all quantized modules.
        chosen: module path -> its quantizer or rank.
        usual: the default, for modules that no pattern matches.
    """
    kinds: dict[str, dict[int, Choice]] = {}
    for one in modules:
        _, _, inside = one["path"].partition(f".{one['layer']}.")
        kinds.setdefault(inside, {})[one["layer"]] = chosen[one["path"]]
    of_kinds: dict[str, Choice] = {}
    of_modules: dict[str, Choice] = {}
    for inside, by_layer in kinds.items():
        many: Counter[Choice] = Counter([*by_layer.values(), usual])
        (most, _), *_ = many.most_common()
        if most != usual:
            of_kinds[inside] = most
        of_modules |= {f"{n}.{inside}": name for n, name in by_layer.items() if name != most}
    return of_kinds | of_modules


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
