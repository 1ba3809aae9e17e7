"""The graphs of a certificate that are made of the trained one, and those read from disk.

Each gives a function from a document's ids to a trace. What stands for a merge here is computed
from the layers that trained, not by the code that writes merges: it would share its mistakes.

Shapes: I inputs and O outputs of a projection, R rank.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from mens_exp.artifacts import atomic
from mens_exp.backends.adapting import ADAPTER
from mens_exp.backends.frozen_base import load_base
from mens_exp.backends.tracing import trace
from mens_exp.config.quant import ComputeDtype, QuantConfig, QuantType
from mens_exp.export.gguf_export import FILE as GGUF
from mens_exp.layout.names import HEAD
from mens_exp.model.quiet import quiet
from mens_exp.quant.bnb import dequantized, quantized_linears

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from mens_exp.backends.proxy import ProxyBackend
    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.config.root import RunConfig
    from mens_exp.export.parity import Forward
    from mens_exp.layout.experts import Stack
    from mens_exp.model.resolve import BaseModel

__all__ = [
    "from_directory",
    "from_gguf",
    "from_peft",
    "merged",
    "merged_stack",
    "quantized_from",
    "with_tensors",
]


@contextmanager
def merged(
    backend: QloraBackend, config: RunConfig, base: BaseModel, *, into: str
) -> Iterator[Forward]:
    """Make the dense f32 model of a base and the trained deltas.

    Args:
        backend: the trained graph, its adapter loaded.
        config: the run's.
        base: the model it was trained on.
        into: ``dequantized``, what 4-bit weights stand for, or ``original``, the published ones.
    """
    device = next(backend.model.parameters()).device
    model = _dense(config, base, device)
    with torch.no_grad():
        if into == "dequantized":
            for path, module in quantized_linears(backend.causal_lm).items():
                _put(model, path.removesuffix(".base_layer"), dequantized(module.weight))
        # What a start took out of the base is, on the published one, part of the delta.
        with nullcontext() if into == "dequantized" else backend.as_peft_view():
            for one in (one for one in backend.modules_chosen if one.stack is None):
                _add(model, one.path, backend.layers[one.logical], is_head=one.logical == HEAD)
            for stack in backend.stacks:
                _add_to_experts(model, stack, backend.layers[stack.logical])
    yield functools.partial(trace, model)


@contextmanager
def with_tensors(
    config: RunConfig, base: BaseModel, file: Path, names: Mapping[str, str], *, tied: bool = False
) -> Iterator[Forward]:
    """Make the dense f32 model of a published base with some of its weights replaced.

    Args:
        config: of the run.
        base: the published model.
        file: of the weights that take the place of its own, each stored as the base stores it.
        names: name in the file by module path.
        tied: whether a head among them stays the input embedding.
    """
    model = _dense(config, base, torch.device("cpu"))
    with torch.no_grad(), safe_open(file, framework="pt") as stored:
        for path, name in names.items():
            if path == HEAD and not tied:
                _untie(model)
            model.get_submodule(path).weight.copy_(stored.get_tensor(name))
    yield functools.partial(trace, model)


@contextmanager
def from_peft(directory: Path, config: RunConfig, base: BaseModel) -> Iterator[Forward]:
    """Load a PEFT directory on a run's base, quantized as the run has it.

    Args:
        directory: adapter_config.json and its tensors.
        config: of the run.
        base: the published model.
    """
    from peft import PeftModel

    model = load_base(config, base, torch.device("cpu"))
    with quiet():
        adapted = PeftModel.from_pretrained(model, str(directory))
    yield functools.partial(trace, adapted.get_base_model())


def _dense(config: RunConfig, base: BaseModel, device: torch.device) -> Any:
    """Load a base unquantized, in f32."""
    plain = dataclasses.replace(config)
    plain.quant = QuantConfig(
        quant_type=QuantType.none, double_quant=False, compute_dtype=ComputeDtype.f32
    )
    return load_base(plain, base, device, dtype=torch.float32)


def _untie(model: Any) -> None:
    """Give the head a weight of its own, or the embedding would change with it."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _add(model: Any, path: str, layer: Any, *, is_head: bool) -> None:
    """Add one layer's trained delta to the dense model."""
    if is_head:
        _untie(model)
    A_RI, B_OR = layer.lora_A[ADAPTER].weight.float(), layer.lora_B[ADAPTER].weight.float()
    delta_OI = layer.scaling[ADAPTER] * (B_OR.double() @ A_RI.double())
    weight_OI = _get(model, path).double() + delta_OI
    if ADAPTER in layer.lora_magnitude_vector:  # arXiv:2402.09353, equation 5
        magnitude_O = layer.lora_magnitude_vector[ADAPTER].weight.double().flatten()
        weight_OI = weight_OI * (magnitude_O / weight_OI.norm(dim=1))[:, None]
    _put(model, path, weight_OI.float())


