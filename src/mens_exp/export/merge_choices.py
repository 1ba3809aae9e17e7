"""Decide a merge: the extent of the output, its dtype, and its base weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts.quantizer_record import ModuleQuantizer, Quantizer, quantizer_of
from mens_exp.config.lora import ADAPTERS
from mens_exp.config.quant import DEFAULT_QUANTIZER, QUANTIZERS
from mens_exp.config.task import MergeBase, MergeMode
from mens_exp.errors import Problems, RequestError
from mens_exp.layout.adapter_base import (
    AdaptedLayer,
    Place,
    dtype_of,
    layer_problems,
    places,
    stored_key,
    untied,
)
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.prequantized import CODES
from mens_exp.layout.shape import HEAD, base_key
from mens_exp.planning.messages import needs_verified_layout
from mens_exp.planning.planner import SUBSET_MERGE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.config.lora_spec import AdapterSpec
    from mens_exp.config.quant import QuantizerSpec
    from mens_exp.config.task import MergeConfig
    from mens_exp.errors import MensError
    from mens_exp.export.subject import MergeInputs
    from mens_exp.lora.method import Change

# The meaning of merge.untie=false, for users of the merged model.
MOVED = (
    "head and input embedding are one tensor, so the input embedding moves by the head's delta "
    "too; this is not the model that was trained, and its loss differs"
)

_DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The settings of a merge.

    Attributes:
        layers: the adapter's layers, in order.
        only_merged: whether only merged tensors are written.
        quantizer: quantizer to apply to the base first; None merges into the published weights.
        why: the reason for that base, for the operator.
        dtype: safetensors' name for the dtype of the output.
        unties: whether a tied head gets a separate weight.
        moves_embedding: whether a tied head stays tied, so that its delta changes the embedding.
        places: the source of each tensor of the output, by the base's file.
        is_proxy: whether the adapter's graph is the proxy stack.
        trained_on: the quantizer of the base while the adapter was trained; None if unquantized.
    """

    layers: tuple[AdaptedLayer, ...]
    only_merged: bool
    quantizer: Quantizer | None
    why: str
    dtype: str
    unties: bool
    moves_embedding: bool
    places: dict[Path, list[Place]]
    is_proxy: bool
    trained_on: Quantizer | None

    @property
    def all_places(self) -> list[Place]:
        """Every tensor of the output, file by file."""
        return [one for listed in self.places.values() for one in listed]

    @property
    def caveat(self) -> str:
        """A caveat to append to descriptions of the output; empty if there is none."""
        return f"; {MOVED}" if self.moves_embedding else ""


def decide(inputs: MergeInputs, asked: MergeConfig) -> Choices:
    """Compare adapter and base by their headers, and decide the settings that `merge` leaves open.

    Raises:
        RequestError: they do not belong together, or do not allow the requested merge.
        ModelFileError: the base lacks a tensor, or has a different shape.
        Problems: several of these.
    """
    _refuse_unmerged(inputs.manifest)
    shapes = {name: tensor.shape for name, tensor in inputs.tensors.items()}
    layers = tuple(
        AdaptedLayer(
            logical=layer,
            key=inputs.manifest.base_key_map[layer],
            shape=inputs.manifest.form.weight_shape(layer, shapes),
        )
        for layer in inputs.manifest.layer_order
    )
    Problems.raise_if(layer_problems(layers, inputs.shards, inputs.where))
    if not asked.any_base:
        _refuse_other_base(inputs)
    proxy = _is_proxy(inputs)
    only_merged = _only_merged(inputs, asked, proxy=proxy)
    if only_merged:
        _refuse_unverified(inputs)
    tied = _tied_head(layers, inputs)
    Problems.raise_if(_head_problems(layers, inputs, asked, tied=tied, only_merged=only_merged))
    spec = QUANTIZERS.known(inputs.manifest.quant["base_quant"])
    if asked.base is not MergeBase.original:
        _refuse_unknown_quantizers(inputs.manifest)
    if spec is not None and spec.is_kept:
        quantizer, why = _of_kept_values(spec, asked, inputs)
    else:
        quantizer, why = _base(inputs, asked)
    made = {} if quantizer is None else _quantizers(inputs, layers, quantizer, proxy=proxy)
    if not asked.untie and HEAD in made:
        raise _embedding_of_four_bits()
    planned = places(
        layers,
        inputs.shards,
        only_merged=only_merged,
        unties=asked.untie,
        quantizers=made,
    )
    if inputs.shape is not None and inputs.shape.stored is not None:
        planned = _without_idle_biases(planned, inputs)
    every = [one for listed in planned.values() for one in listed]
    dtype = dtype_of(one.info for one in every) if asked.dtype is None else asked.dtype.value
    return Choices(
        layers=layers,
        only_merged=only_merged,
        quantizer=quantizer,
        why=why,
        dtype=_DTYPES.get(dtype, dtype),
        unties=tied and asked.untie,
        moves_embedding=tied and not asked.untie,
        places=planned,
        is_proxy=proxy,
        trained_on=_trained_on(inputs, quantizer),
    )


