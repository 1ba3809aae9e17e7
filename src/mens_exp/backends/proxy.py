"""The proxy projection stack, v1: the next token from the last one alone, cheaply.

No attention, no position: a frozen embedding row goes through the 4-bit attention outputs of all
decoder layers, each with LoRA beside it, and through the tied 4-bit head. It measures what
projections can learn, not what a transformer can.

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
from mens_exp.backends.generation import Draw, StopWatch, Trace, evaluating
from mens_exp.backends.protocol import NonPeftBackend
from mens_exp.backends.saved_model import provenance_of
from mens_exp.config.backend import Composition, ProxyConfig
from mens_exp.config.objective import LastKObjective
from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import ConfigError, SetupError
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.shape import HEAD, base_key, shape_of, stack_of
from mens_exp.lora.keyed import HeadDropout, KeyedDropout, initialise
from mens_exp.model.stored_weights import StoredWeights, mapped
from mens_exp.quant.bnb import compute_dtype, quantizer_named
from mens_exp.quant.round_trip import round_trip

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from mens_exp.backends.generation import Sampling, Stops
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.model.sources import BaseModel

_LISTED = 8


def load_into(
    parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, np.ndarray]
) -> None:
    """Copy tensors into the parameters of the same names.

    Raises:
        ConfigError: names or shapes differ; nothing is copied. Copying would stretch a matrix of
            rank 1 to any rank, in silence.
    """
    theirs = {(name, tuple(values.shape)) for name, values in tensors.items()}
    ours = {(name, tuple(values.shape)) for name, values in parameters.items()}
    if theirs != ours:
        odd = [f"{name} {list(shape)}" for name, shape in sorted(theirs ^ ours)]
        raise ConfigError(
            "the adapter's matrices are not the graph's",
            where="adapter",
            found=", ".join(odd[:_LISTED]),
            expected="the layers and the rank of the run's own configuration",
        )
    with torch.no_grad():
        for name, values in tensors.items():
            parameters[name].copy_(torch.from_numpy(values))


class Projection(torch.nn.Module):
    """``W x + (alpha / r) · B A x``, W quantized once and kept in the compute format.

    Taking 4-bit codes back costs more than the products of a step: measured on SmolLM2's head,
    0.18 s against 0.07 s for 64 positions in bf16, on the same two busy cores. What the codes
    stand for is the same either way; the copy is what a step reads.
    """

    weight_OI: torch.Tensor

    def __init__(
        self, weight_OI: torch.Tensor, config: RunConfig, *, name: str, draws_as: str
    ) -> None:
        """Quantize a weight and put a fresh adapter beside it.

        Args:
            weight_OI: f32, on its device.
            config: the whole configuration.
            name: the adapter's name for it; keys dropout.
            draws_as: the full graph's name for the same weight; keys A, so that arms of other
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
        """Project, ``[M, O]``; f32 unless autocast is on."""
        weight_OI = self.weight_OI
        if weight_OI.dtype == torch.float32 or torch.is_autocast_enabled(x_MI.device.type):
            y_MO = functional.linear(x_MI, weight_OI)
        else:
            y_MO = functional.linear(x_MI.to(weight_OI.dtype), weight_OI).float()
        if not self.adapts:
            return y_MO
        # Scaled while it is R wide, and added inside the product: passes over [M, vocabulary]
        # would cost the head more than its products.
        low_MR = functional.linear(self.dropout(x_MI), self.lora_a) * self.scale
        return torch.addmm(y_MO, low_MR, self.lora_b.T)


_NORM_EPS = 1e-5  # the seeds'


