"""Liger-Kernel (arXiv:2410.10989) for the head with its loss, RoPE, RMSNorm and SwiGLU.

Its kernels compute the same as the model's own code, but round differently. A module is patched if
its code is that of transformers' Llama. The head is patched if both versions give the same logits,
which leaves out models that scale them. Only the given model is patched, not its classes.

Shapes: M supervised positions, D hidden width, V vocabulary, H heads, T tokens, K head width.
"""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

import torch

from mens_exp.planning.kernels import Part, described

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PROBES = 8  # hidden states on which the heads are compared
_LOGIT = 30.0  # standard deviation of their logits, at which a cap shows: Gemma 2's is 30
_AGREES = 0.02  # relative; bf16 rounds to 0.004, and a scale or a missing cap differs by more


class FusedHead:
    """The head fused with the cross entropy; only a few rows of logits exist at a time."""

    def __init__(
        self, layer: torch.nn.Linear, *, softcap: float | None, dtype: torch.dtype
    ) -> None:
        """Use a frozen linear layer.

        Args:
            layer: the head.
            softcap: bound of the logits; None leaves them uncapped.
            dtype: dtype of products.
        """
        self.layer, self.softcap, self.dtype = layer, softcap, dtype

    def summed(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Return the sum that `mens_exp.objective.causal.summed_cross_entropy` defines."""
        return self._loss(hidden_MD, targets_M, "sum", label_smoothing, z_loss)

    def each(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Return the loss of each token, f32 ``[M]``; the backward pass recomputes logits."""
        return self._loss(hidden_MD, targets_M, "none", label_smoothing, z_loss)

    def _loss(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        reduction: str,
        label_smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        bias_V = self.layer.bias
        with torch.autocast(hidden_MD.device.type, enabled=False):
            loss: torch.Tensor = liger_fused_linear_cross_entropy(
                hidden_MD.to(self.dtype),
                self.layer.weight.to(self.dtype),
                targets_M,
                bias=None if bias_V is None else bias_V.to(self.dtype),
                lse_square_scale=z_loss,
                label_smoothing=label_smoothing,
                reduction=reduction,
                softcap=self.softcap,
            )
        return loss

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return the logits that the loss uses, ``[M, V]``, f32."""
        layer = self.layer
        bias_V = None if layer.bias is None else layer.bias.to(self.dtype)
        found_MV = torch.nn.functional.linear(
            hidden_MD.to(self.dtype), layer.weight.to(self.dtype), bias_V
        ).float()
        return found_MV if self.softcap is None else _capped(found_MV, self.softcap)


def _capped(logits_MV: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(logits_MV / softcap)


class LigerKernels:
    """Liger's kernels on a model: those that are requested and that fit the model's code.

    Attributes:
        head: the head with its loss; None if torch computes it.
    """

    def __init__(
        self,
        causal_lm: Any,
        logits: Callable[[torch.Tensor], torch.Tensor],
        reasons: Mapping[Part, str | None],
        *,
        dtype: torch.dtype,
        kind: str = "cuda",
    ) -> None:
        """Patch a model.

        Args:
            causal_lm: the model, with its adapters.
            logits: maps hidden states to logits by the model's own code.
            reasons: why torch computes each part; None requests the kernel.
            dtype: dtype of products.
            kind: device type on which the kernels run; on others, the model's own code runs.
        """
        self.head: FusedHead | None = None
        self._reasons = dict(reasons)
        for part, (put, otherwise) in _PUT.items():
            if self._reasons[part] is None:
                many = sum(put(module, kind) for module in causal_lm.modules())
                self._reasons[part] = None if many else otherwise
        if self._reasons[Part.HEAD] is None:
            found = _fused_head(causal_lm, logits, dtype)
            self._reasons[Part.HEAD] = found if isinstance(found, str) else None
            self.head = None if isinstance(found, str) else found

    def facts(self) -> dict[str, str]:
        """Return the library that computes each part, with the reason if it is torch."""
        return described(self._reasons)

    def numerics(self) -> dict[str, str]:
        """Name the parts that Liger computes and rounds; empty if there are none."""
        found = [str(part) for part, why in self._reasons.items() if why is None]
        return {"kernels": f"{', '.join(found)} by Liger 1"} if found else {}


@torch.no_grad()
def _fused_head(
    causal_lm: Any, logits: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> FusedHead | str:
    """Return the head, or why torch computes it."""
    layer = causal_lm.get_output_embeddings()
    if type(layer) is not torch.nn.Linear or not layer.weight.is_floating_point():
        return f"the head has the class {type(layer).__name__}"
    if layer.weight.requires_grad:
        return "the head is trained"
    softcap = getattr(causal_lm.config, "final_logit_softcapping", None)
    head = FusedHead(layer, softcap=softcap, dtype=dtype)
    plain = FusedHead(layer, softcap=None, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(_PROBES, layer.in_features, generator=generator).to(layer.weight)
    hidden_MD = hidden_MD * (_LOGIT / plain.logits(hidden_MD).std()).to(hidden_MD.dtype)
    expected_MV, found_MV = logits(hidden_MD).float(), head.logits(hidden_MD)
    if not (found_MV - expected_MV).norm() <= _AGREES * expected_MV.norm():
        return "the model's code changes its logits after the head"
    return head


def _put_rope(module: Any, kind: str) -> bool:
    """Replace the rotary embedding of an attention module; return whether it is Llama's."""
    forward = type(module).forward
    rotated = getattr(forward, "__globals__", {}).get(_ROTATION)
    if rotated is None or _ROTATION not in forward.__code__.co_names or "forward" in vars(module):
        return False
    half = getattr(rotated, "__globals__", {}).get("rotate_half")
    if not (_is_llamas(rotated, _ROTATION) and _is_llamas(half, "rotate_half")):
        return False
    module.forward = MethodType(_rotating(forward, rotated, kind), module)
    return True


_ROTATION = "apply_rotary_pos_emb"


@functools.cache  # for all layers of a model
def _rotating(
    forward: FunctionType, own: Callable[..., Any], kind: str
) -> Callable[..., torch.Tensor]:
    """Return a copy of an attention's forward that calls Liger's RoPE; the class is unchanged."""
    from liger_kernel.transformers.functional import liger_rope

    def rotated(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> Any:
        """Rotate ``[B, H, T, K]``."""
        rotate = liger_rope if query.device.type == kind else own
        return rotate(query, key, cos, sin)

    names = {**forward.__globals__, _ROTATION: rotated}
    made = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _put_norm(module: Any, kind: str) -> bool:
    """Replace the forward pass of a norm; return whether it is Llama's."""
    if not _is_llamas(type(module).forward, "LlamaRMSNorm"):
        return False
    from liger_kernel.transformers.functional import liger_rms_norm

    own = module.forward

    def forward(hidden: torch.Tensor) -> Any:
        weight = module.weight
        if hidden.device.type != kind or weight.dtype != hidden.dtype:
            return own(hidden)
        # Not in place: an output's gradient may be shared with another tensor.
        return liger_rms_norm(hidden, weight, module.variance_epsilon, in_place=False)

    module.forward = forward
    return True


def _put_mlp(module: Any, kind: str) -> bool:
    """Replace the forward pass of an MLP; return whether it is Llama's, with SiLU."""
    if not _is_llamas(type(module).forward, "LlamaMLP") or not _is_silu(module.act_fn):
        return False
    from liger_kernel.transformers.functional import liger_swiglu

    own = module.forward

    def forward(x: torch.Tensor) -> Any:
        if x.device.type != kind:
            return own(x)
        return module.down_proj(liger_swiglu(module.gate_proj(x), module.up_proj(x)))

    module.forward = forward
    return True


_PUT: Final = {
    Part.ROPE: (_put_rope, "the model's code is not Llama's"),
    Part.NORMS: (_put_norm, "the model's code is not Llama's"),
    Part.MLP: (_put_mlp, "the model's code is not Llama's, with SiLU"),
}


def _is_silu(activation: Any) -> bool:
    x = torch.linspace(-4.0, 4.0, 9)
    return bool(torch.equal(activation(x), torch.nn.functional.silu(x)))


def _is_llamas(function: Any, name: str) -> bool:
    """Return whether a function has the code of a Llama function, or of a Llama class's forward."""
    from transformers.models.llama import modeling_llama

    known = getattr(modeling_llama, name)
    return _code(function) == _code(getattr(known, "forward", known))


def _code(function: Any) -> tuple[Any, ...]:
    """Return a function's code to compare, without variable names and docstrings."""
    code = getattr(function, "__code__", None)
    if code is None:
        return (function,)
    constants = [one for one in code.co_consts if not isinstance(one, str)]
    return (code.co_code, code.co_names, constants, function.__defaults__)
