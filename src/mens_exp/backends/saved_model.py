"""Saved forms of a trained model: adapter (schema v3 and PEFT) and merged directory.

If the initialisation subtracted ``B0 A0`` from the base (PiSSA, LoftQ with several rounds), the
adapter is saved as ``B A - B0 A0``, a pair of twice the rank, so that it is relative to the
published base model.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.adapter_tensors import FORMS
from mens_exp.artifacts.adapter_v3 import AdapterManifest
from mens_exp.layout.checkpoint_files import attribution_required, read_directory
from mens_exp.layout.shape import HEAD, base_key
from mens_exp.layout.targets import pattern_values
from mens_exp.lora.method import Tensors, stacked, unstacked
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from mens_exp.artifacts.adapter_v3 import AdapterProvenance
    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.shape import Shape
    from mens_exp.model.sources import BaseModel

_RESIDUAL = (
    "the base of this run quantizes what its start left of each weight; the delta here is "
    "relative to the published weights, and on them, or on their plain quantization, it is the "
    "trained model but for the difference of two quantization errors "
    "(results.peft_view_val_loss in the run's manifest is its loss on the plain quantization)"
)
_PLAIN = "the trained model is this adapter on the plainly quantized base"


def stacked_tensors(tensors: Tensors, taken: Tensors) -> Tensors:
    """Return an adapter relative to the published base; unchanged if nothing was subtracted."""
    found = dict(tensors)
    for a in [name for name in taken if name.endswith("lora_a")]:
        b = f"{a[:-1]}b"
        found[a], found[b] = stacked((tensors[a], tensors[b]), (taken[a], taken[b]))
    return found


def unstacked_tensors(tensors: Tensors, taken: Tensors) -> tuple[Tensors, Tensors]:
    """Undo :func:`stacked_tensors`: return the trained adapter and the subtracted pairs.

    Args:
        tensors: the adapter relative to the published base.
        taken: the subtracted pairs of the same layers, for their names.
    """
    tuned, out = dict(tensors), {}
    for a in [name for name in taken if name.endswith("lora_a")]:
        b = f"{a[:-1]}b"
        trained, first = unstacked((tensors[a], tensors[b]))
        (tuned[a], tuned[b]), (out[a], out[b]) = trained, first
    return tuned, out


def manifest_of(
    config: RunConfig,
    base: BaseModel,
    shape: Shape,
    modules: Sequence[LinearModule],
    *,
    residual: bool,
    quantizer: Quantizer | None,
    shared: Mapping[str, Any],
    sizes: dict[str, list[str]],
) -> AdapterManifest:
    """Build the manifest of an adapter.

    Args:
        config: the whole configuration.
        base: the base model on disk.
        shape: its dimensions.
        modules: the adapted modules.
        residual: whether the initialisation subtracted something from the base.
        quantizer: the base's quantizer; None if it is unquantized.
        shared: PEFT's configuration or the projections that all layers share, if any.
        sizes: names of the dimensions of each tensor of a layer.
    """
    lora, family, spec = config.lora, shape.family, config.lora.spec
    keys = read_directory(base.directory).tensors
    times = 2 if residual else 1
    ranks = pattern_values(lora.rank_pattern, modules, family, lora.r)
    alphas = pattern_values(lora.alpha_pattern, modules, family, lora.alpha)
    name_of = {one.path: one.logical for one in modules}
    ours: dict[str, Any] = {
        "base_weights_sha256": base.weights_sha256,
        "embed_key": base_key(family.embedding, family, keys),
        "variant": spec.name,
        "peft_config" if spec.form.in_peft else "projections": dict(shared),
        "tensors": sizes if spec.name not in FORMS or spec.form.in_peft else {},
        "rank_pattern": {name_of[p]: r * times for p, r in ranks.items() if r != lora.r},
        "alpha_pattern": {name_of[p]: a * times for p, a in alphas.items() if a != lora.alpha},
        "init": {
            "name": lora.init.value,
            "doubled_rank": residual,
            "exactness": _RESIDUAL if residual else _PLAIN,
            **lora.init.spec.record(lora),
        },
    }
    if quantizer is not None:
        ours["quantizer"] = quantizer  # a merge reproduces the same 4-bit values
    if HEAD in name_of.values():
        ours["tied_head"] = shape.tied  # a merge into a tied head would change the embedding too
    return AdapterManifest(
        adapter_method="qlora" if config.quant.is_quantized else "lora",
        quant={
            "base_quant": config.quant.quant_type.value,
            "double_quant": config.quant.double_quant,
        },
        base_key_map={
            one.logical: base_key(one.path, family, keys, one.norm or "weight") for one in modules
        },
        layer_order=[one.logical for one in modules],
        vocab=shape.vocab_size,
        d_model=shape.hidden_size,
        rank=spec.rank(lora) * times,
        alpha=spec.alpha(lora) * times,
        base_model=base.name,
        provenance=provenance_of(base, family),
        mens_exp={key: value for key, value in ours.items() if value or value is False},
    )


def provenance_of(base: BaseModel, family: Family) -> AdapterProvenance | None:
    """Return the origin of the base; None if its licence terms are unknown.

    The schema allows no null here, so an unknown origin is omitted entirely.
    """
    asked = attribution_required(base.license)
    if asked is None:
        return None
    return {
        "base_family": family.model_type,
        "upstream_model_id": base.name,
        "license_class": base.license,
        "attribution_required": asked,
    }


_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "vocab.*", "merges.*")


def write_model(
    model: Any,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    directory: Path,
    *,
    config: Any = None,
) -> None:
    """Write weights with a model's configuration as a directory, atomically.

    Args:
        model: a transformers model, for its class.
        weights: the weights by transformers' names.
        tokenizer: directory with the tokenizer files to copy; None if the model was trained on
            another tokenizer's ids.
        directory: where to write.
        config: the transformers configuration to write; None writes the model's.
    """
    with atomic.directory(directory) as temporary, quiet():
        plain = type(model)(
            config or model.config
        )  # without PEFT's layers, whose names would be saved
        plain.load_state_dict(dict(weights), strict=False)  # a tied head is listed once
        plain.save_pretrained(temporary)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, temporary)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy a tokenizer's files, including its chat template, from one directory to another."""
    for pattern in _TOKENIZER:
        for file in source.glob(pattern):
            shutil.copyfile(file, directory / file.name)
