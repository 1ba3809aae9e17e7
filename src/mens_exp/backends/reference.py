"""An independent reference model in plain transformers, to verify ours before training.

The reference is a separate module tree of the model's own class. It shares only the weights and the
tables that transformers' loader built (positions, rotary frequencies). It uses transformers' eager
attention, processes each document alone, takes the loss from ``forward(labels=...)``, and
implements the adapter from its definition. Both sides compute in f32 over the same quantized
weights, because bf16 rounding hides errors of a few per cent.

Shapes: T tokens, I inputs and O outputs of a projection, R rank.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from mens_exp.backends.forward import MODEL_CODE_ERRORS
from mens_exp.backends.frozen_base import published_config
from mens_exp.backends.lora import ADAPTER, PEFT_LORA
from mens_exp.errors import ModelFileError
from mens_exp.layout.norms import VALUES
from mens_exp.lora.norms import TunedNorm
from mens_exp.lora.prompt_tuning import PromptEmbedding
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy
from mens_exp.quant.layers import quantized_linears, values_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.data.batch import Batch
    from mens_exp.layout.peft_format import Stack
    from mens_exp.lora.method import AdapterMethod
    from mens_exp.rows.documents import Encoded

_CHUNK = 48  # tokens; gives several chunks of a head, the last one shorter
_FILLED = 0.02  # standard deviation of a filled B, as is usual for weights
_IGNORED = -100  # transformers' label of a token that is not learned


@dataclass(frozen=True, slots=True)
class Agreement:
    """Relative differences between our model and the reference.

    Attributes:
        loss: difference of the summed cross entropy.
        gradient: difference of the gradients of all trained parameters, as one vector.
        parameters: number of parameters compared.
    """

    loss: float
    gradient: float
    parameters: int


def agreement(backend: QloraBackend, batch: Batch, documents: Encoded) -> Agreement:
    """Compare a batch's loss and gradient with those of plain transformers.

    The model is left unchanged. Adapter dropout must be off.

    Args:
        backend: the model to be trained, on one device and not sharded.
        batch: the documents as training passes them.
        documents: the same documents, one by one.

    Raises:
        ModelFileError: the model's code does not run with shared weights.
    """
    device = next(backend.parameters()).device
    with ExitStack() as stack:
        stack.enter_context(in_f32(backend))
        stack.enter_context(_filled(backend))
        stack.enter_context(_without_hooks(backend))
        stack.enter_context(torch.enable_grad())
        names = list(backend.trainable())
        ours, our_gradients = _ours(backend, batch.to(device))
        try:
            reference, leaves = _reference(backend)
            parameters = [leaves[name] for name in names]
            prompt_KD = parameters[0] if backend.virtual_ids else None
            theirs, their_gradients = _theirs(reference, parameters, prompt_KD, documents, device)
        except MODEL_CODE_ERRORS as error:
            raise ModelFileError(
                "the model's own forward pass cannot be compared",
                where=type(backend.causal_lm).__name__,
                found=f"{type(error).__name__}: {error}",
                remedy="set data.contract.probe=false, which trains without the comparison",
            ) from error
    difference = torch.stack(
        [(a - b).norm() for a, b in zip(our_gradients, their_gradients, strict=True)]
    ).norm()
    length = torch.stack([one.norm() for one in their_gradients]).norm()
    return Agreement(
        loss=abs(ours - theirs) / max(abs(theirs), 1e-12),
        gradient=float(difference / length.clamp_min(1e-12)),
        parameters=sum(one.numel() for one in their_gradients),
    )


def f32_bytes(backend: QloraBackend) -> int:
    """Return the size in bytes of f32 copies of a model's unquantized weights."""
    return sum(4 * tensor.numel() for _, _, tensor in _to_cast(backend))


def _ours(backend: QloraBackend, batch: Batch) -> tuple[float, list[torch.Tensor]]:
    backend.begin(0)
    loss = CrossEntropy("reference", _CHUNK)(backend(batch), batch.targets_M, backend.head)
    parameters = list(backend.trainable().values())
    return float(loss.total.detach()), _gradients(loss.total, parameters)


def _gradients(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]


