"""attribution.json: what quantizing a base model costs, module by module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError


class VariantError(TypedDict):
    """One module quantized one way.

    Attributes:
        sqnr_db: 10 log10(‖W‖² / ‖W−Ŵ‖²); None where nothing was lost, or W is zero.
        activation_error: ‖(W−Ŵ)X‖² / ‖WX‖² over the calibration tokens; None where WX is zero.
        bits_per_parameter: stored, scales included.
    """

    sqnr_db: float | None
    activation_error: float | None
    bits_per_parameter: float


class ModuleRecord(TypedDict):
    """One linear module.

    Attributes:
        path: in the model, such as ``model.layers.3.mlp.up_proj``.
        logical: the adapter's name for it, such as ``l3.up``.
        kind: the same without its layer.
        layer: number of its decoder layer.
        parameters: of its weight.
        adapter_width: inputs plus outputs, which a rank of an adapter costs.
        variants: variant -> its errors.
        loss_change: mean loss with this module alone quantized, minus the reference's, nats.
        loss_change_se: standard error of that over the tokens, nats.
        kl: mean KL(unquantized‖this module alone quantized), nats.
        share: of the sum of all modules' KL; 0 where that sum is 0.
        rank: 1 for the highest KL.
    """

    path: str
    logical: str
    kind: str
    layer: int
    parameters: int
    adapter_width: int
    variants: dict[str, VariantError]
    loss_change: float
    loss_change_se: float
    kl: float
    share: float
    rank: int


class WholeRecord(TypedDict):
    """All modules quantized at once, in one way; in the units of a module's record."""

    loss_change: float
    loss_change_se: float
    kl: float
    bits_per_parameter: float


class PositionRecord(TypedDict):
    """Two models compared at some positions of documents; `last` None is no bound."""

    first: int
    last: int | None
    tokens: int
    mean_kl: float
    top1_agreement: float
    nll_difference: float


class Comparison(TypedDict):
    """Two models' logits: KL(reference‖other) in nats, agreement, loss, and by position."""

    tokens: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    nll_difference: float
    nll_difference_se: float
    reference_nll: float
    by_position: list[PositionRecord]


class Suggestion(TypedDict):
    """Ready overrides, the rule that chose them, and what they cost.

    Attributes:
        skip: value of ``quant.skip``.
        targets: value of ``lora.targets``.
        overrides: both as typed after ``python -m mens_exp``; the first one only where a further
            module is left out.
        rule: how they were chosen.
        bits_per_parameter: of the quantized modules, as configured.
        bits_per_parameter_after: with the further modules left out.
        skip_share: of the summed KL that the further modules cause by themselves.
        targets_share: likewise of the modules that `targets` names.
        targets_cost: their adapter parameters over those of every module, at one rank.
    """

    skip: list[str]
    targets: list[str]
    overrides: list[str]
    rule: str
    bits_per_parameter: float
    bits_per_parameter_after: float
    skip_share: float
    targets_share: float
    targets_cost: float


@dataclass(kw_only=True, slots=True)
class Attribution(StoredRecord):
    """The cost of quantizing a base.

    Attributes:
        format: always ``mens_exp_attribution``.
        version: of this layout.
        configured: the variant that the loss of single modules is of.
        variants: all variants that were measured, the configured one first.
        compute_dtype: format that weights are rounded to before and after quantization.
        block_size: weights that share a scale.
        tokens: of the calibration batch.
        supervised_tokens: those whose loss is meant.
        reference_loss: mean loss of the unquantized model in f32, nats.
        modules: in the order of the model.
        whole: variant -> all modules at once.
        sum_of_parts: sums of the modules' loss changes and KLs, beside ``whole``.
        suggestion: what to leave out and what to adapt.
        parity: the model that training loads, against the unquantized one in f32 (tier C).
    """

    format: str = "mens_exp_attribution"
    version: int = 1
    configured: str
    variants: list[str]
    compute_dtype: str
    block_size: int
    tokens: int
    supervised_tokens: int
    reference_loss: float
    modules: list[ModuleRecord]
    whole: dict[str, WholeRecord]
    sum_of_parts: dict[str, float]
    suggestion: Suggestion
    parity: Comparison

    def problems(self, where: str) -> list[DataError]:
        """Return what no attribution can say: other variants than it lists, ranks not by KL."""
        problems = []
        if self.variants[:1] != [self.configured]:
            problems.append(_wrong(f"{where}: variants", self.variants, f"{self.configured} first"))
        expected = sorted(self.variants)
        if sorted(self.whole) != expected:
            problems.append(_wrong(f"{where}: whole", sorted(self.whole), str(expected)))
        for number, one in enumerate(self.modules):
            if sorted(one["variants"]) != expected:
                place = f"{where}: modules[{number}].variants"
                problems.append(_wrong(place, sorted(one["variants"]), str(expected)))
        ranked = [one["kl"] for one in sorted(self.modules, key=lambda one: one["rank"])]
        ranks = sorted(one["rank"] for one in self.modules)
        if ranks != list(range(1, len(ranks) + 1)) or ranked != sorted(ranked, reverse=True):
            falling = f"1 to {len(ranks)} in the order of falling kl"
            problems.append(_wrong(f"{where}: modules.rank", "others", falling))
        return problems


def _wrong(where: str, found: object, expected: str) -> DataError:
    return DataError("wrong value", where=where, found=found, expected=expected)
