"""attribution.json: the cost of quantizing a base model, module by module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError


class _VariantOfMixture(TypedDict, total=False):
    kl: float


class VariantError(_VariantOfMixture):
    """One module under one quantization variant.

    Attributes:
        sqnr_db: 10 log10(‖W‖² / ‖W−Ŵ‖²); None if there is no error, or W is zero.
        activation_error: ‖(W−Ŵ)X‖² / ‖WX‖² over the calibration tokens; None if WX is zero.
        bits_per_parameter: storage, including scales.
        kl: mean KL(unquantized‖only this module quantized so), nats; only of variants that the
            suggested mixture could take.
    """

    sqnr_db: float | None
    activation_error: float | None
    bits_per_parameter: float


class ModuleRecord(TypedDict):
    """One linear module.

    Attributes:
        path: module path in the model, such as ``model.layers.3.mlp.up_proj``.
        logical: its logical name in adapters, such as ``l3.up``.
        kind: the logical name without the layer.
        layer: index of its decoder layer.
        parameters: number of parameters of its weight.
        adapter_width: inputs plus outputs, the adapter parameters per unit of rank.
        variants: variant -> its errors.
        loss_change: mean loss with only this module quantized, minus the reference's, nats.
        loss_change_se: standard error of `loss_change` over the tokens, nats.
        kl: mean KL(unquantized‖only this module quantized), nats.
        share: fraction of the sum of all modules' KL; 0 if that sum is 0.
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
    """All modules quantized at once with one variant; units as in a module's record."""

    loss_change: float
    loss_change_se: float
    kl: float
    bits_per_parameter: float


class PositionRecord(TypedDict):
    """Comparison of two models at certain positions of documents; `last` None is unbounded."""

    first: int
    last: int | None
    tokens: int
    mean_kl: float
    top1_agreement: float
    nll_difference: float


class Comparison(TypedDict):
    """Comparison of two models' logits: KL(reference‖other) in nats, agreement, loss, positions."""

    tokens: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    nll_difference: float
    nll_difference_se: float
    reference_nll: float
    by_position: list[PositionRecord]


def name_in_layer(path: str) -> str:
    """Return a module's path in its layer (``mlp.up_proj``); two kinds may share the last name."""
    return ".".join(path.split(".")[-2:])


class Mixture(TypedDict):
    """The assignment of quantizers to modules with the lowest cost within a budget of bits.

    Attributes:
        variants: module path -> its variant.
        overrides: ``quant.type_pattern`` as typed after ``python -m mens_exp``; empty if every
            module has the configured quantizer.
        rule: the rule that chose them.
        budget_bits: bits per parameter that they may take, averaged over the modules.
        kl_of_parts: sum of the modules' KL, each alone, nats.
        whole: all modules at once, each with its quantizer.
    """

    variants: dict[str, str]
    overrides: list[str]
    rule: str
    budget_bits: float
    kl_of_parts: float
    whole: WholeRecord


class Ranks(TypedDict):
    """The assignment of ranks to adapters that takes away the most error with their parameters.

    Attributes:
        ranks: module path -> its rank.
        overrides: targets, ranks and alphas as typed after ``python -m mens_exp``.
        rule: the rule that chose them.
        parameters: adapter parameters.
        parameters_uniform: adapter parameters with ``attribute.rank`` in every module.
        share: share of the summed KL that adapters of these ranks can take away, by the rule.
        share_uniform: the same with ``attribute.rank`` in every module.
    """

    ranks: dict[str, int]
    overrides: list[str]
    rule: str
    parameters: int
    parameters_uniform: int
    share: float
    share_uniform: float


class _SuggestedMixture(TypedDict, total=False):
    mixture: Mixture
    ranks: Ranks


class Suggestion(_SuggestedMixture):
    """Ready-to-use overrides, the rule that chose them, and their cost.

    Attributes:
        skip: value of ``quant.skip``.
        targets: value of ``lora.targets``.
        overrides: both as typed after ``python -m mens_exp``; the first only if an additional
            module is skipped.
        rule: the rule that chose them.
        bits_per_parameter: average over the quantized modules, as configured.
        bits_per_parameter_after: the same with the additional modules skipped.
        skip_share: fraction of the summed KL caused by the additional modules individually.
        targets_share: the same for the modules named by `targets`.
        targets_cost: their adapter parameters relative to those of every module, at equal rank.
        mixture: alternative to `skip`; only if ``attribute.quant_types`` names further quantizers.
        ranks: alternative to `targets`; only with ``attribute.rank``.
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
        version: version of this layout.
        configured: the variant used for the losses of single modules.
        variants: all measured variants, the configured one first.
        compute_dtype: format to which weights are rounded before and after quantization.
        block_size: number of weights that share a scale.
        tokens: number of tokens in the calibration batch.
        supervised_tokens: tokens that the loss is averaged over.
        reference_loss: mean loss of the unquantized model in f32, nats.
        modules: in the order of the model.
        whole: variant -> all modules at once.
        sum_of_parts: sums of the modules' loss changes and KLs, for comparison with ``whole``.
        suggestion: modules to leave unquantized and modules to adapt.
        parity: the model that training loads, compared with the unquantized f32 model (tier C).
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
        """Return inconsistencies: variants that are not listed, ranks not ordered by KL."""
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