def _theirs(
    reference: Any,
    parameters: Sequence[torch.Tensor],
    prompt_KD: torch.Tensor | None,
    documents: Encoded,
    device: torch.device,
) -> tuple[float, list[torch.Tensor]]:
    loss, sums = 0.0, [torch.zeros_like(parameter) for parameter in parameters]
    for start, end in pairwise(documents.offsets.tolist()):
        ids_T = torch.from_numpy(documents.ids[start:end]).long().to(device)
        learned_T = torch.from_numpy(documents.supervised[start:end]).to(device)
        labels_T = ids_T.masked_fill(~learned_T, _IGNORED)
        inputs = {"input_ids": ids_T[None]}
        if prompt_KD is not None:  # prompt tuning (arXiv:2104.08691, section 2)
            embedded_TD = reference.get_input_embeddings()(ids_T)
            inputs = {"inputs_embeds": torch.cat([prompt_KD, embedded_TD])[None]}
            labels_T = torch.nn.functional.pad(labels_T, (len(prompt_KD), 0), value=_IGNORED)
        mean = reference(**inputs, labels=labels_T[None], use_cache=False).loss
        total = mean * int(learned_T[1:].sum())  # the first token is not predicted
        loss += float(total.detach())
        for so_far, gradient in zip(sums, _gradients(total, parameters), strict=True):
            so_far.add_(gradient)
    return loss, sums


# ------------------------------------------------------------------ both sides in f32


def _to_cast(backend: QloraBackend) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield the location of every parameter and buffer that is neither quantized nor f32."""
    quantized = set(map(id, quantized_linears(backend.model).values()))
    seen: set[int] = set()
    for module in backend.model.modules():
        for held in (module._parameters, module._buffers):  # noqa: SLF001  # own tensors only
            for name, tensor in held.items():
                codes = id(module) in quantized and name == "weight"
                if tensor is None or codes or id(tensor) in seen:
                    continue
                if tensor.is_floating_point() and tensor.dtype != torch.float32:
                    seen.add(id(tensor))
                    yield module, name, tensor


@contextmanager
def in_f32(backend: QloraBackend) -> Iterator[None]:
    """Compute in f32 inside the block, with unchanged weight values."""
    kept = [(tensor, tensor.data) for _, _, tensor in _to_cast(backend)]
    linears = quantized_linears(backend.model).values()
    modules = [module for module in linears if hasattr(module.weight, "quant_state")]
    formats = [(module.compute_dtype, module.weight.quant_state.dtype) for module in modules]
    own, precision = backend.compute_dtype, torch.get_float32_matmul_precision()
    try:
        for tensor, values in kept:
            tensor.data = values.float()
        for module in modules:
            # bitsandbytes dequantizes to the input's dtype in the forward pass, and to the dtype of
            # the quantization state in the backward pass.
            module.compute_dtype = module.weight.quant_state.dtype = torch.float32
        backend.compute_dtype = torch.float32
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        backend.compute_dtype = own
        for module, dtypes in zip(modules, formats, strict=True):
            module.compute_dtype, module.weight.quant_state.dtype = dtypes
        for tensor, values in kept:
            tensor.data = values


@contextmanager
def _filled(backend: QloraBackend) -> Iterator[None]:
    """Fill the adapter inside the block with values that exercise every part of it."""
    generator = torch.Generator().manual_seed(0)
    kept = []
    for module in backend.layers.values():
        for which, parameter in backend.method.parameters(module).items():
            kept.append((parameter, parameter.detach().clone()))
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
            with torch.no_grad():
                if which == "lora_magnitude":
                    parameter.mul_(1 + _FILLED * drawn)
                else:
                    parameter.add_(_FILLED * drawn)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in kept:
                parameter.copy_(values)


@contextmanager
def _without_hooks(backend: QloraBackend) -> Iterator[None]:
    """Disable gradient hooks inside the block; a backend may freeze parameters with them."""
    kept = [(one, one._backward_hooks) for one in backend.trainable().values()]  # noqa: SLF001
    try:
        for parameter, _ in kept:
            parameter._backward_hooks = None  # noqa: SLF001  # torch cannot remove all at once
        yield
    finally:
        for parameter, hooks in kept:
            parameter._backward_hooks = hooks  # noqa: SLF001


# ------------------------------------------------------------------ the reference


def _reference(backend: QloraBackend) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a plain transformers model on our weights, and its trained tensors by logical name."""
    from accelerate import init_empty_weights

    ours = backend.causal_lm
    config = published_config(backend.base)
    config.output_router_logits = False
    with quiet(), init_empty_weights(include_buffers=False):
        model = type(ours)._from_config(  # noqa: SLF001  # what AutoModel's from_config calls
            config, attn_implementation="eager", dtype=torch.float32
        )
    model.eval()
    experts = _experts_of(backend)
    adapted = {id(module): name for name, module in backend.layers.items()}
    quantized = set(map(id, quantized_linears(ours).values()))
    leaves: dict[str, torch.Tensor] = {}
    for path, module in list(model.named_modules()):
        other = _same_place(ours, path, experts)
        if isinstance(other, TunedNorm):
            leaves |= _tuned(module, other, adapted)
            continue
        logical = adapted.get(id(other))
        base = other.get_base_layer() if logical is not None else other
        made = module
        if id(base) in quantized:
            made = _Dequantized(base)
        else:
            _share(module, base)
        if path in experts:
            made = _AdaptedExperts(module, experts[path])
            leaves |= made.leaves
        elif isinstance(other, PromptEmbedding):
            own = other.prompt_embeddings.detach().clone().requires_grad_()
            leaves[f"{logical}.prompt_embeddings"] = own
        elif logical is not None:
            made = _adapted(made, other, backend.method)
            leaves |= {f"{logical}.{which}": one for which, one in made.leaves.items()}
        if made is not module:
            model.set_submodule(path, made)
    return model, backend.trainable() | leaves  # trained base weights are shared unchanged


