"""Certify merges and exports: compare the written output with the trained model.

Model outputs are compared wherever a model can run, and tensors otherwise. For an exported adapter,
the deltas are compared, and also the model's outputs if its run is available.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from mens_exp.artifacts import atomic
from mens_exp.artifacts.certificate import Certificate, Comparison, Evidence
from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.model import HfModel
from mens_exp.config.task import ExportFormat
from mens_exp.export import parity
from mens_exp.export.adapter import find, read
from mens_exp.export.certificate import adapter_errors, hashes_of
from mens_exp.export.gguf import ADAPTER_FILE, read_gguf_adapter
from mens_exp.export.handoff import as_plain_lora
from mens_exp.export.merge_choices import decide, deltas_of
from mens_exp.export.parity import tensor_errors
from mens_exp.export.subject import config_of, gather
from mens_exp.layout.checkpoint_files import read_header
from mens_exp.layout.model_cache import hash_weights
from mens_exp.layout.shape import shape_of
from mens_exp.model.quiet import quiet
from mens_exp.planning.preflight import writable_cache
from mens_exp.quant.layers import parameter_count
from mens_exp.tasks.inputs import probe_of, trained_adapter, trained_run
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from mens_exp.artifacts.certificate import TensorError
    from mens_exp.config.root import RunConfig
    from mens_exp.config.task import ParityConfig
    from mens_exp.export.certificate import Probe
    from mens_exp.export.parity import Forward
    from mens_exp.tasks.inputs import Trained

    Opening = Callable[[], AbstractContextManager[Forward]]
    from collections.abc import Mapping

    from mens_exp.export.merge_choices import Choices
    from mens_exp.export.subject import Conversion, MergeInputs
    from mens_exp.lora.method import Change

_WRITTEN = "written"
_ROOM_FRAC = 0.8  # fraction of free memory for a dense copy (unverified guess)


@dataclass(slots=True)
class _Opened:
    """The models to compare, by name, and the reasons for leaving others out."""

    graphs: dict[str, tuple[str, Opening]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def certify_model(
    trained: Trained, directory: Path, settings: ParityConfig, *, what: str
) -> Certificate:
    """Compare a complete model directory with the trained model.

    Args:
        trained: the trained model.
        directory: the model directory.
        settings: the `parity` node.
        what: description of the directory.
    """
    opened = _causal(trained, directory, what)
    return _certificate(trained, opened, settings, directory)


def certify_stack(
    trained: Trained,
    weights_OI: dict[str, torch.Tensor],
    directory: Path,
    settings: ParityConfig,
    *,
    what: str,
    tied: bool = False,
) -> Certificate:
    """Compare merged projections of the proxy stack with the trained stack.

    Args:
        trained: the trained stack.
        weights_OI: merged weights by logical name, read back from the output.
        directory: the output directory.
        settings: the `parity` node.
        what: description of the output.
        tied: whether the head's merged weight is also the input embedding.
    """
    stack: Any = trained.backend
    opened = _Opened({_WRITTEN: (what, lambda: parity.merged_stack(stack, weights_OI, tied=tied))})
    return _certificate(trained, opened, settings, directory)


def certify_peft(trained: Trained, directory: Path, settings: ParityConfig) -> Certificate:
    """Compare a PEFT directory, loaded on the plainly quantized base, with the trained model.

    Args:
        trained: the trained model.
        directory: the PEFT directory.
        settings: the `parity` node.
    """
    config, base = trained.config, trained.base
    what = f"PEFT on the base, {_stored(config)}"
    opened = _Opened({_WRITTEN: (what, lambda: parity.from_peft(directory, config, base))})
    return _certificate(trained, opened, settings, directory)


def certify_gguf(
    trained: Trained, directory: Path, settings: ParityConfig, *, what: str
) -> Certificate:
    """Compare a GGUF file, read by transformers, with the trained model.

    Args:
        trained: the trained model.
        directory: directory of the GGUF file.
        settings: the `parity` node.
        what: description of the file.
    """
    trained = dataclasses.replace(trained, probe=_in_context(trained.probe, directory))
    opened = _Opened({_WRITTEN: (what, lambda: parity.from_gguf(directory))})
    return _certificate(trained, opened, settings, directory)


def certify_gguf_of(config: RunConfig, source: Path, directory: Path) -> Certificate:
    """Compare a GGUF file, read by transformers, with the model directory it was made from.

    Args:
        config: the command's configuration; its data provides the text.
        source: the model directory.
        directory: directory of the GGUF file.
    """
    tokenizer = load_tokenizer(config.tokenizer, source)
    longest = shape_of(HfModel(id=str(source))).max_position_embeddings
    text = probe_of(config, tokenizer, config.parity, writable_cache(), longest=longest)
    text = _in_context(text, directory)
    what = f"written: GGUF in {config.gguf.dtype.value}"
    opened = _Opened({_WRITTEN: (what, lambda: parity.from_gguf(directory))})
    with parity.from_directory(source) as forward:
        return _compared(
            forward,
            f"the model in {source.name}, f32",
            text,
            {"base_weights_sha256": hash_weights(source)},
            opened,
            config.parity,
            directory,
        )


def _in_context(text: Probe, directory: Path) -> Probe:
    """Cut documents to the context of a GGUF file, which ends at a model's attention window."""
    longest = parity.gguf_context(directory)
    documents = tuple(ids[:longest] for ids in text.documents)
    if documents == text.documents:
        return text
    source = f"{text.source}, cut to the file's context of {longest} tokens"
    return dataclasses.replace(text, documents=documents, source=source)