class ProxyBackend(NonPeftBackend, torch.nn.Module):
    """Embedding rows through the projection stack; LoRA on every projection."""

    def __init__(self, config: RunConfig, base: BaseModel, device: torch.device) -> None:
        """Map the embedding, quantize the stack, and put a fresh adapter on it.

        Raises:
            ModelFileError: the checkpoint lacks what the stack needs, or it is not square.
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
        # No buffer, so that no `.to()` and no checkpoint reads the whole of it.
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
        self.k = config.objective.k if isinstance(config.objective, LastKObjective) else None

    @property
    def projections(self) -> dict[str, Projection]:
        """Every projection by logical name, first to last."""
        parts = [*self.middle, self.lm_head]
        return dict(zip(self.stack.layers, parts, strict=True))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return hidden states at the supervised positions, ``[M, D]`` in f32."""
        return self.hidden(batch.input_ids_BT.flatten().index_select(0, batch.predict_M))

    def hidden(self, last_M: torch.Tensor) -> torch.Tensor:
        """Return the hidden state that each last token leads to, ``[M, D]`` in f32."""
        *_, (_, h_MD) = self._states(last_M)
        return h_MD

    def _states(self, last_M: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the states after each layer, ``[M, D]`` in f32; the last is what the head reads."""
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
        """Move every dropout stream to a micro-batch."""
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
        """Switch the adapter off inside the block."""
        parts = list(self.projections.values())
        for projection in parts:
            projection.adapts = False
        try:
            yield
        finally:
            for projection in parts:
                projection.adapts = True

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        end_ids: set[int],
        pad_id: int,
        sampling: Sampling | None = None,
        stops: Stops | None = None,
    ) -> list[list[int]]:
        """Continue prompts: each token follows from the one before it alone; see `greedy`."""
        del pad_id  # nothing is padded: only last tokens are looked at
        made: list[list[int]] = [[] for _ in prompts]
        draw = Draw(sampling) if sampling is not None else None
        watch = StopWatch(stops) if stops is not None else None
        with torch.inference_mode(), evaluating(self):
            for _ in range(max_new_tokens):
                open_rows = [
                    i
                    for i, ids in enumerate(made)
                    if not (ids and ids[-1] in end_ids)
                    and not (watch is not None and watch.has_stopped(i, ids))
                ]
                if not open_rows:
                    break
                last = [(made[i] or prompts[i])[-1] for i in open_rows]
                logits = self.head(self.hidden(torch.tensor(last, device=self.device)))
                chosen = logits.argmax(-1) if draw is None else draw(logits, open_rows)
                for i, token in zip(open_rows, chosen.tolist(), strict=True):
                    made[i].append(token)
        return made

    def next_logits(self, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the logits of the token that follows, ``[V]``, f32; no cache is needed."""
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
                # It quantizes f32 weights, each projection of the stack.
                "quantizer": quantizer_named(self.quant, rounded_to=ComputeDtype.f32, skip=[]),
            },
        )
        return manifest, tensors

    def load_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Copy an adapter's tensors into the graph.

        Raises:
            ConfigError: the tensors are not those of this graph.
        """
        load_into(self.trainable(), tensors)

    @property
    def has_adapter(self) -> bool:
        """An adapter is what is trained."""
        return True

    def write_weights(self, directory: Path) -> None:
        """Refuse: the base is the published one.

        Raises:
            SetupError: always; see ``has_adapter``.
        """
        raise frozen_weights(directory)

    def write_peft(self, directory: Path) -> None:
        """Refuse: PEFT has no such graph.

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
        """Longest sequence the base was made for, in tokens; the stack itself sees one."""
        return self.shape.max_position_embeddings

    def facts(self) -> dict[str, Any]:
        """Read back what was built, under the seeds' names where they have one."""
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
        """Learn under bf16 autocast; measure with the adapter in f32, as ``backend=qlora`` does."""
        in_bf16 = torch.is_grad_enabled() and self.compute_dtype == torch.bfloat16
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=in_bf16):
            yield


def _normalized(h_MD: torch.Tensor) -> torch.Tensor:
    """RMS-normalize with gamma 1."""
    return h_MD * torch.rsqrt(h_MD.square().mean(-1, keepdim=True) + _NORM_EPS)