def _experts_of(backend: QloraBackend) -> dict[str, list[tuple[Stack, Any]]]:
    """Return the adapted expert stacks, each with its PEFT layer, by module path."""
    found: dict[str, list[tuple[Stack, Any]]] = {}
    for stack in backend.stacks:
        found.setdefault(stack.module, []).append((stack, backend.layers[stack.logical]))
    return found


def _same_place(ours: Any, path: str, experts: Collection[str]) -> Any:
    """Return the module of our model at a path, looking inside PEFT's wrappers around experts."""
    for holder in experts:
        if path.startswith(f"{holder}."):
            inside = ours.get_submodule(holder).get_base_layer()
            return inside.get_submodule(path.removeprefix(f"{holder}."))
    return ours.get_submodule(path)


def _share(module: torch.nn.Module, base: Any) -> None:
    """Make a module share the tensors of another: parameters and position tables."""
    held = vars(module)
    for own, theirs in (
        (module._parameters, base._parameters),  # noqa: SLF001  # set without a check of shapes
        (module._buffers, base._buffers),  # noqa: SLF001
        (held, vars(base)),
    ):
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor) and theirs.get(name) is not None:
                own[name] = theirs[name]


def _tuned(
    norm: torch.nn.Module, ours: TunedNorm, adapted: Mapping[int, str]
) -> dict[str, torch.Tensor]:
    """Give a norm its tuned values as parameters, and return them by logical name."""
    _share(norm, ours.base_layer)
    found: dict[str, torch.Tensor] = {}
    for vector, tuned in ours.tuned.items():
        values = torch.nn.Parameter(tuned.ln_tuning.detach().clone())
        norm.register_parameter(vector, values)
        found[f"{adapted[id(tuned)]}.{VALUES}"] = values
    return found


