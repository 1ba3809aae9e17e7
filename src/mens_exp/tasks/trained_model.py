"""A model as it was trained, its graph built again, and the text to compare others with it on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v3 import TENSORS_NAME, read_adapter
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.outputs import refuse_changed_adapter
from mens_exp.corpus.source import labelling_of, load_rows
from mens_exp.export import probe
from mens_exp.tasks.adapter_graph import config_of_adapter, with_scale_one
from mens_exp.tasks.inputs import tokenizer_of
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from mens_exp.artifacts.quantizer import Quantizer
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.parity import ParityConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.export.probe import Probe
    from mens_exp.model.resolve import BaseModel
    from mens_exp.tasks.merge_inputs import MergeInputs
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["Trained", "probe_of", "trained_adapter", "trained_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A model as it was trained, and the text to compare others with it on.

    Attributes:
        config: under which its graph was built.
        base: that its adapter sits on.
        backend: the graph, its adapter loaded.
        probe: the text.
        sources: content hashes and names for the certificate.
    """

    config: RunConfig
    base: BaseModel
    backend: Backend
    probe: Probe
    sources: dict[str, Any]


def trained_run(subject: RunDir, theirs: RunConfig, settings: ParityConfig, cache: Path) -> Trained:
    """Build the graph of a run with its adapter, and choose the text.

    Args:
        subject: the run.
        theirs: its configuration, the device set.
        settings: the `parity` node of the command.
        cache: folder of models and rows.
    """
    from mens_exp.model.resolve import resolve
    from mens_exp.training.build import build_backend, lightning_quiet

    refuse_changed_adapter(subject.adapter)
    base = resolve(theirs.model, cache)
    tokenizer = tokenizer_of(theirs.tokenizer, base, subject)
    manifest, tensors = read_adapter(subject.adapter)
    with lightning_quiet():
        backend = build_backend(theirs, base)
    backend.load_adapter(tensors)
    text = probe_of(theirs, tokenizer, settings, cache, longest=backend.max_positions)
    return Trained(
        config=theirs,
        base=base,
        backend=backend,
        probe=text,
        sources={
            "run": subject.path.resolve().name,
            "adapter_sha256": sha256_file(subject.adapter / TENSORS_NAME),
            "base_model": base.name,
            "base_weights_sha256": base.weights_sha256,
            "quant": manifest.quant,
        },
    )


def trained_adapter(
    config: RunConfig, inputs: MergeInputs, quantizer: Quantizer | None, cache: Path
) -> Trained:
    """Build the graph of an adapter whose run is not at hand.

    Args:
        config: of the command; its data is the text.
        inputs: adapter and base.
        quantizer: what made 4-bit values of the base; None where nothing did.
        cache: folder of rows.
    """
    from mens_exp.training.build import build_backend, lightning_quiet

    assert inputs.base is not None, "the caller has asked"
    assert inputs.shape is not None, "the caller has asked"
    base, manifest = inputs.base, inputs.manifest
    theirs = config_of_adapter(config, manifest, base, inputs.shape, quantizer)
    tokenizer = load_tokenizer(theirs.tokenizer, base.directory)
    with lightning_quiet():
        backend = build_backend(theirs, base)
    backend.load_adapter(with_scale_one(manifest, inputs.tensors))
    text = probe_of(theirs, tokenizer, config.parity, cache, longest=backend.max_positions)
    return Trained(
        config=theirs,
        base=base,
        backend=backend,
        probe=text,
        sources={
            "adapter_sha256": inputs.sha256,
            "base_model": base.name,
            "base_weights_sha256": base.weights_sha256,
            "quant": manifest.quant,
        },
    )


def probe_of(
    theirs: RunConfig, tokenizer: Tokenizer, settings: ParityConfig, cache: Path, *, longest: int
) -> Probe:
    """Choose what is compared on: a file where one is named, else rows, held-out ones first."""
    length = min(theirs.data.seq_len, longest)
    if settings.text is not None:
        path = Path(settings.text).expanduser()
        return probe.of_text(path, tokenizer, seq_len=length, tokens=settings.tokens)
    rows = load_rows(theirs.data, cache)
    sides = {"held out": rows.heldout, "validation": rows.val, "training": rows.train}
    labelling = dataclasses.replace(labelling_of(theirs), seq_len=length)
    return probe.of_rows(sides, tokenizer, labelling, settings.tokens)
