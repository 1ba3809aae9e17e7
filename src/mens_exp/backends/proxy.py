"""The proxy projection stack, v1: a cheap model of the next token given only the last one.

It has no attention and no positions. A frozen embedding row passes through the 4-bit attention
output projections of all decoder layers, each with a LoRA adapter, and through the tied 4-bit head.
It measures what projections can learn, not what a transformer can learn.

Shapes: M supervised positions, I inputs and O outputs of a projection, R rank, D hidden width,
V vocabulary, n middle projections.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from mens_exp.artifacts.adapter_v3 import AdapterManifest
from mens_exp.backends.frozen_base import frozen_weights
from mens_exp.backends.generation import Answers, Trace, evaluating
from mens_exp.backends.protocol import NonPeftBackend
from mens_exp.backends.saved_model import provenance_of
from mens_exp.config.backend import Composition, ProxyConfig
from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import ConfigError, SetupError
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.shape import HEAD, base_key, shape_of, stack_of
from mens_exp.lora.keyed import HeadDropout, KeyedDropout, initialise
from mens_exp.model.stored_weights import StoredWeights, mapped
from mens_exp.quant.binding import compute_dtype
from mens_exp.quant.layers import quantizer_named
from mens_exp.quant.round_trip import round_trip

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.model.sources import BaseModel

_LISTED = 8


def load_into(
    parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, np.ndarray]
) -> None:
    """Copy tensors into the parameters of the same names.

    Raises:
        ConfigError: names or shapes differ; nothing is copied. A plain copy would silently
            broadcast a matrix of rank 1 to any rank.
    """
    theirs = {(name, tuple(values.shape)) for name, values in tensors.items()}
    ours = {(name, tuple(values.shape)) for name, values in parameters.items()}
    if theirs != ours:
        odd = [f"{name} {list(shape)}" for name, shape in sorted(theirs ^ ours)]
        raise ConfigError(
            "the adapter's matrices do not match the graph",
            where="adapter",
            found=", ".join(odd[:_LISTED]),
            expected="the layers and the rank of the run's own configuration",
        )
    with torch.no_grad():
        for name, values in tensors.items():
            parameters[name].copy_(torch.from_numpy(values))


class Projection(torch.nn.Module):
    """``W x + (alpha / r) · B A x``; W is quantized once and kept dequantized in the compute dtype.

    Dequantizing 4-bit codes costs more than the matmuls of a step: measured on SmolLM2's head, 0.18
    s against 0.07 s for 64 positions in bf16, on the same two busy cores. The dequantized values
    are the same either way; a step reads the copy.
    """

    weight_OI: torch.Tensor

    def __init__(
        self, weight_OI: torch.Tensor, config: RunConfig, *, name: str, draws_as: str
    ) -> None:
        """Quantize a weight and add a fresh adapter.

        Args:
            weight_OI: the weight, f32, on its device.
            config: the whole configuration.
            name: the adapter's name for the weight; seeds dropout.
            draws_as: the full model's name for the same weight; seeds A, so that arms of other
                backends start from the same matrix.
        """
        super().__init__()
        lora, (outputs, inputs) = config.lora, weight_OI.shape
        made = round_trip(weight_OI, config.quant)
        self.stored_bytes = made.stored_bytes
        dtype = compute_dtype(config.quant)
        self.register_buffer("weight_OI", made.values.to(dtype), persistent=False)
        device = weight_OI.device
        self.lora_a = torch.nn.Parameter(torch.empty(lora.r, inputs, device=device))
        self.lora_b = torch.nn.Parameter(torch.empty(outputs, lora.r, device=device))
        initialise(self.lora_a, self.lora_b, seed=config.seed, layer=draws_as)
        self.scale = lora.alpha / lora.r
        kind = HeadDropout if name == "lm_head" else KeyedDropout
        self.dropout = kind(lora.dropout, seed=config.seed, layer=f"proxy.{name}")
        self.adapts = True

    def forward(self, x_MI: torch.Tensor) -> torch.Tensor:
        """Return the projection, ``[M, O]``; f32 unless autocast is on."""
        weight_OI = self.weight_OI
        if weight_OI.dtype == torch.float32 or torch.is_autocast_enabled(x_MI.device.type):
            y_MO = functional.linear(x_MI, weight_OI)
        else:
            y_MO = functional.linear(x_MI.to(weight_OI.dtype), weight_OI).float()
        if not self.adapts:
            return y_MO
        # Scale while the tensor is R wide, and add inside the matmul: extra passes over [M,
        # vocabulary] would cost the head more than its matmuls.
        low_MR = functional.linear(self.dropout(x_MI), self.lora_a) * self.scale
        return torch.addmm(y_MO, low_MR, self.lora_b.T)


_NORM_EPS = 1e-5  # as in the seeds


class ProxyBackend(NonPeftBackend, torch.nn.Module):
    """Embedding rows through the projection stack; LoRA on every projection."""

    def __init__(self, config: RunConfig, base: BaseModel, device: torch.device) -> None:
        """Memory-map the embedding, quantize the stack, and add a fresh adapter.

        Raises:
            ModelFileError: the checkpoint lacks a tensor that the stack needs, or one is not
                square.
        """
        super().__init__()
        assert isinstance(config.backend, ProxyConfig), "Hydra pairs class and schema"
        self.base, self.device = base, device
        self.quant = config.quant
        self.shape = shape_of(config.model)
        keys = read_directory(base.directory).tensors
        self.stack = stack_of(self.shape, config.backend, keys)
        family = self.shape.family
        table = f"{family.embedding}"
        self.keys = {
            **{f"mid{i}": base_key(path, family, keys) for i, path in enumerate(self.stack.middle)},
            HEAD: base_key(table, family, keys),
        }
        # Not a buffer, so that neither `.to()` nor a checkpoint reads all of it.
        self.embedding_VD = mapped(base.directory, self.keys[HEAD])
        weights = StoredWeights(base.directory, family)
        (attention_output,) = family.groups["o_proj"]
        self.middle = torch.nn.ModuleList(
            Projection(
                weights.read(path, device),
                config,
                name=f"mid{i}",
                draws_as=f"l{i}.{attention_output}",
            )
            for i, path in enumerate(self.stack.middle)
        )
        table_VD = self.embedding_VD.to(device).float()
        self.lm_head = Projection(table_VD, config, name=HEAD, draws_as=HEAD)
        self.compute_dtype = compute_dtype(config.quant)
        self.k = config.objective.spec.last_tokens(config.objective)

    @property
    def projections(self) -> dict[str, Projection]:
        """All projections by logical name, first to last."""
        parts = [*self.middle, self.lm_head]
        return dict(zip(self.stack.layers, parts, strict=True))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return hidden states at the supervised positions, ``[M, D]`` in f32."""
        return self.hidden(batch.input_ids_BT.flatten().index_select(0, batch.predict_M))

    def hidden(self, last_M: torch.Tensor) -> torch.Tensor:
        """Return the hidden state for each last token, ``[M, D]`` in f32."""
        *_, (_, h_MD) = self._states(last_M)
        return h_MD

    def _states(self, last_M: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the states after each layer, ``[M, D]`` in f32; the last is the head's input."""
        rows = self.embedding_VD.index_select(0, last_M.to("cpu"))
        h_MD = rows.to(last_M.device).float()
        yield "embedding", h_MD
        for i, projection in enumerate(self.middle):
            with self._compute():
                h_MD = self._step(h_MD, projection)
            yield f"mid{i}", h_MD
        if self.stack.composition is Composition.residual and len(self.middle):
            h_MD = h_MD / math.sqrt(len(self.middle))
        yield "head's input", h_MD

    def _step(self, h_MD: torch.Tensor, projection: torch.nn.Module) -> torch.Tensor:
        kind = self.stack.composition
        if kind is Composition.sequential:
            out_MD: torch.Tensor = projection(h_MD).float()
        elif kind is Composition.residual_plain:
            out_MD = h_MD + projection(h_MD).float()
        else:
            out_MD = h_MD + projection(_normalized(h_MD)).float() / math.sqrt(len(self.middle))
        return out_MD

    def head(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return logits ``[M, V]`` of the tied head."""
        with self._compute():
            logits: torch.Tensor = self.lm_head(hidden_MD)
        return logits

    def begin(self, micro_batch: int) -> None:
        """Position every dropout stream at a micro-batch."""
        for projection in self.projections.values():
            projection.dropout.begin(micro_batch)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the adapter's parameters, f32, by logical name."""
        return {
            f"{logical}.{which}": getattr(projection, which)
            for logical, projection in self.projections.items()
            for which in ("lora_a", "lora_b")
        }

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Disable the adapter inside the block."""
        parts = list(self.projections.values())
        for projection in parts:
            projection.adapts = False
        try:
            yield
        finally:
            for projection in parts:
                projection.adapts = True

    def generate(
        self, prompts: Sequence[list[int]], *, batch_size: int | None = None, **options: Any
    ) -> list[list[int]]:
        """Continue prompts; each token depends only on the one before it. See `greedy`."""
        del batch_size  # there is no cache whose size it would limit
        answers = Answers(count=len(prompts), **options)
        rows = list(range(len(prompts)))
        answers.begin(rows)
        with torch.inference_mode(), evaluating(self):
            while rows:
                last = [(answers.made[row] or prompts[row])[-1] for row in rows]
                logits_BV = self.head(self.hidden(torch.tensor(last, device=self.device)))
                rows = answers.take(rows, logits_BV)
        return answers.made

    def next_logits(self, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the logits of the next token, ``[V]``, f32; no cache is needed."""
        del cache
        last = torch.tensor([ids[-1]], device=self.device)
        with torch.inference_mode(), evaluating(self):
            return self.head(self.hidden(last))[0].float(), None

    def trace(self, ids: Sequence[int]) -> Trace:
        """Return the hidden states after each layer, and the logits, of one document."""
        ids_M = torch.tensor(list(ids), device=self.device)
        with torch.inference_mode(), evaluating(self):
            hidden = dict(self._states(ids_M))
            logits_TV = self.head(hidden["head's input"]).float()
        return Trace(hidden=hidden, logits_TV=logits_TV)

    def adapter(self, config: RunConfig) -> tuple[AdapterManifest, dict[str, np.ndarray]]:
        """Return the adapter's manifest and its f32 tensors under logical names."""
        tensors = {
            name: parameter.detach().to("cpu", torch.float32, copy=True).numpy()
            for name, parameter in self.trainable().items()
        }
        manifest = AdapterManifest(
            adapter_method="qlora",
            quant={
                "base_quant": self.quant.quant_type.value,
                "double_quant": self.quant.double_quant,
            },
            base_key_map=self.keys,
            layer_order=self.stack.layers,
            vocab=self.shape.vocab_size,
            d_model=self.shape.hidden_size,
            rank=config.lora.r,
            alpha=config.lora.alpha,
            base_model=self.base.name,
            provenance=provenance_of(self.base, self.shape.family),
            mens_exp={
                "base_weights_sha256": self.base.weights_sha256,
                "candle_qlora_graph_id": self.stack.graph_id,
                "embed_key": self.keys[HEAD],
                # Each projection of the stack is quantized from f32 weights.
                "quantizer": quantizer_named(self.quant, rounded_to=ComputeDtype.f32, skip=[]),
            },
        )
        return manifest, tensors

    def load_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Copy an adapter's tensors into the model.

        Raises:
            ConfigError: the tensors do not belong to this model.
        """
        load_into(self.trainable(), tensors)

    @property
    def has_adapter(self) -> bool:
        """True: an adapter is trained."""
        return True

    def write_weights(self, directory: Path) -> None:
        """Refuse: the base is the published one, unchanged.

        Raises:
            SetupError: always; see ``has_adapter``.
        """
        raise frozen_weights(directory)

    def write_peft(self, directory: Path) -> None:
        """Refuse: PEFT cannot represent this model.

        Raises:
            SetupError: always; see ``has_peft_view``.
        """
        raise SetupError(
            "the proxy stack has no PEFT form",
            where=str(directory),
            found=self.stack.graph_id,
            expected="a causal graph",
            remedy="read adapter/adapter.safetensors, schema v3",
        )

    @property
    def max_positions(self) -> int:
        """Longest sequence that the base supports, in tokens; the stack itself uses only one."""
        return self.shape.max_position_embeddings

    def facts(self) -> dict[str, Any]:
        """Report what was built, under the seeds' names where they exist."""
        parts = self.projections.values()
        weights = sum(p.weight_OI.numel() for p in parts)
        stack = self.stack
        return {
            "trainable_parameters": sum(p.numel() for p in self.trainable().values()),
            "trainable_matrices": len(self.trainable()),
            "total_parameters": weights,
            "quantized_linears": len(parts),
            "quant": self.quant.quant_type.value,
            "double_quant": self.quant.double_quant,
            "block_size": self.quant.block,
            "bits_per_parameter": round(8 * sum(p.stored_bytes for p in parts) / weights, 4),
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "candle_qlora_graph_id": stack.graph_id,
            "trainable_projection_stack": stack.layers,
            "training_objective_note": self._note(),
            "candle_qlora_ce_last_k": self.k,
            "proxy_stack_complete": stack.complete,
            "middle_layers_active": len(stack.middle),
            "middle_keys_expected": stack.expected,
            "middle_keys_matched": stack.matched,
            **self.shape.facts(),
            "notes": stack.warnings,
        }

    def _note(self) -> str:
        return f"candle_qlora_proxy_v1_{'supervised' if self.k is None else f'k{self.k}'}"

    @contextmanager
    def _compute(self) -> Iterator[None]:
        """Train under bf16 autocast; evaluate with the adapter in f32, like ``backend=qlora``."""
        in_bf16 = torch.is_grad_enabled() and self.compute_dtype == torch.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=in_bf16):
            yield


def _normalized(h_MD: torch.Tensor) -> torch.Tensor:
    """RMS-normalize with gamma 1."""
    return h_MD * torch.rsqrt(h_MD.square().mean(-1, keepdim=True) + _NORM_EPS)
