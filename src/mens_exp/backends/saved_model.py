"""Saved forms of a trained model: adapter (schema v3 and PEFT) and merged directory.

If the initialisation subtracted ``B0 A0`` from the base (PiSSA, LoftQ with several rounds), the
adapter is saved as ``B A - B0 A0``, a pair of twice the rank, so that it is relative to the
published base model.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.artifacts import atomic
from mens_exp.artifacts.adapter_v3 import AdapterManifest
from mens_exp.backends.adapters import ADAPTER
from mens_exp.config.lora import LoraInit, LoraVariant
from mens_exp.layout.checkpoint_files import attribution_required, read_directory
from mens_exp.layout.shape import HEAD, base_key
from mens_exp.layout.targets import pattern_values
from mens_exp.lora.low_rank import stacked, unstacked
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from mens_exp.artifacts.adapter_v3 import AdapterProvenance, Quantizer
    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.shape import Shape
    from mens_exp.layout.targets import LinearModule
    from mens_exp.model.sources import BaseModel

Tensors = dict[str, torch.Tensor]

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
) -> AdapterManifest:
    """Build the manifest of an adapter.

    Args:
        config: the whole configuration.
        base: the base model on disk.
        shape: its dimensions.
        modules: the adapted modules.
        residual: whether the initialisation subtracted something from the base.
        quantizer: the base's quantizer; None if it is unquantized.
    """
    lora, family = config.lora, shape.family
    keys = read_directory(base.directory).tensors
    times = 2 if residual else 1
    ranks = pattern_values(lora.rank_pattern, modules, family, lora.r)
    alphas = pattern_values(lora.alpha_pattern, modules, family, lora.alpha)
    name_of = {one.path: one.logical for one in modules}
    ours: dict[str, Any] = {
        "base_weights_sha256": base.weights_sha256,
        "embed_key": base_key(family.embedding, family, keys),
        "variant": lora.variant.value,
        "rank_pattern": {name_of[p]: r * times for p, r in ranks.items() if r != lora.r},
        "alpha_pattern": {name_of[p]: a * times for p, a in alphas.items() if a != lora.alpha},
        "init": {
            "name": lora.init.value,
            "doubled_rank": residual,
            "exactness": _RESIDUAL if residual else _PLAIN,
        },
    }
    if lora.init is LoraInit.loftq:
        ours["init"]["loftq_iters"] = lora.loftq_iters
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
        base_key_map={one.logical: base_key(one.path, family, keys) for one in modules},
        layer_order=[one.logical for one in modules],
        vocab=shape.vocab_size,
        d_model=shape.hidden_size,
        rank=lora.r * times,
        alpha=lora.alpha * times,
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


def in_fixed_order(path: Path) -> None:
    """Sort the module list in PEFT's configuration, which PEFT keeps as a set."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in ("target_modules", "target_parameters"):
        if config.get(name):
            config[name] = sorted(config[name])
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


@contextmanager
def peft_form(
    model: Any, lora: LoraConfig, layers: Mapping[str, Any], taken: Tensors
) -> Iterator[None]:
    """Give PEFT's model, inside the block, the matrices of its saved directory.

    Doubling both rank and alpha keeps ``alpha / r``. rsLoRA's scale would change, so it is folded
    into the matrices there, and the saved form is plain LoRA.

    Args:
        model: PEFT's model.
        lora: the `lora` config group.
        layers: its LoRA layers by logical name.
        taken: the pairs subtracted from the base; empty if it is plain.
    """
    if not taken:
        yield
        return
    usual = model.peft_config[ADAPTER]
    before = {name: _matrices(layer) for name, layer in layers.items()}
    scales = {name: layer.scaling[ADAPTER] for name, layer in layers.items()}
    model.peft_config[ADAPTER] = replace(
        usual,
        r=2 * usual.r,
        lora_alpha=2 * usual.lora_alpha,
        rank_pattern={path: 2 * r for path, r in usual.rank_pattern.items()},
        alpha_pattern={path: 2 * alpha for path, alpha in usual.alpha_pattern.items()},
        use_rslora=False,
    )
    try:
        for name, layer in layers.items():
            pair = (taken[f"{name}.lora_a"], taken[f"{name}.lora_b"])
            _double(layer, pair, rslora=lora.variant is LoraVariant.rslora)
        yield
    finally:
        model.peft_config[ADAPTER] = usual
        for name, layer in layers.items():
            layer.lora_A[ADAPTER], layer.lora_B[ADAPTER] = before[name]
            layer.scaling[ADAPTER] = scales[name]


def _matrices(layer: Any) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    return layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]


def _double(layer: Any, taken: tuple[torch.Tensor, torch.Tensor], *, rslora: bool) -> None:
    A, B = _matrices(layer)
    device = A.weight.device
    there = (taken[0].to(device), taken[1].to(device))
    A_RI, B_OR = stacked((A.weight.detach(), B.weight.detach()), there)
    if rslora:
        r = A.weight.shape[0]
        B_OR = B_OR * math.sqrt(r)
        layer.scaling[ADAPTER] /= math.sqrt(r)
    layer.lora_A[ADAPTER] = _linear(A_RI)
    layer.lora_B[ADAPTER] = _linear(B_OR)


def _linear(weight_OI: torch.Tensor) -> torch.nn.Linear:
    out, width = weight_OI.shape
    linear = torch.nn.Linear(width, out, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight_OI, requires_grad=False)
    return linear


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
        plain.load_state_dict(dict(weights), strict=False)  # a tied head has one name only
        plain.save_pretrained(temporary)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, temporary)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy a tokenizer's files, including its chat template, from one directory to another."""
    for pattern in _TOKENIZER:
        for file in source.glob(pattern):
            shutil.copyfile(file, directory / file.name)
