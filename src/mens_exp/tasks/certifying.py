"""The certificate of a merge or an export: what was trained, held against what was written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from mens_exp.artifacts import atomic
from mens_exp.artifacts.certificate import Certificate, Comparison, Evidence
from mens_exp.config.model import HfModel
from mens_exp.export import graphs, parity
from mens_exp.export.verdict import hashes_of
from mens_exp.layout.cached import hash_weights
from mens_exp.layout.shape import shape_of
from mens_exp.plan.preflight import writable_cache
from mens_exp.tasks.trained_model import probe_of
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch

    from mens_exp.artifacts.certificate import TensorError
    from mens_exp.config.parity import ParityConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.export.parity import Forward
    from mens_exp.export.probe import Probe
    from mens_exp.tasks.trained_model import Trained

    Opening = Callable[[], AbstractContextManager[Forward]]

__all__ = [
    "certify_gguf",
    "certify_gguf_of",
    "certify_model",
    "certify_peft",
    "certify_stack",
    "certify_tensors",
    "with_tensors",
]

_WRITTEN = "written"
_ROOM_FRAC = 0.8  # of free memory that a dense copy may take (unverified guess)


@dataclass(slots=True)
class _Opened:
    """The graphs to compare, by name, and why others are not among them."""

    graphs: dict[str, tuple[str, Opening]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def certify_model(
    trained: Trained, directory: Path, settings: ParityConfig, *, what: str
) -> Certificate:
    """Hold a complete model directory against the model that was trained.

    Args:
        trained: the latter.
        directory: the former.
        settings: the `parity` node.
        what: the directory in words.
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
    """Hold merged projections of the proxy stack against the stack that was trained.

    Args:
        trained: the latter.
        weights_OI: merged weights by logical name, read back from what was written.
        directory: where they were written.
        settings: the `parity` node.
        what: what was written, in words.
        tied: whether the head's merged weight is the input embedding too.
    """
    stack: Any = trained.backend
    opened = _Opened({_WRITTEN: (what, lambda: graphs.merged_stack(stack, weights_OI, tied=tied))})
    return _certificate(trained, opened, settings, directory)


def certify_peft(trained: Trained, directory: Path, settings: ParityConfig) -> Certificate:
    """Hold a PEFT directory, loaded on the plainly quantized base, against what was trained.

    Args:
        trained: the latter.
        directory: the former.
        settings: the `parity` node.
    """
    config, base = trained.config, trained.base
    what = f"PEFT on the base, {_stored(config)}"
    opened = _Opened({_WRITTEN: (what, lambda: graphs.from_peft(directory, config, base))})
    return _certificate(trained, opened, settings, directory)


def certify_gguf(
    trained: Trained, directory: Path, settings: ParityConfig, *, what: str
) -> Certificate:
    """Hold a GGUF file, read by transformers, against the model that was trained.

    Args:
        trained: the latter.
        directory: of the former.
        settings: the `parity` node.
        what: the file in words.
    """
    opened = _Opened({_WRITTEN: (what, lambda: graphs.from_gguf(directory))})
    return _certificate(trained, opened, settings, directory)


def certify_gguf_of(config: RunConfig, source: Path, directory: Path) -> Certificate:
    """Hold a GGUF file, read by transformers, against the model directory it was made from.

    Args:
        config: of the command; its data is the text.
        source: the model directory.
        directory: of the file.
    """
    tokenizer = load_tokenizer(config.tokenizer, source)
    longest = shape_of(HfModel(id=str(source))).max_position_embeddings
    text = probe_of(config, tokenizer, config.parity, writable_cache(), longest=longest)
    what = f"written: GGUF in {config.gguf.dtype.value}"
    opened = _Opened({_WRITTEN: (what, lambda: graphs.from_gguf(directory))})
    with graphs.from_directory(source) as forward:
        return _compared(
            forward,
            f"the model in {source.name}, f32",
            text,
            {"base_weights_sha256": hash_weights(source)},
            opened,
            config.parity,
            directory,
        )


def certify_tensors(
    trained: Trained,
    written: Path,
    names: dict[str, str],
    settings: ParityConfig,
    *,
    what: str,
    tied: bool = False,
) -> Certificate:
    """Hold the published base with merged tensors in it against the model that was trained.

    Args:
        trained: the latter.
        written: the file of merged tensors.
        names: of each layer's tensor in it, by logical name.
        settings: the `parity` node.
        what: what was written, in words.
        tied: whether a merged head stays the input embedding.
    """
    config, base = trained.config, trained.base
    backend: Any = trained.backend
    paths = {one.path: names[one.logical] for one in backend.modules_chosen}
    opened = _Opened(
        {_WRITTEN: (what, lambda: graphs.with_tensors(config, base, written, paths, tied=tied))}
    )
    return _certificate(trained, opened, settings, written)


def with_tensors(
    certificate: Certificate, tensors: dict[str, TensorError], *, accept: bool
) -> Certificate:
    """Return a certificate that judges by tensors too.

    Args:
        certificate: without any.
        tensors: their errors.
        accept: whether it is to be kept in spite of what it says.
    """
    found = dataclasses.replace(certificate, tensors=tensors)
    passed = not found.exceeded()
    return dataclasses.replace(found, passed=passed, accepted=accept and not passed)


def _causal(trained: Trained, directory: Path, what: str) -> _Opened:
    """List the graphs that a merged causal model is one of."""
    config, base = trained.config, trained.base
    backend: Any = trained.backend
    dense_bytes = 4 * int(backend.causal_lm.num_parameters())
    free_bytes = int(psutil.virtual_memory().available * _ROOM_FRAC)
    if dense_bytes > free_bytes:
        reason = (
            f"a dense f32 copy takes {dense_bytes / 2**30:.1f} GiB, "
            f"and {free_bytes / 2**30:.1f} GiB may be used"
        )
        opened = _Opened(unknown=dict.fromkeys(_ALSO, reason))
        opened.graphs[_WRITTEN] = (
            what,
            lambda: graphs.from_directory(directory, memory_bytes=free_bytes),
        )
        return opened
    opened = _Opened({_WRITTEN: (what, lambda: graphs.from_directory(directory))})
    opened.graphs["original_merged"] = (
        "published base + merged delta, f32",
        lambda: graphs.merged(backend, config, base, into="original"),
    )
    if not config.quant.is_quantized:
        reason = "the base was not quantized"
        opened.unknown.update(dequantized_merged=reason, requantized=reason)
        return opened
    opened.graphs["dequantized_merged"] = (
        "dequantized base + merged delta, f32",
        lambda: graphs.merged(backend, config, base, into="dequantized"),
    )
    opened.graphs["requantized"] = (
        f"written, then quantized again to {config.quant.quant_type.value}",
        lambda: graphs.quantized_from(directory, config, base),
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
    """Run the reference, then every other graph, one at a time."""
    comparisons: dict[str, Comparison] = {}
    with atomic.scratch(directory.parent) as folder:
        recorded = parity.record(forward, text, folder)
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
    return f"{quant.quant_type.value}{double}, {quant.compute_dtype.value} products"