def _without_idle_biases(
    planned: dict[Path, list[Place]], inputs: MergeInputs
) -> dict[Path, list[Place]]:
    """Omit biases of quantized layers whose modules have no bias.

    Programs that write GPTQ give every layer a bias of zeros; transformers ignores these.
    """
    from mens_exp.backends.frozen_base import outline

    assert inputs.base is not None, "its shape is known"
    known = {name for name, _ in outline(inputs.base).named_parameters()}
    known |= {name.partition(".")[2] for name in known}
    coded = {one.key for listed in planned.values() for one in listed if one.info.dtype == CODES}

    def idle(name: str) -> bool:
        path = name.removesuffix(".bias")
        return path != name and f"{path}.weight" in coded and name not in known

    return {
        shard: [one for one in listed if not idle(one.name)] for shard, listed in planned.items()
    }


def deltas_of(inputs: MergeInputs, choices: Choices) -> dict[str, Change]:
    """Return the change to each weight; for a requantized base, doubled pairs are split again."""
    import torch

    from mens_exp.lora.method import method_of

    manifest = inputs.manifest
    method = method_of(_spec_of(manifest)).sharing(manifest.shared)
    init = (manifest.mens_exp or {}).get("init") or {}
    found = {}
    for layer in manifest.layer_order:
        parts = {part: f"{layer}.{part}" for part in manifest.form.tensors}
        tensors = {part: torch.from_numpy(inputs.tensors[name]) for part, name in parts.items()}
        whole = method.change(tensors, scale=manifest.scale_of(layer))
        apart = init.get("doubled_rank") and choices.quantizer is not None
        found[layer] = whole.as_trained() if apart else whole
    return found


def _spec_of(manifest: AdapterManifest) -> AdapterSpec:
    """Return the adapter method of a record.

    Raises:
        RequestError: no installed method has this name.
        SetupError: an installed method cannot be used.
    """
    spec = ADAPTERS.known(manifest.variant)
    if spec is None:
        raise RequestError(
            "unknown adapter method, so its effect on a weight is unknown",
            where="mens_exp.variant",
            found=manifest.variant,
            expected=f"one of {', '.join(ADAPTERS.built_in)}, or an installed one",
            remedy="install the package that provides the method",
        )
    return spec


def _refuse_unmerged(manifest: AdapterManifest) -> None:
    spec = _spec_of(manifest)
    if spec.not_merged is not None:
        raise RequestError(
            spec.not_merged,
            where="mens_exp.variant",
            found=manifest.variant,
            expected="an adapter method that can be merged",
            remedy="evaluate the run itself: task=evaluate path=<run>",
        )


def _refuse_other_base(inputs: MergeInputs) -> None:
    recorded = (inputs.manifest.mens_exp or {}).get("base_weights_sha256")
    if recorded is None:
        return
    found = inputs.weights_sha256()
    if found != recorded:
        raise RequestError(
            "the base is not the one that the adapter was trained on",
            where="base" if inputs.base is not None else "merge.base_shard",
            found=f"weights of sha256 {found}",
            expected=recorded,
            remedy="name that base, or add merge.any_base=true",
        )


def _is_proxy(inputs: MergeInputs) -> bool:
    """Return whether the adapter was trained on the proxy stack."""
    ours = inputs.manifest.mens_exp or {}
    is_theirs = inputs.schema == "v2" or (inputs.schema == "v3" and not ours)
    layers = inputs.manifest.layer_order
    return (
        "candle_qlora_graph_id" in ours
        or any(layer.startswith("mid") for layer in layers)
        or (is_theirs and layers == [HEAD])
    )


def _only_merged(inputs: MergeInputs, asked: MergeConfig, *, proxy: bool) -> bool:
    if asked.mode is not None:
        return asked.mode is MergeMode.subset
    return proxy or inputs.base is None


def _refuse_unverified(inputs: MergeInputs) -> None:
    """Refuse single tensors of a family whose names are unverified."""
    if inputs.shape is not None and not inputs.shape.family.verified:
        model_type = inputs.shape.family.model_type
        raise needs_verified_layout(
            SUBSET_MERGE, model_type, FAMILIES, instead="merge the whole model: merge.mode=full"
        )


