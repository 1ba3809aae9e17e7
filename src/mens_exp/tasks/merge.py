"""task=merge: an adapter and its base become one model, or the weights that it changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.plan.preflight import writable_cache
from mens_exp.report.parity_view import parity_table, verdict
from mens_exp.tasks.merge_choices import decide, deltas_of
from mens_exp.tasks.merge_inputs import gather
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.export.merged_directory import MergedModel
    from mens_exp.tasks.merge_choices import Choices
    from mens_exp.tasks.merge_inputs import MergeInputs
    from mens_exp.tasks.run import Run

__all__ = ["merge"]


def merge(config: RunConfig, run: Run) -> None:
    """Write the merged weights, whole or not at all, and record what they were made of."""
    from mens_exp.export.merge import Merge, refuse_full_disk, write_tensors
    from mens_exp.export.merged_directory import write_directory
    from mens_exp.export.verdict import settle
    from mens_exp.tasks.merge_certificate import certify_merge

    inputs = gather(config, writable_cache())
    choices = decide(inputs, config.merge)
    run.manifest.inputs.update(_read(inputs))
    run.manifest.results.update(_decided(choices))
    console = Console()
    console.print(f"Base: {choices.why}.", soft_wrap=True)
    usual = run.dir.merged_tensors if choices.only_merged else run.dir.merged
    out = usual if config.out is None else Path(config.out).expanduser()
    atomic.remove_stale(out.parent)
    refuse_full_disk(out, choices.all_places, choices.dtype)
    deltas = deltas_of(inputs, choices)
    what = Merge(deltas=deltas, dtype=choices.dtype, quantizer=choices.quantizer)

    def certified(written: Path) -> None:
        certificate = certify_merge(config, inputs, choices, deltas, written)
        certificate.write(run.dir.parity)
        run.manifest.results.update(parity=verdict(certificate))
        console.print(parity_table(certificate))
        settle(written, out, certificate)

    if choices.only_merged:
        with atomic.stream(out) as file:
            write_tensors(file, choices.all_places, what)
            file.flush()
            certified(Path(file.name))
    else:
        write_directory(out, choices.places, what, _model(inputs, choices), certified)
    written = {"": out} if out.is_file() else {f"/{one.name}": one for one in sorted(out.iterdir())}
    run.manifest.results.update(
        out=str(config.out or usual.name),
        out_bytes=sum(one.stat().st_size for one in written.values()),
        out_sha256={f"{out.name}{name}": sha256_file(one) for name, one in written.items()},
    )
    size = run.manifest.results["out_bytes"] / 2**20
    console.print(f"{len(choices.layers)} layers merged, {choices.dtype}, {size:.1f} MiB")
    if choices.unties:
        console.print("The head had the embedding's weight; it has one of its own now.")
    console.print(f"Merged: {out}", soft_wrap=True)


def _read(inputs: MergeInputs) -> dict[str, Any]:
    """Return the manifest's ``inputs``."""
    read = {
        "adapter": inputs.where,
        "adapter_schema": inputs.schema,
        "adapter_sha256": inputs.sha256,
        "base_weights_sha256": inputs.weights_sha256(),
        "base_shards": [shard.name for shard in inputs.shards],
    }
    base = inputs.base
    if base is None:
        return read
    named = {"base_model": base.name, "base_source": base.source, "license": base.license}
    return read | named | ({"base_revision": base.revision} if base.revision else {})


def _decided(choices: Choices) -> dict[str, Any]:
    return {
        "mode": "subset" if choices.only_merged else "full",
        "base": "original" if choices.quantizer is None else "dequantized",
        "base_reason": choices.why,
        "quantizer": None if choices.quantizer is None else dict(choices.quantizer),
        "dtype": choices.dtype,
        "merged_keys": {one.logical: one.name for one in choices.all_places if one.logical},
        "untied": choices.unties,
    }


def _model(inputs: MergeInputs, choices: Choices) -> MergedModel:
    from mens_exp.export.merged_directory import MergedModel

    assert inputs.base is not None, "bare shards make no directory"
    assert inputs.model is not None, "bare shards make no directory"
    run, learned_ids = inputs.run, True
    if run is not None:
        learned_ids = config_of(run).tokenizer.name == "hf"
    template = None if run is None or not run.chat_template.is_file() else run.chat_template
    return MergedModel(
        base=inputs.base,
        config=inputs.model.config,
        unties=choices.unties,
        tokenizer=learned_ids,
        chat_template=template,
        model_card=run.model_card if run is not None and run.model_card.is_file() else None,
        told=_told(inputs, choices),
    )


def _told(inputs: MergeInputs, choices: Choices) -> list[str]:
    """Return the lines of the model card."""
    assert inputs.base is not None, "bare shards make no directory"
    what = f"`{inputs.base.name}` with a LoRA adapter merged into {len(choices.layers)} layers"
    lines = [
        f"{what}: W + (B A) · alpha / r, summed in f32 and rounded once to {choices.dtype}.",
        "",
        f"- base: {choices.why}",
        f"- sha256 of the adapter: `{inputs.sha256}`",
        f"- sha256 of the base's weights: `{inputs.base.weights_sha256}`",
    ]
    if choices.unties:
        lines.append("- the head has a weight of its own; in the base it is the embedding table")
    return lines
