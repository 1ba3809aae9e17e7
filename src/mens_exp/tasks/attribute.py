"""task=attribute: measure the cost of quantizing each module of the base, and suggest overrides."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from mens_exp.artifacts.attribution import Attribution, name_in_layer
from mens_exp.config.quant import unquantized
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import Side
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import skipped
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import attribution_view, terminal
from mens_exp.tasks.inputs import describe, keep_bad_rows, tokenizer_of
from mens_exp.training.wandb_mirror import mirror

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mens_exp.artifacts.attribution import ModuleRecord, Suggestion
    from mens_exp.config.root import RunConfig
    from mens_exp.evals.attribution import Subject
    from mens_exp.model.sources import BaseModel
    from mens_exp.tasks.run import Run

_PLAIN_EVERY = 30  # modules per progress line, if the output is not a terminal
_CHUNK_TOKENS = 64  # default


def attribute(config: RunConfig, run: Run) -> None:
    """Measure every module separately and all together, and write attribution.json."""
    from mens_exp.artifacts import host
    from mens_exp.backends.frozen_base import load_base
    from mens_exp.evals.attribution import (
        attribute_modules,
        attribute_whole,
        mixture_of,
        parity_with,
        ranks_of,
    )
    from mens_exp.quant.binding import compute_dtype
    from mens_exp.training.build import device_of

    mirror(config, run)
    host.reset_peak()
    device = device_of(config.trainer.accelerator)
    base, subject = _subject(config, run, device)
    replay, configured = subject.replay, subject.variants[0].name
    run.manifest.facts.update(
        device=str(device),
        quant=config.quant.quant_type.value,
        compute_dtype=config.quant.compute_dtype.value,
        quantized_linears=len(subject.modules),
        calibration_tokens=sum(batch.tokens for batch in replay.batches),
        supervised_tokens=sum(len(batch.targets_M) for batch in replay.batches),
    )
    console = terminal.console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("modules", total=len(subject.modules))

        def tell(done: int) -> None:
            bar.update(shown, completed=done)
            if not console.is_terminal and done % _PLAIN_EVERY == 0:
                console.print(f"{done} of {len(subject.modules)} modules")

        modules = attribute_modules(subject, tell)
    suggestion = suggested(
        modules,
        variant=configured,
        already=config.quant.skip,
        kept_bits=8 * compute_dtype(config.quant).itemsize,
        extra_bits=config.attribute.extra_bits,
        targets_share=config.attribute.targets_frac,
    )
    if subject.mixed:
        budget = config.attribute.bits or suggestion["bits_per_parameter"]
        suggestion["mixture"] = mixture_of(subject, modules, budget)
    if config.attribute.rank is not None:
        suggestion["ranks"] = ranks_of(subject, modules, config.attribute.rank)
    parity = parity_with(load_base(config, base, device), replay, config.attribute.position_bounds)
    record = Attribution(
        configured=configured,
        variants=[one.name for one in subject.variants],
        compute_dtype=config.quant.compute_dtype.value,
        block_size=config.quant.block,
        tokens=run.manifest.facts["calibration_tokens"],
        supervised_tokens=run.manifest.facts["supervised_tokens"],
        reference_loss=parity["reference_nll"],
        modules=modules,
        whole=attribute_whole(subject),
        sum_of_parts={name: sum(one[name] for one in modules) for name in ("loss_change", "kl")},
        suggestion=suggestion,
        parity=parity,
    )
    record.write(run.dir.attribution)
    run.manifest.results.update(_results(record), peak_rss_bytes=host.peak_rss_bytes())
    if run.manifest.results["peak_rss_bytes"] is None:
        run.unknown("results.peak_rss_bytes", "this system does not report it")
    terminal.show(attribution_view.sections(record)[0])
    terminal.say(f"Report: {run.dir.report}")


def _subject(config: RunConfig, run: Run, device: torch.device) -> tuple[BaseModel, Subject]:
    """Load the unquantized model and the calibration batch, and record both."""
    import torch

    from mens_exp.backends.frozen_base import load_base
    from mens_exp.data.datamodule import encoded_side, sampled_stream
    from mens_exp.evals.attribution import Replay, Subject
    from mens_exp.model.sources import resolve
    from mens_exp.quant.round_trip import variant_of, variants_of

    cache, shape = writable_cache(), shape_of(config.model)
    left_out = {one.path for one in skipped(config.quant.skip, shape)}
    inside = [one for one in linear_modules(shape) if one.layer is not None]
    modules = [one for one in inside if one.path not in left_out]
    base = resolve(config.model, cache)
    tokenizer = tokenizer_of(config.tokenizer, base, run.dir)
    rows = load_rows(config.data, cache)
    keep_bad_rows(run.dir, rows)
    documents, counts = encoded_side(config, rows, Side.VAL, tokenizer, cache)
    inputs = describe(base, tokenizer, rows)
    inputs["data"] |= {"val_rows": counts.documents, "val_sha256": counts.sha256}
    run.manifest.inputs.update(inputs)
    stream = sampled_stream(
        config.data, documents, config.attribute.tokens, pad_id=tokenizer.pad_id
    )
    plain = dataclasses.replace(config, quant=unquantized())
    model = load_base(plain, base, device, dtype=torch.float32).eval()
    replay = Replay(
        model,
        shape.family.layers,
        [batch.to(device) for batch in stream],
        chunk_tokens=getattr(config.objective, "chunk_tokens", None) or _CHUNK_TOKENS,
    )
    variants = {one.name: one for one in variants_of(config.quant)}
    others = [variant_of(config.quant.of(one)) for one in config.attribute.quant_types]
    variants |= {one.name: one for one in others}
    mixed = [next(iter(variants)), *(one.name for one in others)] if others else []
    return base, Subject(
        replay=replay,
        modules=modules,
        variants=list(variants.values()),
        mixed=mixed,
        transposed=shape.family.transposed,
    )


def _results(record: Attribution) -> dict[str, Any]:
    """Return the headline figures for the manifest."""
    whole = record.whole[record.configured]
    return {
        "reference_loss": record.reference_loss,
        "loss_change": whole["loss_change"],
        "kl": whole["kl"],
        "kl_sum_of_parts": record.sum_of_parts["kl"],
        "worst_module": min(record.modules, key=lambda one: one["rank"])["path"],
        "top1_agreement_frac": record.parity["top1_agreement"],
        "suggested_overrides": record.suggestion["overrides"],
        **_of_mixture(record),
    }


def _of_mixture(record: Attribution) -> dict[str, Any]:
    mixture = record.suggestion.get("mixture")
    if mixture is None:
        return {}
    return {
        "mixture_kl": mixture["whole"]["kl"],
        "mixture_bits_per_parameter": mixture["whole"]["bits_per_parameter"],
    }


def suggested(
    records: Sequence[ModuleRecord],
    *,
    variant: str,
    already: Sequence[str],
    kept_bits: int,
    extra_bits: float,
    targets_share: float,
) -> Suggestion:
    """Suggest modules to skip and modules to adapt by measured KL; both choices are greedy.

    Args:
        records: records of every quantized module.
        variant: the configured quantization variant.
        already: existing patterns of `quant.skip`.
        kept_bits: bits per weight that is left unquantized.
        extra_bits: budget for unquantized modules, in bits per parameter of all `records`.
        targets_share: share of the summed KL that the adapted kinds of modules must cover.
    """
    weights = sum(one["parameters"] for one in records)
    stored = sum(_stored_bits(one, variant) for one in records)
    left_out = _left_out(records, variant, kept_bits, extra_bits * weights)
    spent = sum(_extra_bits(one, variant, kept_bits) for one in left_out)
    kinds, covered = _kinds(records, targets_share)
    adapted = [one for one in records if one["kind"] in kinds]
    skip = [*already, *(one["path"] for one in left_out)]
    targets = list(dict.fromkeys(name_in_layer(one["path"]) for one in adapted))
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
    """Return the kinds to adapt, and their share of the summed KL."""
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