def _tied_head(layers: Sequence[AdaptedLayer], inputs: MergeInputs) -> bool:
    """Return whether the adapter changes a head that shares its weight with the embedding."""
    heads = [one for one in layers if one.logical == HEAD]
    tied = inputs.shape is not None and inputs.shape.tied
    return any(untied(one) or tied for one in heads)


def _head_problems(
    layers: Sequence[AdaptedLayer],
    inputs: MergeInputs,
    asked: MergeConfig,
    *,
    tied: bool,
    only_merged: bool,
) -> list[MensError]:
    """List problems that prevent the requested merge of a tied head."""
    if not tied and asked.untie:
        return []
    if not tied:
        return [_nothing_to_untie("the adapter has no delta for a tied head")]
    is_table = any(untied(one) for one in layers)
    if not asked.untie and not is_table:
        return [_nothing_to_untie("base_key_map names a weight of the head alone")]
    own_head = _has_own_head(inputs)
    if not asked.untie and own_head:
        return [_nothing_to_untie("the base has an untied head, which would not change")]
    if not only_merged and own_head and is_table:
        return [
            RequestError(
                "the adapter's head is the embedding table, and this base has an untied head",
                where="merge.mode",
                found="full",
                expected="subset: the merged projections alone",
                remedy="add merge.mode=subset",
            )
        ]
    return []


def _has_own_head(inputs: MergeInputs) -> bool:
    """Return whether the base has a separate head, by its configuration or its bare shards."""
    if inputs.shape is not None:
        return not inputs.shape.tied
    return any(stored_key(f"{HEAD}.weight", _keys(shard)) is not None for shard in inputs.shards)


def _nothing_to_untie(why: str) -> RequestError:
    return RequestError(
        f"nothing can be merged into a shared embedding: {why}",
        where="merge.untie",
        found=False,
        expected="a delta of a head that is the embedding table",
        remedy="drop merge.untie=false",
    )


def _embedding_of_four_bits() -> RequestError:
    return RequestError(
        "the input embedding was never 4-bit, and the head's 4-bit values would replace it",
        where="merge.base",
        found="dequantized",
        expected="original, as the head stays tied (merge.untie=false)",
        remedy="add merge.base=original, or drop merge.untie=false",
    )


def _base(inputs: MergeInputs, asked: MergeConfig) -> tuple[Quantizer | None, str]:
    """Return the quantizer to apply to the base before merging, if any, and the reason."""
    manifest, recorded = inputs.manifest, inputs.manifest.quantizer
    header = manifest.quant["base_quant"]
    if asked.base is MergeBase.original:
        differs = f"; it was trained on {header} values of them" if header != "none" else ""
        return None, f"the published weights, as asked{differs}"
    if recorded is not None:
        spec = QUANTIZERS.known(header)
        has_blocks = spec is None or "block_size" in spec.settings
        blocks = f" in blocks of {recorded['block_size']}" if has_blocks else ""
        says = f"{header} values{blocks}{_others(recorded)}"
        return recorded, f"{says}, which the adapter was trained against, as it records"
    assumed = _assumed(inputs)
    block = assumed["block_size"]
    if header != "none" and (asked.base is not None or inputs.base is not None):
        return assumed, (
            f"{header} values in blocks of {block}: the header's quantization; the adapter "
            "records no more of it"
        )
    if asked.base is None:
        if header == "none":
            return None, "the published weights, which the adapter was trained on"
        return None, (
            "the published weights: the adapter does not record what made "
            f"{header} of them; merge.base=dequantized takes blocks of {block}"
        )
    if inputs.schema == "peft":
        return assumed, (
            f"nf4 values in blocks of {block}, double quantized: a PEFT directory does not "
            "say what its base was, and this is what 4-bit trainers use by default"
        )
    raise RequestError(
        "the adapter was trained on an unquantized base",
        where="merge.base",
        found="dequantized",
        expected="original",
        remedy="drop merge.base",
    )


def _others(quantizer: Quantizer) -> str:
    """Describe the other quantizers and block sizes of modules, with the number of modules."""
    many = Counter(
        _storage(one, quantizer["block_size"]) for one in quantizer.get("modules", {}).values()
    )
    return "".join(
        f", {name} in {count} module{'s' if count > 1 else ''}" for name, count in many.items()
    )


def _storage(one: ModuleQuantizer, usual: int) -> str:
    """Name a module's quantizer, and its block size if that is not the default."""
    name, block = one["quant_type"], one["block_size"]
    spec = QUANTIZERS.known(name)
    is_choice = block != usual and spec is not None and "block_size" in spec.settings
    return f"{name} in blocks of {block}" if is_choice else name


