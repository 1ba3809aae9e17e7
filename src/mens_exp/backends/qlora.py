"""QLoRA: an f32 adapter on a frozen, quantized causal model (arXiv:2305.14314).

Shapes: D hidden width, M supervised positions, V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from mens_exp.artifacts import atomic
from mens_exp.backends import forward
from mens_exp.backends.adapters import place_adapter, start_all, start_facts, start_from
from mens_exp.backends.frozen_base import FrozenWeights, frozen_weights, load_base
from mens_exp.backends.generation import greedy, next_logits, trace
from mens_exp.backends.saved_model import manifest_of, stacked_tensors, unstacked_tensors
from mens_exp.config.model import checkpointing_wanted
from mens_exp.config.objective_spec import shares_prompts
from mens_exp.data.batch import with_virtual_tokens
from mens_exp.errors import ConfigError, ModelFileError, SetupError
from mens_exp.layout.peft_format import join_experts, split_experts, stacks_of
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import chosen, described
from mens_exp.lora.keyed import (
    GENERATORS,
    LOWBIAS32,
    EmbeddingNoise,
    KeyedDropout,
    usual_generator,
)
from mens_exp.model import attention, compiled, fused_attention
from mens_exp.model.compiled import CompiledLayers
from mens_exp.model.kernels import is_rounded
from mens_exp.model.liger import FusedHead, LigerKernels
from mens_exp.model.offload import HostCodes
from mens_exp.model.stored_weights import StoredWeights
from mens_exp.planning.kernels import reasons
from mens_exp.quant.binding import compute_dtype
from mens_exp.quant.layers import (
    as_published,
    differs_in_evaluation,
    parameter_count,
    quantization_facts,
    quantized_linears,
    quantizer_in,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.backends.generation import Trace
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.lora.method import Pair
    from mens_exp.model.sources import BaseModel
    from mens_exp.planning.kernels import Part

_MATRIX = 2


class QloraBackend(torch.nn.Module):
    """A transformers model in 4 or 8 bits with the layers of an adapter method."""

    virtual_tokens = 0
    compiled_layers: CompiledLayers | None = None
    offloaded_bytes = 0

    def __init__(
        self,
        config: RunConfig,
        base: BaseModel,
        device: torch.device,
        *,
        loaded_on: torch.device | None = None,
    ) -> None:
        """Load and quantize the base model, and add a fresh adapter.

        Args:
            config: the whole configuration.
            base: the model on disk.
            device: the compute device.
            loaded_on: the device to build the model on, if different; the caller moves it.

        Raises:
            ConfigError: a LoRA target does not name a module of the model.
            SetupError: the device cannot hold or run the model.
        """
        super().__init__()
        self.base = base
        self.compute_dtype = compute_dtype(config.quant)
        self.quant_type, self.block_size = config.quant.quant_type.value, config.quant.block
        self.lora = config.lora
        self.virtual_tokens = config.lora.spec.virtual_tokens(config.lora)
        self.shares_prompts = shares_prompts(config.objective)
        self.shape = shape_of(config.model)
        self.modules_chosen = chosen(config.lora, self.shape)
        self.stacks = stacks_of(self.modules_chosen)
        plain = [one for one in self.modules_chosen if one.stack is None]
        stored = StoredWeights(base.directory, self.shape.family)
        self.method, self.model, self.layers = place_adapter(
            load_base(config, base, loaded_on or device),
            config.lora,
            self.modules_chosen,
            self.shape.family,
            stored,
        )
        self.differs_in_evaluation = differs_in_evaluation(self.model)
        self.causal_lm = self.method.base_model(self.model)
        self.total_parameters = parameter_count(self.causal_lm)
        if checkpointing_wanted(
            config.model.gradient_checkpointing,
            parameters=self.total_parameters,
            on_gpu=device.type == "cuda",
        ):
            attention.enable_checkpointing(self.causal_lm)
        self.residuals, self.errors, self.start_s = start_all(
            config, self.method, [*plain, *self.stacks], self.layers, stored
        )
        adapted = [(one, self.layers[one.logical]) for one in plain]
        self.dropouts = self.method.dropouts(config, adapted)
        self.weights = FrozenWeights(in_fp8=config.model.fp8)
        self.weights.take_over(self.causal_lm)
        together = self.shape.family.verified
        self.inputs = self.method.take_over(adapted, self.weights, together=together)
        self.noise = noise_on(self.causal_lm, config)
        self.use_kernels(reasons(config, on_gpu=device.type == "cuda"))

    def offload(self, device: torch.device) -> None:
        """Move the model to a device, but leave the codes of quantized layers in host memory.

        Args:
            device: the compute device; the model was built on the CPU.

        Raises:
            SetupError: the system cannot lock so much memory.
        """
        layers = quantized_linears(self.causal_lm).values()
        self.offloaded_bytes = HostCodes(layers, device).stored_bytes
        self.to(device)  # the codes are parameters no longer
        for layer in layers:
            if (state := getattr(layer.weight, "quant_state", None)) is not None:
                state.to(device)

    def use_kernels(self, why_not: Mapping[Part, str | None], *, kind: str = "cuda") -> None:
        """Use Liger's kernels on a kind of device; see `LigerKernels`."""
        self.kernels = LigerKernels(
            self.causal_lm, self.head, why_not, dtype=self.compute_dtype, kind=kind
        )
        self.fused_head: FusedHead | None = self.kernels.head

    def draw_with(self, generator: str) -> None:
        """Draw dropout masks with one of `GENERATORS`, on any device."""
        assert generator in GENERATORS, generator
        for dropout in self.dropouts:
            dropout.generator = generator

    def compile_layers(self, batch: Batch) -> int:
        """Compile the decoder layers for training, and draw masks with `LOWBIAS32`.

        Args:
            batch: the first micro-batch of the run.

        Returns:
            The number of graphs.

        Raises:
            SetupError: torch cannot compile them; the model is then as it was.
        """
        layers = self.causal_lm.get_submodule(self.shape.family.layers)
        self.compiled_layers = CompiledLayers(layers, outside=(KeyedDropout,))
        was = [(one, one.generator) for one in self.dropouts]
        self.draw_with(LOWBIAS32)
        for dropout in self.dropouts:
            dropout.is_compiled = True
        try:
            self.compiled_layers.warm_up(lambda: self._passed_back(batch))
        except forward.MODEL_CODE_ERRORS as error:
            self._drop_gradients()
            self.compiled_layers.undo()
            self.compiled_layers = None
            for dropout, generator in was:
                dropout.generator, dropout.is_compiled = generator, False
            first = (str(error).strip() or "no message").splitlines()[0]
            raise SetupError(
                "torch cannot compile the decoder layers",
                where="trainer.compile",
                found=f"{type(error).__name__}: {first}",
                remedy="set trainer.compile=false",
            ) from error
        return self.compiled_layers.graphs

    def _passed_back(self, batch: Batch) -> None:
        """Pass a micro-batch forward and backward in training mode, and drop the gradients."""
        assert self.training, "the modules' mode is part of the graphs"
        self.begin(batch.index)
        hidden_MD = self(batch)
        if not hidden_MD.requires_grad:
            raise RuntimeError("no gradient passes through them, because nothing there is trained")
        hidden_MD.float().sum().backward()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self.trainable().values():
            parameter.grad = None

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return hidden states at the supervised positions, ``[M, D]``."""
        batch = with_virtual_tokens(batch, self.virtual_ids)
        with self._compute(), self.noise.over(batch.document_lengths):
            return forward.hidden_states(self.causal_lm, batch)

    def layer_states(
        self, batch: Batch, layers: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the result of `forward`, and the states after the given layers, from 1."""
        batch = with_virtual_tokens(batch, self.virtual_ids)
        with self._compute(), self.noise.over(batch.document_lengths):
            return forward.layer_states(self.causal_lm, batch, layers)

    def head(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return logits ``[M, V]`` in the compute dtype, soft-capped if the model does so."""
        with self._compute():
            return forward.logits(self.causal_lm, hidden_MD)

    @property
    def virtual_ids(self) -> list[int]:
        """The ids of the virtual tokens before each document, if the adapter has any."""
        return self.method.virtual_ids(self.layers.values())

    def train(self, mode: bool = True) -> Self:
        """Set the mode; fully frozen modules stay in evaluation mode.

        Routers of some models (PhiMoE) choose experts at random in training mode. Layers that
        support activation checkpointing recompute only in training mode, so they follow the mode.
        """
        super().train(mode)
        adapted = set(self.layers.values())
        for module in _frozen_parts(self.causal_lm, adapted) if mode else ():
            module.eval()
        for stack in self.stacks:  # the block around adapted experts may add noise to its inputs
            self.causal_lm.get_submodule(stack.module.rpartition(".")[0]).training = False
        return self

    def begin(self, micro_batch: int) -> None:
        """Position every dropout and noise stream at a micro-batch."""
        self.noise.begin(micro_batch)
        for dropout in self.dropouts:
            dropout.begin(micro_batch)
        for shared in self.inputs:
            shared.forget()

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the adapter's parameters, f32, by logical name."""
        return {
            f"{logical}.{which}": parameter
            for logical, module in self.layers.items()
            for which, parameter in self.method.parameters(module).items()
        }

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Use the plainly quantized base inside the block: no adapter, nothing subtracted."""
        with self.residuals.plain(), self.method.disabled(self.model, self.layers.values()):
            yield

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

    @property
    def has_peft_view(self) -> bool:
        """Whether PEFT has a form of the adapter method."""
        return self.lora.spec.has_peft_view

    @property
    def peft_view_is_exact(self) -> bool:
        """Whether the PEFT directory, if any, is exactly this model on the quantized base.

        It is not if the initialisation changed the base, nor on an 8-bit base on CPU, because 8-bit
        layers quantize their inputs on other devices.
        """
        is_exact = not self.residuals.layers and not self.differs_in_evaluation
        return is_exact or not self.has_peft_view

    @contextmanager
    def as_peft_view(self) -> Iterator[None]:
        """Behave, inside the block, like the PEFT directory loaded on the base."""
        taken = self.residuals.taken()
        with (
            self.residuals.plain(),
            self.method.saved_form(self.model, self.lora, self.layers, taken),
            as_published(self.model),
        ):
            yield

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        """Continue prompts until an end id, a stop text or the limit; see :func:`greedy`."""
        prompts = [[*self.virtual_ids, *prompt] for prompt in prompts]
        with self._compute(), self.weights.dequantized_once(self.causal_lm, self.compute_dtype):
            return greedy(self.causal_lm, prompts, **options)

    def next_logits(self, ids: Sequence[int], cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the logits ``[V]``, f32, after ids, and the cache extended by them."""
        with self._compute():
            begun = ids if cache is not None else [*self.virtual_ids, *ids]
            return next_logits(self.causal_lm, begun, cache)

    def trace(self, ids: Sequence[int]) -> Trace:
        """Return the hidden states after each layer, and the logits, of one document."""
        with self._compute():
            return trace(self.causal_lm, ids, virtual_ids=self.virtual_ids)

    def adapter(self, config: RunConfig) -> tuple[AdapterManifest, dict[str, np.ndarray]]:
        """Return the adapter's manifest and its f32 tensors under logical names.

        The tensors are relative to the published base. If the initialisation subtracted a component
        from its weights, the adapter compensates for it as a pair of twice the rank.
        """
        tensors = {
            name: parameter.detach().to("cpu", torch.float32, copy=True)
            for name, parameter in self.trainable().items()
        }
        stacked = stacked_tensors(tensors, self.residuals.taken())
        residual = bool(self.residuals.layers)
        manifest = manifest_of(
            config,
            self.base,
            self.shape,
            self.modules_chosen,
            residual=residual,
            quantizer=quantizer_in(self.causal_lm, config.quant, self.shape),
            shared=self.method.shared(),
            sizes=self._sizes(),
        )
        arrays = {name: values.numpy() for name, values in stacked.items()}
        return manifest, split_experts(arrays, self.stacks)

    def _sizes(self) -> dict[str, list[str]]:
        """Name the dimensions of each tensor of a layer; `lora=peft` generates the names."""
        known = self.lora.spec.form.tensors
        found = {name: list(sizes) for name, sizes in known.items()}
        parts = {} if known else self.method.parameters(next(iter(self.layers.values())))
        return found | {
            name: [f"{name}_{place}" for place in range(one.dim())] for name, one in parts.items()
        }

    def load_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Copy an adapter's tensors into the model and rebuild the base that it was trained on.

        Raises:
            ConfigError: the tensors do not belong to this model.
        """
        parameters, taken = self.trainable(), self.residuals.taken()
        graph = {name: parameter.detach().to("cpu") for name, parameter in parameters.items()}
        written = {name: v.float().numpy() for name, v in stacked_tensors(graph, taken).items()}
        theirs = {(name, tuple(values.shape)) for name, values in tensors.items()}
        ours = {(name, tuple(v.shape)) for name, v in split_experts(written, self.stacks).items()}
        if theirs != ours:  # a copy would silently broadcast rank 1 to any rank
            odd = [f"{name} {list(shape)}" for name, shape in sorted(theirs ^ ours)]
            raise ConfigError(
                "the adapter's matrices do not match the graph",
                where="adapter",
                found=", ".join(odd[:8]),
                expected="the layers and the rank of the run's own configuration",
            )
        arrays = join_experts(tensors, self.stacks, "adapter")
        values = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tuned, theirs_taken = unstacked_tensors(values, taken)
        self.residuals.restore(theirs_taken)
        with torch.no_grad():
            for name, value in tuned.items():
                parameters[name].copy_(value)

    def merged(self, logical: str, weight: torch.Tensor) -> torch.Tensor:
        """Merge a layer's adapter into a weight; return the result in the weight's dtype.

        Args:
            logical: the layer's name, or that of a stack of experts.
            weight: ``[O, I]``, ``[E, O, I]`` of all experts, or ``[O]`` of a norm.
        """
        layer = self.layers[logical]
        tensors = {
            name: one.detach().to(weight) for name, one in self.method.parameters(layer).items()
        }
        of = self.method.weight if weight.dim() <= _MATRIX else self.method.expert_weights
        return of(weight, tensors, scale=self.method.scale(layer))

    def start_from(self, logical: str, pair: Pair) -> None:
        """Start a layer's adapter with A and B, and subtract their product from the base."""
        layer = self.layers[logical]
        self.errors[logical] = start_from(self.residuals, logical, layer, pair)

    def start_state(self) -> dict[str, torch.Tensor]:
        """Return the state of a checkpoint's base that the published weights do not determine."""
        return self.residuals.taken()

    def load_start_state(self, taken: dict[str, torch.Tensor]) -> None:
        """Rebuild the base of a checkpoint."""
        self.residuals.restore(taken)

    def write_peft(self, directory: Path) -> None:
        """Write the adapter as a PEFT directory, atomically.

        Raises:
            SetupError: the adapter method has no PEFT directory.
        """
        if not self.has_peft_view:
            raise SetupError(
                f"no PEFT directory is written of {self.lora.spec.name}",
                where=str(directory),
                expected="an adapter method with a PEFT view, such as lora.variant=lora",
                remedy="read adapter/adapter.safetensors, schema v3",
            )
        name, revision = self.base.name, self.base.revision
        with atomic.directory(directory) as temporary, self.as_peft_view():
            self.method.write_peft(self.model, temporary, base=name, revision=revision)

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens besides virtual ones."""
        return self.shape.max_position_embeddings - self.virtual_tokens

    def facts(self) -> dict[str, Any]:
        """Report what was built, as read back from the model."""
        parameters = self.trainable().values()
        return {
            "trainable_parameters": sum(p.numel() for p in parameters),
            "trainable_matrices": len(self.trainable()),
            "total_parameters": self.total_parameters,
            **self.shape.facts(),
            **quantization_facts(self.model, self.quant_type, self.block_size),
            **self._expert_facts(),
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "gradient_checkpointing": attention.is_checkpointing(self.causal_lm),
            "attention": str(self.causal_lm.config._attn_implementation),  # noqa: SLF001
            "lora_modules": described(self.modules_chosen, self.shape.num_hidden_layers),
            "lora_variant": self.lora.variant.value,
            **({"offloaded_bytes": self.offloaded_bytes} if self.offloaded_bytes else {}),
            **({"virtual_tokens": self.virtual_tokens} if self.virtual_tokens else {}),
            **start_facts(self.lora, self.errors, self.start_s),
            "kernels": self.kernels.facts(),
            "numerics": self._numerics() | self.kernels.numerics(),
        }

    def _numerics(self) -> dict[str, str]:
        """Name the implementations that a step uses, because each rounds differently.

        A number is raised when its implementation changes. Records without names used PEFT's code.
        """
        device = next(self.model.parameters()).device
        own = "rounded from f32" if is_rounded(self.compute_dtype, device) else "own"
        if self.weights.in_fp8:
            own = "frozen weights in FP8, a scale per row 1"
        return {
            "adapters": "projections of an input together 1" if self.inputs else "PEFT's",
            "attention": "blocks of queries 2"
            if device.type == "cpu"
            else fused_attention.described(
                device, self.compute_dtype, shares_prompts=self.shares_prompts
            ),
            "dropout": self._generator(device),
            "products": own,
            **({} if self.compiled_layers is None else {"layers": compiled.NUMERICS}),
        }

    def _generator(self, device: torch.device) -> str:
        chosen = {one.generator for one in self.dropouts} - {None}
        return chosen.pop() if chosen else usual_generator(device)

    def _expert_facts(self) -> dict[str, Any]:
        """Report the dtype of expert tensors, which are never quantized."""
        stacked = [one for one in self.causal_lm.parameters() if one.dim() > _MATRIX]
        if not self.shape.expert_parameters or not stacked:
            return {}
        return {
            "expert_parameters": sum(one.numel() for one in stacked),
            "expert_dtype": str(stacked[0].dtype).removeprefix("torch."),
        }

    def quantization_errors(self) -> dict[str, tuple[float, float]]:
        """Return each layer's quantization error before and after the initialisation."""
        return {name: (error.before, error.after) for name, error in self.errors.items()}

    @contextmanager
    def _compute(self) -> Iterator[None]:
        """Train under bf16 autocast; evaluate with the adapter in f32, as PEFT does by default.

        In training, adapters stay in f32 so that gradients accumulate in f32, and autocast computes
        with bf16 copies. In evaluation, those copies would differ from the adapter that is saved:
        the loss of SmolLM2 moved by 0.2 %.
        """
        learns = torch.is_grad_enabled()
        self.method.accumulate_in_f32(self.layers.values(), learns=learns)
        device = next(self.model.parameters()).device.type
        in_bf16 = learns and self.compute_dtype == torch.bfloat16
        with torch.autocast(device, dtype=torch.bfloat16, enabled=in_bf16):
            yield


def noise_on(causal_lm: Any, config: RunConfig) -> EmbeddingNoise:
    """Return the embedding noise of a run, hooked onto the embeddings if alpha is not zero.

    Raises:
        ModelFileError: the model's code does not expose its input embeddings.
    """
    noise = EmbeddingNoise(config.objective.neftune_alpha, seed=config.seed)
    if not noise.alpha:
        return noise
    try:
        embedding = causal_lm.get_input_embeddings()
    except (AttributeError, NotImplementedError) as error:
        raise ModelFileError(
            "the model's code does not expose its input embeddings",
            where=type(causal_lm).__name__,
            found=f"{type(error).__name__}: {error}",
            expected="get_input_embeddings",
            remedy="leave out objective.neftune_alpha",
        ) from error
    noise.put_on(embedding)
    return noise


def _frozen_parts(
    module: torch.nn.Module, adapted: set[torch.nn.Module]
) -> Iterator[torch.nn.Module]:
    """Yield the largest modules without a trained parameter or a checkpointed layer.

    Submodules of an adapted layer are excluded: its dropout has no parameters.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for child in module.children():
        if child in adapted:
            continue
        follows = any(isinstance(one, GradientCheckpointingLayer) for one in child.modules())
        if follows or any(parameter.requires_grad for parameter in child.parameters()):
            yield from _frozen_parts(child, adapted)
        else:
            yield child
