"""The graph of an adapter that no run of ours is at hand for: its base, quantized as it says."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.config.backend import LoraGraphConfig, QloraConfig
from mens_exp.config.lora import LoraConfig, LoraVariant
from mens_exp.config.model import HfModel
from mens_exp.config.quant import ComputeDtype, QuantConfig, QuantType
from mens_exp.layout.targets import linear_modules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.artifacts.quantizer import Quantizer
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.model.resolve import BaseModel

__all__ = ["config_of_adapter", "with_scale_one"]


def config_of_adapter(
    config: RunConfig,
    manifest: AdapterManifest,
    base: BaseModel,
    shape: Shape,
    quantizer: Quantizer | None,
) -> RunConfig:
    """Return a configuration whose graph has the layers of an adapter, each with scale one.

    Args:
        config: of the command; its data, tokenizer and device stay.
        manifest: of the adapter.
        base: that it sits on.
        shape: of the base.
        quantizer: what made 4-bit values of the base; None where nothing did.
    """
    theirs = copy.deepcopy(config)
    theirs.model = HfModel(id=str(base.directory), trust_remote_code=base.trust_remote_code)
    theirs.lora = _lora(manifest, shape)
    if quantizer is None and manifest.quant["base_quant"] == "int8":
        theirs.quant = QuantConfig(quant_type=QuantType.int8, double_quant=False)
        theirs.backend = QloraConfig(_target_="mens_exp.backends.qlora.QloraBackend")
        return theirs
    if quantizer is None:
        theirs.quant = QuantConfig(
            quant_type=QuantType.none, double_quant=False, compute_dtype=ComputeDtype.f32
        )
        theirs.backend = LoraGraphConfig(_target_="mens_exp.backends.lora.LoraBackend")
        return theirs
    theirs.quant = QuantConfig(
        quant_type=QuantType(quantizer["quant_type"]),
        double_quant=quantizer["double_quant"],
        compute_dtype=ComputeDtype(quantizer["compute_dtype"]),
        block_size=quantizer["block_size"],
        skip=list(quantizer["skip"]),
    )
    theirs.backend = QloraConfig(_target_="mens_exp.backends.qlora.QloraBackend")
    return theirs


def _lora(manifest: AdapterManifest, shape: Shape) -> LoraConfig:
    path_of = {one.logical: one.stack or one.path for one in linear_modules(shape)}
    ranks = {path_of[layer]: manifest.rank_of(layer) for layer in manifest.layer_order}
    is_dora = manifest.variant == "dora"
    return LoraConfig(
        name="adapter",
        targets=list(ranks),
        r=manifest.rank,
        alpha=manifest.rank,
        dropout=0.0,
        variant=LoraVariant.dora if is_dora else LoraVariant.lora,
        rank_pattern=ranks,
        alpha_pattern=dict(ranks),
    )


def with_scale_one(
    manifest: AdapterManifest, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the tensors with each layer's scale in its B, ``[out, r]``."""
    scaled = dict(tensors)
    for layer in manifest.layer_order:
        B_OR = tensors[f"{layer}.lora_b"].astype(np.float64) * manifest.scale_of(layer)
        scaled[f"{layer}.lora_b"] = B_OR.astype(np.float32)
    return scaled