def certify_tensors(
    trained: Trained,
    written: Path,
    names: dict[str, str],
    settings: ParityConfig,
    *,
    what: str,
    tied: bool = False,
) -> Certificate:
    """Compare the published base, with merged tensors in place, with the trained model.

    Args:
        trained: the trained model.
        written: the file of merged tensors.
        names: name of each layer's tensor in the file, by logical name.
        settings: the `parity` node.
        what: description of the output.
        tied: whether a merged head stays the input embedding.
    """
    config, base = trained.config, trained.base
    backend: Any = trained.backend
    paths = {one.parameter: names[one.logical] for one in backend.modules_chosen}
    opened = _Opened(
        {_WRITTEN: (what, lambda: parity.with_tensors(config, base, written, paths, tied=tied))}
    )
    return _certificate(trained, opened, settings, written)


def with_tensors(
    certificate: Certificate, tensors: dict[str, TensorError], *, accept: bool
) -> Certificate:
    """Return a certificate with tensor errors included in its verdict.

    Args:
        certificate: certificate without tensor errors.
        tensors: the tensor errors.
        accept: whether to accept the output despite a failed verdict.
    """
    found = dataclasses.replace(certificate, tensors=tensors)
    passed = not found.exceeded()
    return dataclasses.replace(found, passed=passed, accepted=accept and not passed)


def _causal(trained: Trained, directory: Path, what: str) -> _Opened:
    """List the models to compare for a merged causal model."""
    config, base = trained.config, trained.base
    backend: Any = trained.backend
    dense_bytes = 4 * parameter_count(backend.causal_lm)
    free_bytes = int(psutil.virtual_memory().available * _ROOM_FRAC)
    if dense_bytes > free_bytes:
        reason = (
            f"a dense f32 copy takes {dense_bytes / 2**30:.1f} GiB, "
            f"and {free_bytes / 2**30:.1f} GiB may be used"
        )
        opened = _Opened(unknown=dict.fromkeys(_ALSO, reason))
        opened.graphs[_WRITTEN] = (
            what,
            lambda: parity.from_directory(directory, memory_bytes=free_bytes),
        )
        return opened
    opened = _Opened({_WRITTEN: (what, lambda: parity.from_directory(directory))})
    opened.graphs["original_merged"] = (
        "published base + merged delta, f32",
        lambda: parity.merged(backend, config, base, into="original"),
    )
    if not config.quant.is_quantized:
        reason = "the base was not quantized"
        opened.unknown.update(dequantized_merged=reason, requantized=reason)
        return opened
    opened.graphs["dequantized_merged"] = (
        "dequantized base + merged delta, f32",
        lambda: parity.merged(backend, config, base, into="dequantized"),
    )
    if config.quant.spec.keeps_codes:
        opened.unknown["requantized"] = "another program made the codes of the base"
        return opened
    opened.graphs["requantized"] = (
        f"written, then quantized again to {config.quant.quant_type.value}",
        lambda: parity.quantized_from(directory, config, base),
    )
    return opened


_ALSO = ("original_merged", "dequantized_merged", "requantized")


def _certificate(
    trained: Trained, opened: _Opened, settings: ParityConfig, directory: Path
) -> Certificate:
    reference = f"as trained: {trained.config.backend.name}, base {_stored(trained.config)}"
    return _compared(
        trained.backend.trace,
        reference,
        trained.probe,
        trained.sources,
        opened,
        settings,
        directory,
    )


def _compared(
    forward: Forward,
    reference: str,
    text: Probe,
    sources: dict[str, Any],
    opened: _Opened,
    settings: ParityConfig,
    directory: Path,
) -> Certificate:
    """Run the reference, then every other model, one at a time."""
    comparisons: dict[str, Comparison] = {}
    # Once, and not for each document: see `quiet`.
    with atomic.scratch(directory.parent) as folder, quiet():
        recorded = parity.record_reference(forward, text, folder)
        for name, (what, opening) in opened.graphs.items():
            with opening() as other:
                comparisons[name] = parity.compare(recorded, other, what, settings.budget)
    passed = not comparisons[_WRITTEN]["exceeded"]
    return Certificate(
        evidence=Evidence.GRAPH,
        reference=reference,
        reference_nll=recorded.nll,
        probe=text.record(),
        judged=_WRITTEN,
        comparisons=comparisons,
        tensors={},
        budget=dataclasses.asdict(settings.budget),
        passed=passed,
        accepted=settings.accept and not passed,
        sources=sources,
        files=hashes_of(directory),
        unknown=opened.unknown,
    )


