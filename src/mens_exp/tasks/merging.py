"""A merge that is decided: what an adapter's base becomes, for task=merge and for exports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.plan.preflight import writable_cache
from mens_exp.report.parity_view import card_section, parity_table, verdict
from mens_exp.tasks.merge_choices import MOVED, decide, deltas_of
from mens_exp.tasks.merge_inputs import gather
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

    from mens_exp.artifacts.certificate import Certificate
    from mens_exp.config.root import RunConfig
    from mens_exp.export.merge import Merge
    from mens_exp.export.merged_directory import MergedModel
    from mens_exp.lora.merge import Delta
    from mens_exp.tasks.merge_choices import Choices
    from mens_exp.tasks.merge_inputs import MergeInputs
    from mens_exp.tasks.run import Run

__all__ = ["Merging", "decided_merge", "settle_certified"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Merging:
    """An adapter, its base, and what becomes of them.

    Attributes:
        inputs: adapter and base, read.
        choices: how much is written, in which format, onto which weights.
        deltas: what is added to each weight, by logical name.
    """

    inputs: MergeInputs
    choices: Choices
    deltas: Mapping[str, Delta]

    @property
    def what(self) -> Merge:
        """The operation on a checkpoint's tensors."""
        from mens_exp.export.merge import Merge

        choices = self.choices
        return Merge(deltas=self.deltas, dtype=choices.dtype, quantizer=choices.quantizer)

    def write_model(self, directory: Path) -> None:
        """Write the complete model into an empty directory."""
        from mens_exp.export.merged_directory import write_directory

        model = _model(self.inputs, self.choices)
        write_directory(directory, self.choices.places, self.what, model)

    def certificate(self, config: RunConfig, written: Path) -> Certificate:
        """Hold what was written against the model that was trained."""
        from mens_exp.tasks.merge_certificate import certify_merge

        return certify_merge(config, self.inputs, self.choices, self.deltas, written)

    def note(self, run: Run) -> None:
        """Record what is merged into what."""
        run.manifest.inputs.update(_read(self.inputs))
        run.manifest.results.update(_decided(self.choices))
        if self.choices.moves_embedding:
            run.manifest.notes.append(f"merge.untie=false: {MOVED}")


def decided_merge(config: RunConfig) -> Merging:
    """Read adapter and base and settle what the command leaves open.

    Raises:
        MensError: they do not belong together, or cannot be merged as asked.
    """
    inputs = gather(config, writable_cache())
    choices = decide(inputs, config.merge)
    return Merging(inputs=inputs, choices=choices, deltas=deltas_of(inputs, choices))


def settle_certified(
    run: Run, written: Path, out: Path, certificate: Certificate, console: Console
) -> None:
    """Record and show a certificate, and keep what it is of, or set it aside.

    Raises:
        GateError: it is over the budget and nobody accepted that.
    """
    from mens_exp.export.verdict import settle

    certificate.write(run.dir.parity)
    run.manifest.results.update(parity=verdict(certificate))
    console.print(parity_table(certificate))
    settle(written, out, certificate, card_section(certificate))


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
        "embedding_moves": choices.moves_embedding,
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
    if choices.moves_embedding:
        lines.append(f"- {MOVED}")
    return lines
