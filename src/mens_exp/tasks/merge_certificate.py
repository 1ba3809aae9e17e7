"""The certificate of a merge: of graphs wherever a model can run, of tensors where none can."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.certificate import Certificate, Evidence
from mens_exp.export.verdict import hashes_of
from mens_exp.export.weight_parity import tensor_errors
from mens_exp.layout.safetensors_header import read_header
from mens_exp.plan.preflight import writable_cache
from mens_exp.tasks.certifying import (
    certify_model,
    certify_stack,
    certify_tensors,
    with_tensors,
)
from mens_exp.tasks.merge_choices import decide, deltas_of
from mens_exp.tasks.merge_inputs import gather
from mens_exp.tasks.subject import config_of
from mens_exp.tasks.trained_model import trained_adapter, trained_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mens_exp.config.parity import ParityConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.lora.merge import Delta
    from mens_exp.tasks.merge_choices import Choices
    from mens_exp.tasks.merge_inputs import MergeInputs
    from mens_exp.tasks.trained_model import Trained

__all__ = ["certify_merge", "trained_for"]


def certify_merge(
    config: RunConfig,
    inputs: MergeInputs,
    choices: Choices,
    deltas: Mapping[str, Delta],
    written: Path,
) -> Certificate:
    """Hold what a merge wrote against the model that was trained.

    Args:
        config: of the command.
        inputs: adapter and base.
        choices: what the merge was.
        deltas: what it added, by logical name.
        written: the complete directory, or the file of merged tensors, not in its place yet.
    """
    expected, expected_deltas = _expected(config, inputs, choices, deltas)
    tensors = tensor_errors(
        _files(written), expected.all_places, expected_deltas, expected.quantizer
    )
    reason = _no_graph(inputs, choices)
    if reason is not None:
        certificate = _of_weights(config.parity, inputs, choices, written, reason)
    else:
        certificate = _of_graph(config, inputs, choices, written)
    if choices.moves_embedding:
        certificate.sources["merge_untie"] = False
    return with_tensors(certificate, tensors, accept=config.parity.accept)


def _expected(
    config: RunConfig, inputs: MergeInputs, choices: Choices, deltas: Mapping[str, Delta]
) -> tuple[Choices, Mapping[str, Delta]]:
    """Return what should have been merged: of a run, its own adapter into its own base."""
    if inputs.run is None:
        return choices, deltas
    plain = dataclasses.replace(config, path=str(inputs.run.path), base=None)
    own = gather(plain, writable_cache())
    same = (own.where, own.weights_sha256()) == (inputs.where, inputs.weights_sha256())
    if same:
        return choices, deltas
    expected = decide(own, config.merge)
    return expected, deltas_of(own, expected)


def _files(written: Path) -> dict[str, Path]:
    """Return the file of each written tensor."""
    files = [written] if written.is_file() else sorted(written.glob("*.safetensors"))
    return {name: file for file in files for name in read_header(file)}


def _of_graph(
    config: RunConfig, inputs: MergeInputs, choices: Choices, written: Path
) -> Certificate:
    trained = trained_for(config, inputs, choices)
    base = "published" if choices.quantizer is None else "dequantized"
    what = f"written: {base} base + merged delta, {choices.dtype}{choices.caveat}"
    if trained.config.backend.name == "proxy":
        weights = _stack_weights(choices, written)
        tied = choices.moves_embedding
        return certify_stack(trained, weights, written, config.parity, what=what, tied=tied)
    if not choices.only_merged:
        return certify_model(trained, written, config.parity, what=what)
    names = {one.logical: one.name for one in choices.all_places if one.logical}
    tied = choices.moves_embedding
    return certify_tensors(trained, written, names, config.parity, what=what, tied=tied)


def _no_graph(inputs: MergeInputs, choices: Choices) -> str | None:
    """Say why no model can run, or nothing where one can."""
    if inputs.base is None or inputs.shape is None:
        return "bare shards are no model that runs"
    if inputs.run is not None:
        return None
    if not (inputs.base.directory / "tokenizer.json").is_file():
        return "the base has no tokenizer to make a probe with"
    ours = inputs.manifest.mens_exp or {}
    if choices.is_proxy:
        return "a proxy stack needs the run that trained it"
    if (ours.get("init") or {}).get("doubled_rank"):
        return "a start that changed its base needs the run that made it"
    return None


def trained_for(config: RunConfig, inputs: MergeInputs, choices: Choices) -> Trained:
    """Build the model that a merge should equal: a run's own, or the adapter on its base."""
    if inputs.run is not None:
        theirs = config_of(inputs.run)
        theirs.trainer.accelerator = config.trainer.accelerator
        return trained_run(inputs.run, theirs, config.parity, writable_cache())
    return trained_adapter(config, inputs, choices.trained_on, writable_cache())


def _stack_weights(choices: Choices, written: Path) -> dict[str, Any]:
    """Read merged projections back, ``[O, I]`` by logical name."""
    from safetensors import safe_open

    found = {}
    for shard, listed in choices.places.items():
        path = written if written.is_file() else written / shard.name
        with safe_open(path, framework="pt") as file:
            for place in listed:
                if place.logical is not None:
                    tensor = file.get_tensor(place.name)
                    found[place.logical] = tensor.T if place.transposed else tensor
    return found


def _of_weights(
    settings: ParityConfig, inputs: MergeInputs, choices: Choices, written: Path, reason: str
) -> Certificate:
    """Return the certificate of tensors alone, still without them."""
    return Certificate(
        evidence=Evidence.WEIGHTS,
        reference=f"W + scale · B A in f64, W as the adapter met it{choices.caveat}",
        reference_nll=None,
        probe=None,
        judged=None,
        comparisons={},
        tensors={},
        budget=dataclasses.asdict(settings.budget),
        passed=True,
        accepted=False,
        sources={
            "adapter_sha256": inputs.sha256,
            "base_weights_sha256": inputs.weights_sha256(),
            "quantizer": None if choices.quantizer is None else dict(choices.quantizer),
        },
        files=hashes_of(written),
        unknown={"comparisons": reason},
    )
