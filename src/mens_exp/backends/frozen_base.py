"""The frozen base model: loading, quantization, and weights that are dequantized once.

transformers loads the model and bitsandbytes quantizes it. Its forward pass is in
:mod:`mens_exp.backends.forward`.

Shapes: D hidden width.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.forward import check_attention_leaks, hidden_states, layer_states, logits
from mens_exp.config.model import teacher_of
from mens_exp.config.objective_spec import matched_layers
from mens_exp.config.quant import unquantized
from mens_exp.errors import ModelFileError, SetupError
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import otherwise_quantized, quantized_modules, skipped, storage
from mens_exp.model import attention
from mens_exp.model.kernels import frozen_linear, is_rounded, products_dtype
from mens_exp.model.offload import is_offloaded
from mens_exp.model.quiet import quiet
from mens_exp.model.stored_weights import StoredWeights
from mens_exp.objective.causal import Passed
from mens_exp.planning.machine import host_memory
from mens_exp.planning.memory import MOST_DEQUANTIZED
from mens_exp.quant.binding import binding_of, compute_dtype
from mens_exp.quant.bnb import quantization_config
from mens_exp.quant.layers import binding_that_holds, keep_trainable, quantized_linears
from mens_exp.quant.prequantized import dequantizing_config

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.model.sources import BaseModel
    from mens_exp.quant.binding import Binding


def frozen_weights(directory: Path) -> SetupError:
    """Return the error for a request for the weights of a base that was not trained."""
    return SetupError(
        "the base was frozen; its weights are the published ones",
        where=str(directory),
        expected="the adapter, which is what was trained",
        remedy="merge the adapter into the base",
    )


def load_base(
    config: RunConfig, base: BaseModel, device: torch.device, *, dtype: torch.dtype | None = None
) -> Any:
    """Load the causal model on its device, quantized as configured, with every parameter frozen.

    Args:
        config: the whole configuration.
        base: the model on disk.
        device: where to put it.
        dtype: dtype of unquantized parts; None uses the compute dtype.

    Raises:
        SetupError: nothing was quantized.
        ModelFileError: the model's code does not support what is requested.
    """
    from transformers import AutoModelForCausalLM

    quant, shape = config.quant, shape_of(config.model)
    weights = StoredWeights(base.directory, shape.family)
    skip = [one.path for one in skipped(quant.skip, shape)] if quant.skip else []
    stored = quantized_modules(quant, shape) if quant.is_quantized else {}
    others = otherwise_quantized(quant, shape)
    wanted = dtype or compute_dtype(quant)
    loading_config = quantization_config(quant, [*skip, *others], weights)
    if loading_config is None:
        loading_config = dequantizing_config(weights, wanted)
    with quiet():
        model_config = _config_without_dropout(base)
        attends = _attention_implementation(model_config, packing=config.data.packing)
        with _clear_about_packing(model_config):
            model, loading = AutoModelForCausalLM.from_pretrained(
                base.directory,
                config=model_config,
                dtype=wanted,
                quantization_config=loading_config,
                attn_implementation=attends,
                device_map={"": device},  # by default, bitsandbytes takes any GPU
                use_safetensors=True,
                trust_remote_code=base.trust_remote_code,  # by default, transformers would ask
                output_loading_info=True,
            )
    _refuse_random(loading["missing_keys"], base)
    if quant.is_quantized:
        _check_and_finish(model, config, weights, stored)
    if base.source == "hub":
        model.name_or_path = base.name  # PEFT records it as the base; others can load it
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # a rate that custom model code does not read from config.json
    model.requires_grad_(requires_grad=False)
    if config.data.packing and (base.trust_remote_code or not shape.family.verified):
        check_attention_leaks(model)
    return model


class Teacher:
    """A frozen, unquantized teacher in the compute format, without an adapter.

    It is not a submodule of the student, so checkpoints and sharding leave it out. ``matched``
    holds pairs of layers of student and teacher, from 1, whose hidden states are compared.
    """

    def __init__(self, config: RunConfig, base: BaseModel, device: torch.device) -> None:
        """Load the teacher.

        Args:
            config: the run's configuration; ``objective.teacher`` is the model.
            base: the teacher on disk.
            device: where to put it.

        Raises:
            ModelFileError: the teacher's code does not support what the run needs.
        """
        named = teacher_of(config.objective, config.model)
        assert named is not None, "the objective has a teacher"
        plain = replace(config, model=named, quant=unquantized(config.quant.compute_dtype))
        self.base = base
        depths = (shape_of(model).num_hidden_layers for model in (config.model, named))
        self.matched = matched_layers(config.objective, *depths)
        self.causal_lm = load_base(plain, base, device)
        FrozenWeights().take_over(self.causal_lm)
        base.refuse_changed()

    def passed(self, batch: Batch) -> Passed:
        """Pass a micro-batch through the teacher, without gradients."""
        with torch.no_grad():
            if not self.matched:
                return Passed(batch, hidden_states(self.causal_lm, batch), self.head)
            chosen = [theirs for _, theirs in self.matched]
            hidden_MD, layers = layer_states(self.causal_lm, batch, chosen)
            return Passed(batch, hidden_MD, self.head, layers=layers)

    def head(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """Return logits ``[C, V]`` in the compute format, without gradients."""
        with torch.no_grad(), torch.autocast(hidden_CD.device.type, enabled=False):
            return logits(self.causal_lm, hidden_CD)


def published_config(base: BaseModel) -> Any:
    """Return a base model's own transformers configuration."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(base.directory, trust_remote_code=base.trust_remote_code)