class _Dequantized(torch.nn.Module):
    """A linear layer that dequantizes its weight in every pass."""

    layer: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule of this tree

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight, ``[O, I]``."""
        codes = self.layer.weight
        if codes.dtype == torch.int8:
            values: torch.Tensor = codes.data.float() * (codes.SCB.float() / 127)[:, None]
            return values
        if not hasattr(codes, "quant_state"):  # only its own binding can dequantize it
            return values_of(self.layer)
        from bitsandbytes.functional import dequantize_4bit

        stands_for: torch.Tensor = dequantize_4bit(codes.data, codes.quant_state)
        return stands_for.float()

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's bias, ``[O]``."""
        found: torch.Tensor | None = self.layer.bias
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer; the dequantized weight is not saved for the backward pass."""
        quantizes_inputs = self.layer.weight.dtype == torch.int8 and x.device.type != "cpu"
        passed = self.layer if quantizes_inputs else self._linear
        result: torch.Tensor = checkpoint(passed, x, use_reentrant=False)
        return result

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class _AdaptedExperts(torch.nn.Module):
    """The experts of a layer, with a separate ``s·B A`` added to each expert's weight."""

    def __init__(self, experts: torch.nn.Module, adapted: Sequence[tuple[Stack, Any]]) -> None:
        super().__init__()
        self.experts = experts
        self.adapted = [(one, one.path.rpartition(".")[2], _scale(layer)) for one, layer in adapted]
        self.leaves = {
            f"{one.logical}.{which}": matrix.detach().clone().requires_grad_()
            for one, layer in adapted
            for which, matrix in PEFT_LORA.parameters(layer).items()
        }

    def forward(self, *args: Any) -> torch.Tensor:
        """Run with the summed weights, which are not saved for the backward pass."""
        result: torch.Tensor = checkpoint(self._computed, *args, use_reentrant=False)
        return result

    def _computed(self, *args: Any) -> Any:
        sums = {name: self._sum(one, name, scale) for one, name, scale in self.adapted}
        return torch.func.functional_call(self.experts, sums, args)

    def _sum(self, stack: Stack, name: str, scale: float) -> torch.Tensor:
        A, B = (self.leaves[f"{stack.logical}.lora_{which}"] for which in "ab")
        many, r = stack.experts, len(A) // stack.experts
        weight: torch.Tensor = getattr(self.experts, name)
        return torch.stack(
            [
                weight[one] + scale * B[:, one::many] @ A[one * r : (one + 1) * r]
                for one in range(many)
            ]
        )


def _scale(layer: Any) -> float:
    """Return the scaling factor of ``B A`` as defined by LoRA and rsLoRA."""
    rank, alpha = int(layer.r[ADAPTER]), float(layer.lora_alpha[ADAPTER])
    return alpha / (math.sqrt(rank) if layer.use_rslora[ADAPTER] else rank)


def _adapted(base: torch.nn.Module, layer: Any, method: AdapterMethod) -> Any:
    """Return the reference of an adapted layer."""
    return _Adapted(base, layer) if method is PEFT_LORA else _Merged(base, layer, method)


class _Merged(torch.nn.Module):
    """A layer that multiplies by its weight with the adapter merged in.

    It is the reference for every method but LoRA: a layer must compute what its merge does.
    """

    base: Any

    def __init__(self, base: torch.nn.Module, layer: Any, method: AdapterMethod) -> None:
        super().__init__()
        self.base, self.method, self.scale = base, method, method.scale(layer)
        self.leaves = {
            which: one.detach().clone().requires_grad_()
            for which, one in method.parameters(layer).items()
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with the merged weight."""
        transposed = not isinstance(self.base, torch.nn.Linear | _Dequantized)  # as Conv1D is
        weight_OI = self.base.weight.T if transposed else self.base.weight
        merged_OI = self.method.weight(weight_OI, self.leaves, scale=self.scale)
        return torch.nn.functional.linear(x, merged_OI, self.base.bias)


class _Adapted(torch.nn.Module):
    """A layer with LoRA (arXiv:2106.09685, section 4.1) or DoRA (arXiv:2402.09353, section 4)."""

    base: Any

    def __init__(self, base: torch.nn.Module, layer: Any) -> None:
        super().__init__()
        self.base = base
        self.leaves = {
            which: one.detach().clone().requires_grad_()
            for which, one in PEFT_LORA.parameters(layer).items()
        }
        self.scale = _scale(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add ``s·B A x``; for DoRA, rescale each row of the summed weight to its magnitude."""
        linear = torch.nn.functional.linear
        A_RI, B_OR = self.leaves["lora_a"], self.leaves["lora_b"]
        plain: torch.Tensor = self.base(x)
        added = linear(linear(x, A_RI), B_OR) * self.scale
        if "lora_magnitude" not in self.leaves:
            return plain + added
        transposed = not isinstance(self.base, torch.nn.Linear | _Dequantized)  # as Conv1D is
        weight_OI = self.base.weight.T if transposed else self.base.weight
        length_O = (weight_OI + self.scale * B_OR @ A_RI).detach().norm(dim=1)  # section 4.3
        bias = 0.0 if self.base.bias is None else self.base.bias
        turned: torch.Tensor = (plain - bias + added) * (self.leaves["lora_magnitude"] / length_O)
        return turned + bias
