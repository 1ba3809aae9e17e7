"""From the errors of single modules to overrides: what to leave unquantized, what to adapt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.attribution import ModuleRecord, Suggestion

__all__ = ["suggested"]


def suggested(
    records: Sequence[ModuleRecord],
    *,
    variant: str,
    already: Sequence[str],
    kept_bits: int,
    extra_bits: float,
    targets_share: float,
) -> Suggestion:
    """Choose by measured KL; both choices are greedy.

    Args:
        records: every quantized module.
        variant: the configured one.
        already: patterns that `quant.skip` has.
        kept_bits: of a weight that is left unquantized.
        extra_bits: bits per parameter of all `records` that may be spent on leaving some out.
        targets_share: of the summed KL that adapted kinds of modules must cover.
    """
    weights = sum(one["parameters"] for one in records)
    stored = sum(_stored_bits(one, variant) for one in records)
    left_out = _left_out(records, variant, kept_bits, extra_bits * weights)
    spent = sum(_extra_bits(one, variant, kept_bits) for one in left_out)
    kinds, covered = _kinds(records, targets_share)
    adapted = [one for one in records if one["kind"] in kinds]
    skip = [*already, *(one["path"] for one in left_out)]
    targets = list(dict.fromkeys(_last_names(one["path"]) for one in adapted))
    return {
        "skip": skip,
        "targets": targets,
        "overrides": [
            *([f"quant.skip=[{','.join(skip)}]"] if left_out else []),
            f"lora.targets=[{','.join(targets)}]",
        ],
        "rule": (
            f"quant.skip: modules in the order of KL per extra bit, each taken that still fits "
            f"into {extra_bits:g} extra bits a parameter; lora.targets: kinds of modules in the "
            f"order of KL per adapter parameter, until they cover {targets_share:.0%} of the "
            "summed KL"
        ),
        "bits_per_parameter": stored / weights,
        "bits_per_parameter_after": (stored + spent) / weights,
        "skip_share": sum(one["share"] for one in left_out),
        "targets_share": covered,
        "targets_cost": _width(adapted) / _width(records),
    }


def _left_out(
    records: Sequence[ModuleRecord], variant: str, kept_bits: int, budget: float
) -> list[ModuleRecord]:
    worth = sorted(records, key=lambda one: -one["kl"] / _extra_bits(one, variant, kept_bits))
    taken = []
    for one in worth:
        cost = _extra_bits(one, variant, kept_bits)
        if one["kl"] > 0 and cost <= budget:
            taken.append(one)
            budget -= cost
    return taken


def _kinds(records: Sequence[ModuleRecord], share: float) -> tuple[set[str], float]:
    """Return the kinds to adapt, and the share of the summed KL that they have."""
    by_kind: dict[str, list[ModuleRecord]] = {}
    for one in records:
        by_kind.setdefault(one["kind"], []).append(one)
    worth = sorted(by_kind.values(), key=lambda group: -_share(group) / _width(group))
    kinds: set[str] = set()
    covered = 0.0
    for group in worth:
        if kinds and covered >= share:
            break
        kinds.add(group[0]["kind"])
        covered += _share(group)
    return kinds, covered


def _share(records: Sequence[ModuleRecord]) -> float:
    return sum(one["share"] for one in records)


def _width(records: Sequence[ModuleRecord]) -> int:
    return sum(one["adapter_width"] for one in records)


def _stored_bits(one: ModuleRecord, variant: str) -> float:
    return one["variants"][variant]["bits_per_parameter"] * one["parameters"]


def _extra_bits(one: ModuleRecord, variant: str, kept_bits: int) -> float:
    return kept_bits * one["parameters"] - _stored_bits(one, variant)


def _last_names(path: str) -> str:
    """Return the path without its layer's: ``mlp.up_proj``; two kinds may share a last name."""
    return ".".join(path.split(".")[-2:])