def _refuse_unknown_quantizers(manifest: AdapterManifest) -> None:
    recorded = manifest.quantizer
    others = [] if recorded is None else recorded.get("modules", {}).values()
    named = [
        (manifest.quant["base_quant"], recorded),
        *((one["quant_type"], one) for one in others),
    ]
    for name, record in named:
        spec = QUANTIZERS.known(name)
        if spec is None or (_needs_levels(spec) and "levels" not in (record or {})):
            raise RequestError(
                f"unknown {'quantizer' if spec is None else 'levels of the codebook'}, so the "
                "values that the adapter was trained on cannot be computed again",
                where="merge.base",
                found=name,
                expected="original, whose distance from the trained model is unknown",
                remedy="add merge.base=original"
                if spec is not None
                else "install the package that provides it, or add merge.base=original",
            )


def _needs_levels(spec: QuantizerSpec) -> bool:
    return "levels" in spec.settings


def _of_kept_values(
    spec: QuantizerSpec, asked: MergeConfig, inputs: MergeInputs
) -> tuple[None, str]:
    values = f"{spec.name} values"
    if asked.base is MergeBase.dequantized:
        raise RequestError(
            f"{values} cannot be computed again",
            where="merge.base",
            found="dequantized",
            expected="original"
            if spec.keeps_codes
            else "original, whose distance from them the certificate measures",
            remedy="drop merge.base",
        )
    if spec.keeps_codes and inputs.shape is not None and inputs.shape.stored is None:
        return None, "unquantized weights; the adapter was trained on a quantized checkpoint"
    if spec.keeps_codes:
        return None, "the values of the published codes, on which the adapter was trained"
    return None, f"the published weights; the adapter was trained on {values} of them"


def _trained_on(inputs: MergeInputs, quantizer: Quantizer | None) -> Quantizer | None:
    """Return the quantizer of the base during training, as far as recorded."""
    if quantizer is not None or inputs.manifest.quantizer is not None:
        return quantizer or inputs.manifest.quantizer
    spec = QUANTIZERS.known(inputs.manifest.quant["base_quant"])
    is_known = spec is not None and spec.is_quantized and not _needs_levels(spec)
    return _assumed(inputs) if is_known else None


def _assumed(inputs: MergeInputs) -> Quantizer:
    """Return the quantizer of an adapter that does not record it.

    The Vox mens trainer quantizes f32 weights to 4 bits; transformers' loader first rounds them to
    bf16.
    """
    is_peft = inputs.schema == "peft"
    quant = inputs.manifest.quant
    spec = QUANTIZERS.known(quant["base_quant"])
    if spec is None or not spec.is_quantized:
        spec = DEFAULT_QUANTIZER.spec
    is_bnb_4bit = spec.usual_double_quant
    dtype = "f32" if is_bnb_4bit and not is_peft else "bf16"
    return {
        "quant_type": spec.name,
        "block_size": spec.usual_block,
        "double_quant": is_bnb_4bit and (is_peft or quant["double_quant"]),
        "compute_dtype": dtype,
        "rounded_to": dtype,
        "skip": [],
        "library": "assumed",
    }


def _quantizers(
    inputs: MergeInputs,
    layers: Sequence[AdaptedLayer],
    quantizer: Quantizer,
    *,
    proxy: bool,
) -> dict[str, Quantizer]:
    """Return the quantizer of each quantized weight of the base in training, by its key."""
    if inputs.model is not None and inputs.shape is not None and not proxy:
        keys, family = inputs.model.tensors, inputs.shape.family
        return {
            base_key(one.path, family, keys): quantizer_of(quantizer, one.path)
            for one in linear_modules(inputs.shape)
            if one.layer is not None and one.stack is None and one.path not in quantizer["skip"]
        }
    found = {key for shard in inputs.shards for key in _keys(shard)}
    skip = {stored_key(f"{path}.weight", found) for path in quantizer["skip"]}
    here = {stored_key(one.key, found) for one in layers if one.logical != HEAD} - skip
    heads = [one for one in layers if one.logical == HEAD and proxy]
    here |= {HEAD if untied(one) else stored_key(one.key, found) for one in heads}
    own = {stored_key(f"{path}.weight", found): path for path in quantizer.get("modules", {})}
    return {key: quantizer_of(quantizer, own.get(key, "")) for key in here if key is not None}


def _keys(shard: Path) -> set[str]:
    from mens_exp.layout.checkpoint_files import read_headers

    return set(read_headers([shard])[shard])