def _stored(config: RunConfig) -> str:
    quant = config.quant
    if not quant.is_quantized:
        return quant.compute_dtype.value
    double = " with double quantization" if quant.double_quant else ""
    names = dict.fromkeys(one.value for one in (quant.quant_type, *quant.type_pattern.values()))
    return f"{' and '.join(names)}{double}, {quant.compute_dtype.value} products"


def certify_merge(
    config: RunConfig,
    inputs: MergeInputs,
    choices: Choices,
    deltas: Mapping[str, Change],
    written: Path,
) -> Certificate:
    """Compare the output of a merge with the trained model.

    Args:
        config: the command's configuration.
        inputs: adapter and base.
        choices: the choices of the merge.
        deltas: the added deltas by logical name.
        written: the complete directory, or the file of merged tensors, before the move into place.
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
    config: RunConfig, inputs: MergeInputs, choices: Choices, deltas: Mapping[str, Change]
) -> tuple[Choices, Mapping[str, Change]]:
    """Return the expected merge: for a run, its own adapter merged into its own base."""
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
    if not trained.config.backend.spec.is_causal:
        weights = _stack_weights(choices, written)
        tied = choices.moves_embedding
        return certify_stack(trained, weights, written, config.parity, what=what, tied=tied)
    if not choices.only_merged:
        return certify_model(trained, written, config.parity, what=what)
    names = {one.logical: one.name for one in choices.all_places if one.logical}
    tied = choices.moves_embedding
    return certify_tensors(trained, written, names, config.parity, what=what, tied=tied)


def _no_graph(inputs: MergeInputs, choices: Choices) -> str | None:
    """Return the reason why no model can run, or None if one can."""
    if inputs.base is None or inputs.shape is None:
        return "shards alone are not a usable model"
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
    """Build the model that the merge should equal: the run's own, or the adapter on its base."""
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
    """Return a tensors-only certificate, before the tensor errors are added."""
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


def certify_adapter(config: RunConfig, asked: Conversion, written: Path) -> Certificate:
    """Compare a converted adapter with its source.

    Both are read from disk. The PEFT directory of a run is also loaded on the run's quantized base,
    as a user would do, and the resulting model is compared with the trained one.

    Args:
        config: the command's configuration.
        asked: the conversion.
        written: the output directory, before the move into place.
    """
    before = read(asked.place, asked.base, asked.quant)
    place = find(written)
    after = read(place, asked.base, asked.quant)
    errors = adapter_errors(*before, *after)
    if config.export.format is ExportFormat.ollama:
        assert asked.base is not None, "PEFT's form asks for it"
        alpha, tensors = read_gguf_adapter(written / ADAPTER_FILE, after[0], asked.base)
        ranks = {one: tensors[f"{one}.lora_b"].shape[1] for one in after[0].layer_order}
        theirs_in_ollama = as_plain_lora(after[0], alpha, ranks), tensors
        errors = _worse(errors, adapter_errors(*before, *theirs_in_ollama))
    if place.form == "peft" and asked.place.run is not None:
        theirs = config_of(asked.place.run)
        theirs.trainer.accelerator = config.trainer.accelerator
        trained = trained_run(asked.place.run, theirs, config.parity, writable_cache())
        of_graph = certify_peft(trained, written, config.parity)
        return with_tensors(of_graph, errors, accept=config.parity.accept)
    of_deltas = Certificate(
        evidence=Evidence.WEIGHTS,
        reference=f"the deltas of the {asked.place.form} adapter, in f64",
        reference_nll=None,
        probe=None,
        judged=None,
        comparisons={},
        tensors={},
        budget=dataclasses.asdict(config.parity.budget),
        passed=True,
        accepted=False,
        sources={"adapter_sha256": sha256_file(asked.place.tensors)},
        files=hashes_of(written),
        unknown={"comparisons": "deltas that are equal make equal models"},
    )
    return with_tensors(of_deltas, errors, accept=config.parity.accept)


def _worse(
    errors: dict[str, TensorError], others: dict[str, TensorError]
) -> dict[str, TensorError]:
    """Return the larger error of each tensor, of two programs that read one file."""
    return {
        name: max(one, others[name], key=lambda each: each["relative"])
        for name, one in errors.items()
    }
