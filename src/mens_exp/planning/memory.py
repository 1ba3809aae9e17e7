"""Estimate the peak memory of a training process, component by component, on CPU and on CUDA.

What the backward pass keeps is counted tensor by tensor, as autograd's hooks show it on the real
graph (experiments/memory_model); what an allocator adds to that is measured. Trained parameters are
counted without building the backend. Of a sharded base (trainer=fsdp), codes of decoder layers are
shared out, their scales are not: bitsandbytes keeps these with the weight. Embedding, last norm,
head and all that is trained are whole in every process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import ProxyConfig, trains_base
from mens_exp.config.model import HfModel, checkpointing_wanted
from mens_exp.config.objective import CrossEntropyConfig
from mens_exp.config.quant import ComputeDtype, QuantType
from mens_exp.config.trainer import Strategy
from mens_exp.layout import hub
from mens_exp.layout.shape import HEAD, ProxyStack, stack_of
from mens_exp.layout.targets import (
    adapter_parameters,
    chosen,
    described,
    linear_modules,
    pattern_values,
    target_problems,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.layout.targets import LinearModule

BUCKETS = "gradient buckets"  # what only several processes have
NESTED_BLOCK = 256  # bitsandbytes' own; asserted in tests/quant

_F32, _MASK = 4, 2  # bytes of an f32 element, and of an element of the dropout mask (int16)
# Bytes a parameter of the moments, by the optimizer's class name.
_MOMENTS = {
    "AdamW": 8.0,
    "Adam": 8.0,
    "Lion": 4.0,
    "AdamW8bit": 2.0 + 2 * _F32 / 256,  # two moments, one scale for 256 elements of each
    "PagedAdamW8bit": 2.0 + 2 * _F32 / 256,
    "PagedAdamW": 8.0,
    "Lion8bit": 1.0 + _F32 / 256,
    "SGD": 4.0,
}
_MOMENTS_UNKNOWN = 8.0  # Adam's; the user's own optimizer
# measured: chunks of 512 instead of 64 positions took 177 MB more, 8 bytes a logit; plus the bf16
# logits, which the smaller chunk's peak hides.
_LOGITS = 10

# measured: experiments/memory_model, SmolLM2-135M on CPU
# Computed again, one layer's activations come and go thirty times and leave larger holes; the
# heap then keeps the scores of every layer though each is freed. It is glibc's: with
# MALLOC_MMAP_THRESHOLD_=1000000, 2 x 1,024 tokens took 1.29 instead of 2.42 GB, one run each.
_CPU_KEPT_RECOMPUTED = 2.7
_CPU_FRAMEWORK = 500_000_000  # interpreter, torch, transformers, Lightning, loaded kernels
_MAPPED = 2  # bytes a weight of the checkpoint's file, resident as long as it is mapped
_CPU_F32_EXTRA = 130_000_000  # measured: an f32 base built takes so much more than its numbers
# resident bytes for one byte that autograd keeps: its own, and the holes that temporaries leave
_CPU_KEPT = {"activations": 1.65, "attention scores": 1.0}
# measured: SmolLM2 with checkpointing, where nothing else hides them, took 380 MB more on documents
# of sixteen lengths than on documents of one: each shape keeps its own oneDNN kernels.
_KERNELS_PER_SHAPE, _BUCKET, _MOST_SHAPES = 24_000_000, 32, 16
# measured: the main job with its suite took 2.30 and 2.77 GB, against 2.0 by formula without it.
_COMPLETIONS = 400_000_000
_CPU_SPREAD = (0.15, 0.20)  # below and above; unverified guess beyond experiments/memory_model
# unverified guess: no GPU was at hand. A CUDA context with its libraries takes about half a
# gigabyte, and the caching allocator rounds up.
_CUDA_FRAMEWORK = 600_000_000
_CUDA_KEPT = {"activations": 1.10, "attention scores": 1.10}
_CUDA_SPREAD = (0.25, 0.25)


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Lengths of the documents to train on, in tokens.

    Attributes:
        longest: the longest.
        typical: mean length of the document that a token lies in.
        varied: whether there are documents of many lengths.
    """

    longest: int
    typical: float
    varied: bool = True

    def squares(self, sequences: int, seq_len: int) -> float:
        """Return the sum of squared lengths in the largest micro-batch, where attention pays.

        One document is the longest there is, what is left is typical.
        """
        longest = min(self.longest, seq_len)
        return longest**2 + (sequences * seq_len - longest) * min(self.typical, seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """An estimate of peak memory: bytes, by component.

    Attributes:
        components: what adds up to the estimate.
        low: lower bound of the interval.
        high: its upper bound.
        outside: the part of the estimate that the probe of a run does not see.
        basis: what it rests on.
    """

    components: dict[str, int]
    low: int
    high: int
    outside: int
    basis: str

    @property
    def estimate(self) -> int:
        """The sum of the components."""
        return sum(self.components.values())

    def record(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
            "components": self.components,
            "basis": self.basis,
        }


def bits_per_weight(quant: QuantConfig, rows_per_weight: float = 0.0) -> float:
    """Return bits of a weight with its share of the scales (arXiv:2305.14314, section 3).

    An f32 scale for each block of 64 is half a bit; quantized to 8 bits, with an f32 scale for
    256 of them, it is 0.127. A weight of eight bits shares an f32 scale with its row. One that is
    not quantized is in the compute format.

    Args:
        quant: the `quant` group.
        rows_per_weight: rows over weights, which only eight bits ask for.
    """
    if quant.quant_type is QuantType.int8:
        return 8 + 32 * rows_per_weight
    if not quant.is_quantized:
        return 16 if quant.compute_dtype is ComputeDtype.bf16 else 32
    if quant.double_quant:
        return 4 + 8 / quant.block + 32 / (quant.block * NESTED_BLOCK)
    return 4 + 32 / quant.block


def dense_experts(config: RunConfig, shape: Shape) -> int:
    """Count the weights of experts that stay in the compute format though a base is quantized.

    bitsandbytes quantizes linear modules, and transformers holds experts as tensors.
    """
    is_whole = config.quant.is_quantized and config.backend.name != "proxy"
    return shape.expert_parameters if is_whole else 0


def optimizer_bytes(target: str, parameters: int) -> tuple[int, bool]:
    """Return bytes of an optimizer's state, and whether they lie in pageable host memory.

    Args:
        target: class of the optimizer.
        parameters: trainable parameters.
    """
    name = target.rpartition(".")[2]
    return round(_MOMENTS.get(name, _MOMENTS_UNKNOWN) * parameters), name.startswith("Paged")


def modules_of(config: RunConfig, shape: Shape) -> tuple[LinearModule, ...]:
    """Return the modules that get an adapter; none where a target is wrong, which is told."""
    return () if target_problems(config.lora, shape) else chosen(config.lora, shape)


def recomputes(config: RunConfig, shape: Shape, kind: str) -> bool:
    """Tell whether activations are computed again in the backward pass."""
    return checkpointing_wanted(
        config.model.gradient_checkpointing,
        parameters=shape.parameters,
        on_gpu=kind == "cuda",
    )


def memory(config: RunConfig, shape: Shape, documents: Documents, *, kind: str) -> Memory:
    """Estimate the peak of a training process.

    Args:
        config: the run.
        shape: dimensions of its base.
        documents: what it trains on.
        kind: ``cpu`` or ``cuda``.
    """
    width = 2 if config.quant.compute_dtype is ComputeDtype.bf16 else _F32
    parameters = trained_parameters(config, shape)
    moments, is_paged = optimizer_bytes(config.optim._target_, parameters)  # Hydra's own spelling
    on_cpu = kind == "cpu"
    again = recomputes(config, shape, kind)
    kept = _kept(config, shape, documents, width=width, on_cpu=on_cpu, again=again)
    factor = dict(_CPU_KEPT if on_cpu else _CUDA_KEPT)
    if on_cpu and again:
        factor["activations"] = _CPU_KEPT_RECOMPUTED
    sizes = [shape.size_of(one) for one in shape.family.projections if one.slot is None]
    bits = bits_per_weight(config.quant, sum(o for o, _ in sizes) / sum(o * i for o, i in sizes))
    dense = dense_experts(config, shape)
    # Where every weight learns, the base is what is counted as learned.
    frozen = 0 if config.backend.name == "full" else 1
    components = {
        "base weights": round(frozen * (frozen_linears(config, shape) - dense) * bits / 8),
        **({EXPERTS_DENSE: frozen * dense * width} if dense else {}),
        **_plain_beside_residual(config, shape, bits),
        "embedding and head": frozen * shape.embedding_parameters * width,
        "adapter": parameters * (_F32 + (width if width < _F32 else 0)),
        "gradients": parameters * _F32,
        # They are summed in buckets of their own, all of them together as large.
        **({BUCKETS: parameters * _F32} if config.trainer.world_size > 1 else {}),
        "optimizer": 0 if is_paged and not on_cpu else moments,
        **_sums_of_experts(config, shape, width=width, again=again),
        **{name: round(value) for name, value in kept.items()},
        "allocator": round(max(_holes(kept, factor), _kernels(documents) if on_cpu else 0)),
        "head chunk": _head_positions(config) * shape.vocab_size * _LOGITS,
        "framework": (_CPU_FRAMEWORK + _CPU_F32_EXTRA * (width == _F32))
        if on_cpu
        else _CUDA_FRAMEWORK,
    }
    if on_cpu:
        components |= {"completions": _COMPLETIONS} if config.suite.name != "none" else {}
        components["weights file, mapped"] = _MAPPED * shape.parameters
    components |= _comparison(config, shape, components, kept)
    if is_in_parts(config):
        layers = shape.num_hidden_layers
        components = in_parts(config, components, bits=bits, layers=layers, kind=kind)
    total = sum(components.values())
    below, above = _CPU_SPREAD if on_cpu else _CUDA_SPREAD
    # Only documents that are surely there count for the lower bound, and no page of a file, which
    # the system can take back.
    sure = total - round(factor["attention scores"] * kept["attention scores"])
    sure -= components.get("weights file, mapped", 0)
    return Memory(
        components=components,
        low=round(sure * (1 - below)),
        high=round(total * (1 + above)),
        outside=0 if on_cpu else _CUDA_FRAMEWORK,
        basis=f"by formula, {_process(config)} {'CPU' if on_cpu else 'CUDA'} process"
        + ("" if on_cpu else "; its allowance for the driver was never measured")
        + ("; activations are computed again" if again else "")
        + ("; the optimizer's state is paged to host memory" if is_paged and not on_cpu else ""),
    )


def compares(config: RunConfig) -> bool:
    """Tell whether a run is compared with transformers before its first step."""
    return config.data.contract.probe and config.backend.name != "proxy"


def _comparison(
    config: RunConfig, shape: Shape, components: Mapping[str, int], kept: Mapping[str, float]
) -> dict[str, int]:
    """Return what the comparison with transformers before step 1 needs beyond training.

    It holds f32 copies of the unquantized weights, and neither moments nor long activations. Of a
    base that is not quantized these are another base or two, and it is left out where they do not
    fit.
    """
    if not (compares(config) and config.quant.is_quantized) or is_in_parts(config):
        return {}
    freed = sum(components[name] for name in ("optimizer", "head chunk", "allocator", *kept))
    beyond = shape.embedding_parameters * _F32 - freed
    return {"comparison before step 1": beyond} if beyond > 0 else {}


def _process(config: RunConfig) -> str:
    return "one" if config.trainer.world_size == 1 else f"each of {config.trainer.world_size}"


def _holes(kept: Mapping[str, float], factor: Mapping[str, float]) -> float:
    """Return what an allocator holds beside what is kept."""
    return sum((factor[name] - 1) * value for name, value in kept.items())


def _kernels(documents: Documents) -> float:
    """Return what the kernels of all shapes take; holes of larger tensors have room for them."""
    shapes = -(-documents.longest // _BUCKET) if documents.varied else 1
    return float(_KERNELS_PER_SHAPE * min(shapes, _MOST_SHAPES))


def _kept(
    config: RunConfig,
    shape: Shape,
    documents: Documents,
    *,
    width: int,
    on_cpu: bool,
    again: bool,
) -> dict[str, float]:
    """Return what the backward pass keeps, by kind, in bytes."""
    sequences, seq_len = config.data.micro_batch_size, config.data.seq_len
    if not config.data.packing:
        seq_len = min(seq_len, documents.longest)
    tokens, layers = sequences * seq_len, shape.num_hidden_layers
    stack = proxy_stack(config, shape)
    if stack is not None:  # no attention: of each projection its input, the norm's, and A's output
        one = width * (2 * shape.hidden_size + config.lora.r) + _F32 * shape.hidden_size
        return {"activations": float(tokens * len(stack.middle) * one), "attention scores": 0.0}
    per_token = _layer_bytes(config, shape, width=width, on_cpu=on_cpu)
    scores = 0.0
    if on_cpu and config.data.packing:  # elsewhere a fused kernel keeps none
        squares = documents.squares(sequences, config.data.seq_len)
        scores = shape.num_attention_heads * squares * width
    if again:  # a layer's input for each, and all of one layer at a time
        inputs = tokens * layers * shape.hidden_size * width
        return {"activations": inputs + tokens * per_token, "attention scores": layers * scores}
    return {"activations": tokens * layers * per_token, "attention scores": layers * scores}


def _layer_bytes(config: RunConfig, shape: Shape, *, width: int, on_cpu: bool) -> float:
    """Return what one decoder layer keeps of one token on average, attention scores apart.

    Read off the saved tensors of the real graph: the residual in f32 for each of two norms;
    query, key and value (and their fused kernel's output); gate, up and their activation; for
    each input of an adapter what dropout left of it and the mask; A's output for each target.
    """
    wide, heads = shape.intermediate_size, shape.num_attention_heads * shape.head_dim
    pairs = shape.num_key_value_heads * shape.head_dim
    is_gated = any(one.logical in {"gate", "gate_up"} for one in shape.family.projections)
    total = 2.0 * _F32 * shape.hidden_size
    total += width * (heads + 2 * pairs + (0 if on_cpu else heads))
    total += width * wide * (3 if is_gated else 5)  # the tanh form of GELU keeps its steps
    every_module = modules_of(config, shape)
    modules = [one for one in every_module if one.kind != HEAD and one.stack is None]
    inputs = {one.reads: one.width for one in modules}
    ranks = pattern_values(config.lora.rank_pattern, modules, shape.family, config.lora.r)
    mask = _MASK if config.lora.dropout > 0 else 0
    adapters = sum(inputs.values()) * (width + mask) + sum(ranks.values()) * width
    if config.quant.quant_type is QuantType.int8:  # whose layers keep their inputs as they were
        shared = inputs.keys() if config.lora.dropout == 0 else set()  # with A, which keeps them
        every = {one.reads: one.width for one in linear_modules(shape) if one.layer is not None}
        adapters += width * sum(w for reads, w in every.items() if reads not in shared)
    return total + adapters / shape.num_hidden_layers


def _sums_of_experts(config: RunConfig, shape: Shape, *, width: int, again: bool) -> dict[str, int]:
    """Return what adapted experts take beside themselves.

    PEFT computes with ``W + s·B A``, which the backward pass needs again, and whose gradient is as
    large; that is there for one layer at a time.
    """
    if config.backend.name in {"full", "proxy"}:
        return {}
    sizes: dict[int | None, int] = {}
    for one in modules_of(config, shape):
        if one.slot is not None:
            size = one.slot.matrices * one.out * one.width
            sizes[one.layer] = sizes.get(one.layer, 0) + size
    if not sizes:
        return {}
    largest = max(sizes.values())
    kept = largest if again else sum(sizes.values())
    return {"experts with their adapters": (kept + largest) * width}


def _plain_beside_residual(config: RunConfig, shape: Shape, bits: float) -> dict[str, int]:
    """Return what the plain weights take that are kept beside those of a residual."""
    if not config.lora.start_changes_base:
        return {}
    weights = sum(one.out * one.width for one in modules_of(config, shape))
    return {"plain weights, for the base": round(weights * bits / 8)}


def _head_positions(config: RunConfig) -> int:
    """Return positions whose logits exist at one time; all, where an objective does not say."""
    if isinstance(config.objective, CrossEntropyConfig):
        return config.objective.chunk_tokens
    return config.data.seq_len * config.data.micro_batch_size


EXPERTS_DENSE = "experts, not quantized"

WHOLE = "base, whole while it is loaded or scored"
_CODE_BITS = 4
# Layers that are whole at one time: the one that computes, the one fetched ahead of it, and the
# buffer that its parts arrive in. By PyTorch's code (fully_shard); not measured on a GPU.
_AT_ONCE = 3
_RESTING = ("base weights", EXPERTS_DENSE, "embedding and head", "adapter", "framework")


def is_in_parts(config: RunConfig) -> bool:
    """Whether several processes share out the base."""
    return config.trainer.strategy is Strategy.fsdp and config.trainer.world_size > 1


def in_parts(
    config: RunConfig, components: dict[str, int], *, bits: float, layers: int, kind: str
) -> dict[str, int]:
    """Return the components of one of several processes from those of one that holds all.

    Args:
        config: the whole configuration.
        components: bytes by component, the base whole.
        bits: of a weight of the base, its share of the scales among them.
        layers: decoder layers.
        kind: "cpu" or "cuda".
    """
    whole, share = components["base weights"], _CODE_BITS / bits
    codes = round(whole * share) if config.quant.is_four_bit else whole
    dense = components.get(EXPERTS_DENSE, 0)
    many = config.trainer.world_size
    parts = {
        **components,
        "base weights": whole - codes + -(-codes // many),
        **({EXPERTS_DENSE: -(-dense // many)} if dense else {}),
        "gathered layers": min(_AT_ONCE, layers) * (codes + dense) // layers,
    }
    alone = sum(components.get(name, 0) for name in _RESTING)
    if kind == "cpu":  # at the least, one process of a machine loads while others hold their part
        many, resting = config.trainer.devices, sum(parts.get(name, 0) for name in _RESTING)
        peak = (alone + (many - 1) * resting) // many
    else:  # it is loaded in the host's memory, and scored by the first process alone
        peak = alone if config.suite.name != "none" else 0
    return parts | {WHOLE: max(0, peak - sum(parts.values()))}


def proxy_stack(config: RunConfig, shape: Shape) -> ProxyStack | None:
    """Return the proxy's stack; None for other backends.

    A checkpoint that is made here is whole, and so is taken to be one whose headers are not here.

    Raises:
        MensError: the stack cannot be built, or a directory's headers cannot be read.
    """
    backend = config.backend
    if not isinstance(backend, ProxyConfig):
        return None
    keys = hub.describe(config.model).tensors if isinstance(config.model, HfModel) else None
    return stack_of(shape, backend, keys or None)


def trained_parameters(config: RunConfig, shape: Shape) -> int:
    """Count the parameters that learn; of a family that is not verified, no norms and biases."""
    base = shape.parameters + shape.small_parameters
    if config.backend.name == "full":
        return base
    stack = proxy_stack(config, shape)
    if stack is None:
        learns = trains_base(config.backend, config.model.source)
        return adapter_parameters(config.lora, shape) + learns * base
    d = shape.hidden_size
    return config.lora.r * (len(stack.middle) * 2 * d + shape.vocab_size + d)


def frozen_linears(config: RunConfig, shape: Shape) -> int:
    """Count the weights of linear layers that a token goes through, the head left out."""
    stack = proxy_stack(config, shape)
    if stack is None:
        return shape.linear_parameters
    return len(stack.middle) * shape.hidden_size**2


def described_modules(config: RunConfig, shape: Shape) -> str:
    """Say in a line which modules learn."""
    if config.backend.name == "full":
        return "every weight"
    stack = proxy_stack(config, shape)
    if stack is None:
        return described(chosen(config.lora, shape), shape.num_hidden_layers)
    middle = len(stack.middle)
    return f"mid in {middle} of {shape.num_hidden_layers} layers; lm_head: {middle + 1} modules"