def outline(base: BaseModel) -> Any:
    """Return a base model without weights: names and shapes on the meta device."""
    from transformers import AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        config = _config_without_dropout(base)
        trusted = base.trust_remote_code
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)


def _config_without_dropout(base: BaseModel) -> Any:
    """Return a model's configuration with every dropout rate set to zero.

    The base applies no dropout while an adapter trains. Rates are set here and not on modules,
    because many models (OPT, BioGPT) call the functional form of dropout.
    """
    found = published_config(base)
    vars(found).pop("quantization_config", None)  # codes are read here, not by transformers
    for part in [found, *_parts(found)]:
        for name, value in vars(part).items():
            if type(value) in {int, float} and "drop" in name:
                setattr(part, name, type(value)(0))
    return found


def _parts(model_config: Any) -> list[Any]:
    from transformers import PretrainedConfig

    return [one for one in vars(model_config).values() if isinstance(one, PretrainedConfig)]


def _attention_implementation(model_config: Any, *, packing: bool) -> str | None:
    """Return the attention implementation to load a model with; None uses the model's default.

    Only our implementation keeps packed documents apart. Code that bypasses transformers' attention
    interface builds masks for its own attention, so it keeps that if nothing is packed.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    attention.register()
    known = type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if packing or not known:
        return attention.IMPLEMENTATION
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    supported = cls._supports_attention_backend
    return attention.IMPLEMENTATION if supported else None


@contextmanager
def _clear_about_packing(model_config: Any) -> Iterator[None]:
    """Name the remedy if a model's code looks attention up in its own table.

    Raises:
        ModelFileError: the table lacks our implementation.
    """
    try:
        yield
    except KeyError as error:
        if error.args != (attention.IMPLEMENTATION,):
            raise
        raise ModelFileError(
            "the model's code cannot keep packed documents apart",
            where=str(model_config.model_type),
            found="custom attention, outside transformers' attention interface",
            remedy="set data.packing=false",
        ) from error


def _refuse_random(missing: Collection[str], base: BaseModel) -> None:
    """Refuse a checkpoint that lacks weights; transformers would initialise them at random.

    Raises:
        ModelFileError: weights are missing; the message names the first.
    """
    if missing:
        raise ModelFileError(
            "the checkpoint lacks weights of the model that its config.json names",
            where=str(base.directory),
            found=f"no {min(missing)}, {len(missing)} in all",
            expected="every weight; what is absent would be random",
            remedy="check model_type in config.json, or download the model again",
        )


def _check_and_finish(
    model: Any, config: RunConfig, weights: StoredWeights, stored: Mapping[str, QuantConfig]
) -> None:
    """Prepare quantized layers for training, and apply the settings that the loader lacks.

    Args:
        model: the model as loaded.
        config: the whole configuration.
        weights: the base's weights on disk.
        stored: the quantization settings of each module, by path.

    Raises:
        SetupError: nothing was quantized.
    """
    usual = storage(config.quant)
    kind_of = {path: storage(one) for path, one in stored.items()}
    kinds = {usual: config.quant.of(config.quant.quant_type)}
    kinds |= {storage(one): one for one in stored.values()}
    for kind, settings in kinds.items():
        binding = binding_of(settings.spec)
        if kind != usual or binding.loading_config(settings, (), weights) is None:
            paths = [path for path, one in kind_of.items() if one == kind]
            binding.quantize(model, paths, settings)  # the loader skipped them
    layers = quantized_linears(model)
    if not layers:
        raise SetupError(
            "no linear layer was quantized",
            found=f"bitsandbytes on {model.device}",
            expected=f"{config.quant.quant_type.value} linear layers",
            remedy="set backend=lora quant=none: transformers quantizes no layer of this model; or "
            "reinstall bitsandbytes for this machine",
        )
    keep_trainable(model)

    for kind, settings in kinds.items():
        own = {path: one for path, one in layers.items() if kind_of.get(path, usual) == kind}
        binding_of(settings.spec).finish(own, settings, weights.read)


_SHARE_OF_FREE = 0.25  # of memory, for dequantized weights


class FrozenWeights:
    """The weights of linear layers of a frozen base, for `lora.linear`.

    A layer is known if it is a plain linear layer, or if its binding's ``multiplies`` is true.

    Attributes:
        in_fp8: whether training multiplies by them in FP8, except by the head; evaluation never
            does.
    """

    def __init__(self, *, in_fp8: bool = False) -> None:
        """Start without a cached layer."""
        self.in_fp8, self._head = in_fp8, None
        self._bindings: dict[Any, Binding | None] = {}  # a lookup in each forward is too slow
        self._plain: list[Any] = []  # unquantized layers whose forward was replaced
        self._keeping, self._keeps_f32 = frozenset[Any](), False
        self._kept: dict[tuple[Any, torch.dtype], torch.Tensor] = {}

    @contextmanager
    def dequantized_once(self, model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Inside the block, dequantize each weight once, if a CPU has room for all of them.

        Every token of an answer needs all weights. Keeping them saves a fifth of a step with NF4
        and two thirds with codebooks (measured: SmolLM2, eight answers at a time). If products are
        rounded, they are kept in f32, and so are plain layers, which saves half of a step (with
        AVX2). The values are the same. Nothing changes on other devices, or if processes hold parts
        of the weights.

        Args:
            model: the model on its device.
            dtype: the compute format.
        """
        from torch.distributed.tensor import DTensor

        coded = list(quantized_linears(model).values())
        are_here = all(
            one.weight.device.type == "cpu"
            and not isinstance(one.weight, DTensor)
            and not is_offloaded(one)
            for one in [*coded, *self._plain]
        )
        room = min(MOST_DEQUANTIZED, host_memory()[1] * _SHARE_OF_FREE) if are_here else 0
        choices = [(coded, dtype)]
        if is_rounded(dtype, torch.device("cpu")):
            choices.insert(0, ([*coded, *self._plain], torch.float32))
        for layers, kept in choices:
            if kept.itemsize * sum(map(_weights, layers)) <= room:
                self._keeping, self._keeps_f32 = frozenset(layers), kept is torch.float32
                break
        try:
            yield
        finally:
            self._keeping, self._kept = frozenset(), {}

    def are_kept(self, layer: Any) -> bool:
        """Return whether :meth:`of` keeps the weight of a layer."""
        return layer in self._keeping

    def are_known(self, layer: Any) -> bool:
        """Return whether a layer computes ``W x + b`` with the weight of :meth:`of`."""
        if layer.weight.requires_grad or layer._forward_hooks:  # noqa: SLF001  # no public name
            return False
        binding = self._binding(layer)
        return _is_plain(layer) if binding is None else binding.multiplies(layer)

    def of(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return W, ``[O, I]``, in a dtype; a kept one may be in f32, with the same values."""
        if layer not in self._keeping:
            return self._weight(layer, dtype)
        found = self._kept.get((layer, dtype))
        if found is None:
            found = self._weight(layer, dtype)
            if self._keeps_f32 and is_rounded(dtype, found.device):
                found = found.float()
            self._kept[layer, dtype] = found
        return found

    def _weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        binding = self._binding(layer)
        if binding is not None:
            return binding.weight(layer, dtype)
        weight: torch.Tensor = layer.weight.to(dtype)
        return weight if isinstance(layer, torch.nn.Linear) else weight.t()

    def are_in_fp8(self, layer: Any) -> bool:
        """Return whether training multiplies by a layer's weight in FP8."""
        return self.in_fp8 and layer is not self._head

    def take_over(self, model: Any) -> None:
        """Replace the forward of linear layers with one that uses `frozen_linear` where it helps.

        ``del module.forward`` undoes it.
        """
        from transformers.pytorch_utils import Conv1D

        if self.in_fp8:
            head = model.get_output_embeddings()
            self._head = getattr(head, "base_layer", head)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | Conv1D) and not hasattr(module, "lora_A"):
                module.forward = _FrozenForward(module, self)  # type: ignore[method-assign]
                if self._binding(module) is None:
                    self._plain.append(module)

    def _binding(self, layer: Any) -> Binding | None:
        if layer not in self._bindings:
            self._bindings[layer] = binding_that_holds(layer)
        return self._bindings[layer]