def _add_to_experts(model: Any, stack: Stack, layer: Any) -> None:
    """Add the trained deltas of a layer's experts, each of which has every E-th column of B."""
    weight_EOI = model.get_parameter(stack.path)
    A, B = layer.lora_A[ADAPTER].weight.double(), layer.lora_B[ADAPTER].weight.double()
    many, r = stack.experts, len(A) // stack.experts
    for one in range(many):
        delta_OI = layer.scaling[ADAPTER] * (B[:, one::many] @ A[one * r : (one + 1) * r])
        weight_EOI[one] = (weight_EOI[one].double() + delta_OI).float()


def _is_transposed(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _get(model: Any, path: str) -> torch.Tensor:
    module = model.get_submodule(path)
    weight: torch.Tensor = module.weight
    return weight.T if _is_transposed(module) else weight


def _put(model: Any, path: str, weight_OI: torch.Tensor) -> None:
    module = model.get_submodule(path)
    module.weight.copy_(weight_OI.T if _is_transposed(module) else weight_OI)


@contextmanager
def from_directory(directory: Path, *, memory_bytes: int | None = None) -> Iterator[Forward]:
    """Open a complete model directory as anybody would, its stored weights computed in f32.

    Args:
        directory: config.json and safetensors.
        memory_bytes: where the weights are larger, they stay on disk and are read layer by layer;
            in another format than they compute in, from a copy beside the directory.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"device_map": {"": "cpu"}}
    if memory_bytes is not None:
        options = {"device_map": "auto", "max_memory": {"cpu": memory_bytes}}
    with atomic.scratch(directory.parent) as scratch:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.float32,
                use_safetensors=True,
                offload_folder=str(scratch),
                **options,
            )
        yield functools.partial(trace, model, device=torch.device("cpu"))


@contextmanager
def from_gguf(directory: Path) -> Iterator[Forward]:
    """Read the GGUF file of an export by transformers, its weights computed in f32."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=GGUF, dtype=torch.float32, device_map={"": "cpu"}
        )
    yield functools.partial(trace, model)


@contextmanager
def quantized_from(directory: Path, config: RunConfig, base: BaseModel) -> Iterator[Forward]:
    """Open a complete model directory quantized as the base of a run was.

    Args:
        directory: a merged model.
        config: the run's; its quantizer is used again.
        base: the run's own base, for what is not in the files.
    """
    there = dataclasses.replace(base, directory=directory, source="directory")
    device = torch.device("cpu")
    yield functools.partial(trace, load_base(config, there, device))


@contextmanager
def merged_stack(
    backend: ProxyBackend, weights_OI: Mapping[str, torch.Tensor], *, tied: bool = False
) -> Iterator[Forward]:
    """Make the proxy stack of merged projections, without adapters, in f32.

    Args:
        backend: the trained stack; as it was after the block.
        weights_OI: of each projection, by logical name.
        tied: whether the head's weight is the input embedding too.
    """
    parts, table_VD = backend.projections, backend.embedding_VD
    trained = {name: part.weight_OI for name, part in parts.items()}
    for name, part in parts.items():
        part.weight_OI = weights_OI[name].to(backend.device).float()
    if tied:
        backend.embedding_VD = weights_OI[HEAD].float()
    try:
        with backend.base_only():
            yield backend.trace
    finally:
        backend.embedding_VD = table_VD
        for name, part in parts.items():
            part.weight_OI = trained[name]