class _FrozenForward:
    """Forward of a frozen linear layer: `frozen_linear` where that helps, else its own.

    It helps if products are rounded, or if the dequantized weight is kept. Layers whose codes are
    in host memory, or that train in FP8, need it.
    """

    def __init__(self, layer: Any, weights: FrozenWeights) -> None:
        self.layer, self.weights = layer, weights
        self.own = layer.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, layer, dtype = self.weights, self.layer, products_dtype(x)
        in_fp8 = weights.are_in_fp8(layer) and torch.is_grad_enabled()
        is_ours = (
            is_rounded(dtype, x.device) or weights.are_kept(layer) or is_offloaded(layer) or in_fp8
        )
        if not is_ours or not weights.are_known(layer):
            found: torch.Tensor = self.own(x)
            return found
        of_layer = functools.partial(weights.of, layer)
        y = frozen_linear(x, of_layer, layer.bias, in_fp8=in_fp8)
        return y.to(x.dtype) if hasattr(layer.weight, "quant_state") else y


def _weights(layer: Any) -> int:
    """Count the weights of a linear layer, of which codes have another shape."""
    is_linear = isinstance(layer, torch.nn.Linear)
    return int(layer.in_features * layer.out_features if is_linear else layer.weight.numel())


def _is_plain(layer: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(layer).forward in {torch.nn.Linear.forward, Conv1D.forward}
