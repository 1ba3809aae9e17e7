"""Estimate the peak memory of a training process, component by component, on CPU and on CUDA.

Tensors saved for the backward pass are counted one by one, as recorded by autograd's hooks on the
real graph (experiments/memory_model). The allocator's overhead is measured. Trained parameters are
counted without building the backend. With a sharded base (trainer=fsdp), the codes of decoder
layers are sharded but their scales are not, because bitsandbytes keeps scales with the weight. The
embedding, the last norm, the head and all trained parameters are replicated in every process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import trains_base
from mens_exp.config.model import checkpointing_wanted, teacher_of
from mens_exp.config.objective_spec import LOGIT_BYTES, matched_layers
from mens_exp.config.optim import LowRankConfig
from mens_exp.config.quant import ComputeDtype, unquantized
from mens_exp.config.trainer import Strategy
from mens_exp.layout.modules import linear_modules, linear_weights
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import (
    adapter_parameters,
    adapter_tensors,
    chosen,
    described,
    quantized_modules,
)
from mens_exp.planning import messages
from mens_exp.planning.activations import BUCKET, modules_of, proxy_stack, saved_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.modules import LinearModule
    from mens_exp.layout.shape import Shape
    from mens_exp.planning.activations import Documents

RANKS = "importance of ranks"  # of each value of the adapter, and two averages of it
BUCKETS = "gradient buckets"  # only with several processes

_F32 = 4  # bytes of an element
# Bytes of moments per parameter, by the class name of an optimizer that a user's option names.
_MOMENTS = {
    "AdamW8bit": 2.0 + 2 * _F32 / 256,  # two moments, one scale for 256 elements of each
    "PagedAdamW8bit": 2.0 + 2 * _F32 / 256,
    "Lion": 4.0,
    "Lion8bit": 1.0 + _F32 / 256,
    "SGD": 4.0,
}
_MOMENTS_UNKNOWN = 8.0  # Adam's

# measured: experiments/memory_model, SmolLM2-135M on CPU
# With checkpointing, one layer's activations are allocated and freed thirty times and leave larger
# holes; the heap then retains the scores of every layer although each is freed. This is glibc's
# behaviour: with MALLOC_MMAP_THRESHOLD_=1000000, 2 x 1,024 tokens took 1.29 instead of 2.42 GB,
# one run each.
_CPU_KEPT_RECOMPUTED = 2.7
_CPU_FRAMEWORK = 500_000_000  # interpreter, torch, transformers, Lightning, loaded kernels
_MAPPED = 2  # bytes per weight of the checkpoint's file, without codes, resident while it is mapped
_CPU_F32_EXTRA = 130_000_000  # measured: memory of a built f32 base beyond its weights
# Resident bytes per byte that autograd saves: the byte itself, and holes left by temporaries.
_CPU_KEPT = {"activations": 1.65, "attention scores": 1.0}
# measured: SmolLM2 with checkpointing, where no larger peak hides them, took 380 MB more with
# documents of sixteen lengths than of one: oneDNN caches separate kernels for each shape.
_KERNELS_PER_SHAPE, _MOST_SHAPES = 24_000_000, 16
# measured: the main job with its suite took 2.41 GB, against 2.0 by formula without completions;
# its dequantized base is 0.21 of them.
_COMPLETIONS = 200_000_000
# Bytes; the weights of a larger base are dequantized again for each token of a completion.
MOST_DEQUANTIZED = 1 << 30
_CPU_SPREAD = (0.15, 0.20)  # below and above; unverified guess beyond experiments/memory_model
# unverified guess: no GPU was available. A CUDA context with its libraries takes about half a
# gigabyte, and the caching allocator rounds up.
_CUDA_FRAMEWORK = 600_000_000
_CUDA_KEPT = {"activations": 1.10, "attention scores": 1.10}
_CUDA_SPREAD = (0.25, 0.25)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """An estimate of peak memory: bytes, by component.

    Attributes:
        components: bytes by component; their sum is the estimate.
        low: lower bound of the interval.
        high: upper bound of the interval.
        outside: the part of the estimate that the probe of a run does not measure.
        basis: the basis of the estimate.
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
        """Return the estimate as plain JSON."""
        return {
            "estimate": self.estimate,
            "low": self.low,
            "high": self.high,
            "components": self.components,
            "basis": self.basis,
        }


def bits_per_weight(quant: QuantConfig, rows_per_weight: float = 0.0) -> float:
    """Return bits per weight, including its share of the scales (arXiv:2305.14314, section 3).

    Args:
        quant: the `quant` group.
        rows_per_weight: number of rows divided by number of weights, for per-row scales.
    """
    return quant.spec.bits_per_weight(
        compute_bits=16 if quant.compute_dtype is ComputeDtype.bf16 else 32,
        block=quant.block,
        double_quant=quant.double_quant,
        rows_per_weight=rows_per_weight,
    )


def base_bits(quant: QuantConfig, shape: Shape) -> float:
    """Return the mean bits of a weight of the decoder's linear layers, as they are stored.

    Args:
        quant: the `quant` group; its patterns match modules of the model.
        shape: dimensions of the model.
    """
    inside = [one for one in linear_modules(shape) if one.layer is not None and one.slot is None]
    stored = quantized_modules(quant, shape) if quant.is_quantized else {}
    plain = unquantized(quant.compute_dtype)

    def bits_of(one: LinearModule) -> float:
        if quant.spec.keeps_codes and shape.stored is not None and one.path in stored:
            return shape.stored.format.bits_per_weight(one.width)
        return bits_per_weight(stored.get(one.path, plain), 1 / one.width)

    bits = sum(one.out * one.width * bits_of(one) for one in inside)
    return bits / sum(one.out * one.width for one in inside)


def offloaded_codes(config: RunConfig, shape: Shape) -> list[int]:
    """Return the bytes of each layer's codes that `model.offload` keeps in host memory."""
    if not config.model.offload:
        return []
    sizes = {one.path: one.out * one.width for one in linear_modules(shape)}
    return [
        -(-sizes[path] * one.spec.code_bits // 8)
        for path, one in quantized_modules(config.quant, shape).items()
        if one.spec.code_bits is not None
    ]


def dense_experts(config: RunConfig, shape: Shape) -> int:
    """Count the expert weights that stay in the compute format although the base is quantized.

    bitsandbytes quantizes linear modules, and transformers stores experts as tensors.
    """
    is_whole = config.quant.is_quantized and config.backend.spec.is_causal
    return shape.expert_parameters if is_whole else 0


def optimizer_bytes(config: RunConfig, shape: Shape) -> tuple[int, bool]:
    """Return the bytes of the optimizer's state, and whether they are in pageable host memory.

    Args:
        config: the whole configuration.
        shape: dimensions of the base model.
    """
    optim, parameters = config.optim, trained_parameters(config, shape)
    name = optim._target_.rpartition(".")[2]  # Hydra's own spelling
    found = optim.state_bytes(parameters, _matrix_sides(config, shape))
    if found is None:
        found = _MOMENTS.get(name, _MOMENTS_UNKNOWN) * parameters
    if isinstance(optim, LowRankConfig):
        sizes = [one for one in linear_weights(shape).values() if optim.projects(*one)]
        found -= sum(optim.saved_bytes(*one) for one in sizes)
    return round(found), name.startswith("Paged")


def _matrix_sides(config: RunConfig, shape: Shape) -> int:
    """Return rows and columns of all trained matrices, summed."""
    total = 0
    if not config.backend.spec.has_adapter or trains_base(config.backend, config.model.source):
        total += sum(one.out + one.width for one in linear_modules(shape))
        total += shape.vocab_size + shape.hidden_size  # the embedding; vectors are left out
    if not config.backend.spec.has_adapter:
        return total
    stack = proxy_stack(config, shape)
    if stack is not None:
        many, d, r = len(stack.middle), shape.hidden_size, config.lora.r
        return total + many * 2 * (d + r) + shape.vocab_size + d + 2 * r
    return total + sum(
        many * sum(sizes) for many, sizes in adapter_tensors(config.lora, shape) if len(sizes) > 1
    )


def recomputes(config: RunConfig, shape: Shape, kind: str) -> bool:
    """Return whether activations are recomputed in the backward pass."""
    return checkpointing_wanted(
        config.model.gradient_checkpointing,
        parameters=shape.parameters,
        on_gpu=kind == "cuda",
    )


def memory(
    config: RunConfig,
    shape: Shape,
    documents: Documents,
    *,
    kind: str,
    has_bf16: bool | None = None,
) -> Memory:
    """Estimate the peak memory of a training process.

    Args:
        config: the run.
        shape: dimensions of the base model.
        documents: lengths of the training documents.
        kind: ``cpu`` or ``cuda``.
        has_bf16: whether the device multiplies bf16 matrices; None if that is unknown.
    """
    width = 2 if config.quant.compute_dtype is ComputeDtype.bf16 else _F32
    parameters = trained_parameters(config, shape)
    moments, is_paged = optimizer_bytes(config, shape)
    on_cpu = kind == "cpu"
    again = recomputes(config, shape, kind)
    kept = saved_bytes(config, shape, documents, width=width, on_cpu=on_cpu, again=again)
    factor = dict(_CPU_KEPT if on_cpu else _CUDA_KEPT)
    if on_cpu and again:
        factor["activations"] = _CPU_KEPT_RECOMPUTED
    bits = base_bits(config.quant, shape)
    dense = dense_experts(config, shape)
    # If every weight is trained, the base is counted among the trained parameters.
    frozen = int(config.backend.spec.has_adapter)
    teacher = _teacher(config, shape, kind, width)
    passes_before = config.objective.spec.passes_before(config.objective)
    components = {
        "base weights": round(frozen * (frozen_linears(config, shape) - dense) * bits / 8),
        **({EXPERTS_DENSE: frozen * dense * width} if dense else {}),
        **_original_weights(config, shape, bits),
        "embedding and head": frozen * shape.embedding_parameters * width,
        "adapter": parameters * _F32 + round(_copied(config, parameters) * width),
        "gradients": parameters * _F32,
        # Gradients are reduced in separate buckets, which together have the same size.
        **({BUCKETS: parameters * _F32} if config.trainer.world_size > 1 else {}),
        "optimizer": 0 if is_paged and not on_cpu else moments,
        **_sums_of_experts(config, shape, width=width, again=again),
        **({RANKS: 3 * parameters * _F32} if config.lora.spec.allocates else {}),
        **_updates(config, shape, width=width, again=again),
        **_projections(config, shape, width=width),
        **{name: round(value) for name, value in kept.items()},
        "allocator": round(max(_holes(kept, factor), _kernels(documents) if on_cpu else 0)),
        **_reference(config, shape, width),
        **({"teacher": teacher} if teacher and not passes_before else {}),
        **_compared_states(config, shape, width),
        "head chunk": _head_positions(config, shape, kind) * shape.vocab_size * LOGIT_BYTES,
        "framework": (_CPU_FRAMEWORK + _CPU_F32_EXTRA * (width == _F32))
        if on_cpu
        else _CUDA_FRAMEWORK,
    }
    if on_cpu:
        if config.suite.spec.scores:
            components |= _completions(config, shape, width, has_bf16=has_bf16)
        coded = frozen_linears(config, shape) - dense if config.quant.spec.keeps_codes else 0
        plain = shape.parameters - coded
        components["weights file, mapped"] = round(_MAPPED * plain + coded * bits / 8)
    if (codes := offloaded_codes(config, shape)) and not on_cpu:
        components["base weights"] -= sum(codes)
        components[OFFLOADED] = 2 * max(codes)  # the current ones, and those copied ahead
    components |= _comparison(config, shape, components, kept)
    if teacher and passes_before:  # the teacher is freed before the student is loaded
        beyond = teacher - (sum(components.values()) - components["framework"])
        components |= {"teacher before step 1": beyond} if beyond > 0 else {}
    if is_in_parts(config):
        layers = shape.num_hidden_layers
        of_codes = bits_per_weight(config.quant)
        components = in_parts(config, components, bits=of_codes, layers=layers, kind=kind)
    total = sum(components.values())
    below, above = _CPU_SPREAD if on_cpu else _CUDA_SPREAD
    # The lower bound counts only documents that are certain to occur, and no file-backed pages,
    # which the system can reclaim.
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
        + ("; the optimizer's state is paged to host memory" if is_paged and not on_cpu else "")
        + (f"; {messages.size(sum(codes))} of codes are in host memory" if codes else ""),
    )


def _copied(config: RunConfig, parameters: int) -> int:
    """Return the number of parameters that are copied to the compute format for products."""
    has_f32 = config.quant.compute_dtype is ComputeDtype.f32
    if has_f32 and not config.backend.spec.adapts_model:
        return 0
    return parameters


def _reference(config: RunConfig, shape: Shape, width: int) -> dict[str, int]:
    """Return the bytes of the base's states at supervised positions if the objective needs them."""
    spec = config.objective.spec
    if not spec.needs_reference or spec.passes_before(config.objective):
        return {}
    positions = config.data.seq_len * config.data.micro_batch_size
    return {"reference": positions * shape.hidden_size * width}


def _teacher(config: RunConfig, shape: Shape, kind: str, width: int) -> int:
    """Return the bytes of the teacher's weights, its states, and a chunk of its logits."""
    named = teacher_of(config.objective, config.model)
    if named is None:
        return 0
    teacher = shape_of(named)
    states = config.data.seq_len * config.data.micro_batch_size * teacher.hidden_size
    if getattr(config.objective, "hidden_weight", 0):  # all layers' states, until its pass ends
        states *= teacher.num_hidden_layers + 1
    logits = _head_positions(config, shape, kind) * teacher.vocab_size
    return (teacher.parameters + states + logits) * width


def _compared_states(config: RunConfig, shape: Shape, width: int) -> dict[str, int]:
    """Return the bytes of each layer's output states and of the compared ones' f32 differences."""
    many = shape.num_hidden_layers
    compared = len(matched_layers(config.objective, many, many))
    if not compared:
        return {}
    values = config.data.seq_len * config.data.micro_batch_size * shape.hidden_size
    return {"compared hidden states": values * ((many + 1) * width + compared * _F32)}


def compares(config: RunConfig) -> bool:
    """Return whether the run compares its model with transformers before the first step."""
    return config.data.contract.probe and config.backend.spec.is_causal


def _comparison(
    config: RunConfig, shape: Shape, components: Mapping[str, int], kept: Mapping[str, float]
) -> dict[str, int]:
    """Return the memory that the comparison with transformers before step 1 needs beyond training.

    It holds f32 copies of the unquantized weights, but neither moments nor long activations. For
    an unquantized base the copies amount to one or two more bases, and the comparison is skipped
    if they do not fit.
    """
    if not (compares(config) and config.quant.is_quantized) or is_in_parts(config):
        return {}
    freed = sum(components[name] for name in ("optimizer", "head chunk", "allocator", *kept))
    beyond = shape.embedding_parameters * _F32 - freed
    return {"comparison before step 1": beyond} if beyond > 0 else {}


def _process(config: RunConfig) -> str:
    return "one" if config.trainer.world_size == 1 else f"each of {config.trainer.world_size}"


def _holes(kept: Mapping[str, float], factor: Mapping[str, float]) -> float:
    """Return the allocator's overhead on top of the saved tensors."""
    return sum((factor[name] - 1) * value for name, value in kept.items())


def _kernels(documents: Documents) -> float:
    """Return the memory of the kernels of all shapes; holes of larger tensors can hold them."""
    shapes = -(-documents.longest // BUCKET) if documents.varied else 1
    return float(_KERNELS_PER_SHAPE * min(shapes, _MOST_SHAPES))


def _sums_of_experts(config: RunConfig, shape: Shape, *, width: int, again: bool) -> dict[str, int]:
    """Return the additional memory of adapted experts.

    PEFT computes with ``W + s·B A``, which the backward pass needs again and whose gradient is
    just as large; both exist for one layer at a time.
    """
    if not config.backend.spec.adapts_model:
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


def _updates(config: RunConfig, shape: Shape, *, width: int, again: bool) -> dict[str, int]:
    """Return the memory of full-size updates ``ΔW``, which some methods materialize.

    Each is kept for the backward pass in the compute format. Computing one needs two more of the
    largest in f32.
    """
    if not config.backend.spec.adapts_model:
        return {}
    lora, layers, largest = config.lora, dict[int | None, int](), 0
    for one in modules_of(config, shape):
        size = lora.spec.formed(r=lora.r, out=one.out, width=one.width)
        layers[one.layer] = layers.get(one.layer, 0) + size
        largest = max(largest, size)
    if not largest:
        return {}
    kept = max(layers.values()) if again else sum(layers.values())
    return {"updates of whole weights": kept * width + 2 * largest * _F32}


def _projections(config: RunConfig, shape: Shape, *, width: int) -> dict[str, int]:
    """Return the memory of random matrices that all layers of an adapter share."""
    if not config.backend.spec.adapts_model:
        return {}
    sizes = [(one.out, one.width) for one in modules_of(config, shape)]
    found = config.lora.spec.projections(config.lora, sizes)
    if not found:
        return {}
    return {"shared projections": config.lora.spec.shared_bytes(found, width=width)}


def _original_weights(config: RunConfig, shape: Shape, bits: float) -> dict[str, int]:
    """Return the memory of the original weights, if initialisation replaces them by a residual.

    An initialisation from gradients also holds these gradients until training begins.
    """
    if not config.lora.start_changes_base:
        return {}
    weights = sum(one.out * one.width for one in modules_of(config, shape))
    found = {"plain weights, for the base": round(weights * bits / 8)}
    if config.lora.init.spec.from_gradients:
        found["gradients of weights, before step 1"] = weights * _F32
    return found


def _head_positions(config: RunConfig, shape: Shape, kind: str) -> int:
    """Return the positions whose logits exist at the same time."""
    every = config.data.seq_len * config.data.micro_batch_size
    objective, on_gpu = config.objective, kind == "cuda"
    found = objective.spec.head_positions(objective, every, shape.vocab_size, on_gpu=on_gpu)
    return min(every, found)


EXPERTS_DENSE = "experts, not quantized"
OFFLOADED = "offloaded codes, of two linear layers at a time"

WHOLE = "base, whole while it is loaded or scored"
# Layers that are unsharded at the same time: the current one, the prefetched one, and the
# all-gather buffer. From PyTorch's code (fully_shard); not measured on a GPU.
_AT_ONCE = 3
_RESTING = ("base weights", EXPERTS_DENSE, "embedding and head", "adapter", "framework")


def is_in_parts(config: RunConfig) -> bool:
    """Return whether the base is sharded across processes."""
    return config.trainer.sharing is Strategy.fsdp and config.trainer.world_size > 1


def in_parts(
    config: RunConfig, components: dict[str, int], *, bits: float, layers: int, kind: str
) -> dict[str, int]:
    """Convert the components of an unsharded process to those of one of several.

    Args:
        config: the whole configuration.
        components: bytes by component, with the unsharded base.
        bits: bits of a quantized weight, including its share of the scales.
        layers: decoder layers.
        kind: "cpu" or "cuda".
    """
    whole, code_bits = components["base weights"], config.quant.spec.code_bits
    codes = whole if code_bits is None else round(whole * code_bits / bits)
    dense = components.get(EXPERTS_DENSE, 0)
    many = config.trainer.world_size
    parts = {
        **components,
        "base weights": whole - codes + -(-codes // many),
        **({EXPERTS_DENSE: -(-dense // many)} if dense else {}),
        "gathered layers": min(_AT_ONCE, layers) * (codes + dense) // layers,
    }
    alone = sum(components.get(name, 0) for name in _RESTING)
    if kind == "cpu":  # one process of a machine loads while the others hold their shards
        many, resting = config.trainer.devices, sum(parts.get(name, 0) for name in _RESTING)
        peak = (alone + (many - 1) * resting) // many
    else:  # loaded in host memory, and scored by the first process only
        peak = alone if config.suite.spec.scores else 0
    return parts | {WHOLE: max(0, peak - sum(parts.values()))}


def trained_parameters(config: RunConfig, shape: Shape) -> int:
    """Count trained parameters; norms and biases only for a verified family."""
    base = shape.total_parameters
    if not config.backend.spec.has_adapter:
        return base
    stack = proxy_stack(config, shape)
    if stack is None:
        learns = trains_base(config.backend, config.model.source)
        return adapter_parameters(config.lora, shape) + learns * base
    d = shape.hidden_size
    return config.lora.r * (len(stack.middle) * 2 * d + shape.vocab_size + d)


def _completions(
    config: RunConfig, shape: Shape, width: int, *, has_bf16: bool | None
) -> dict[str, int]:
    """Return what answers of a suite take, with the weights that are converted once for them."""
    found = {"completions": _COMPLETIONS}
    if not config.backend.spec.is_causal or is_in_parts(config):
        return found
    linears, head = frozen_linears(config, shape), shape.vocab_size * shape.hidden_size
    choices = [linears * width] if config.quant.is_quantized else []
    if width < _F32 and has_bf16 is False and config.backend.spec.has_adapter:
        # Products are in f32, and so are the head's.
        choices.insert(0, (linears + head) * _F32)
    kept = next((one for one in choices if one <= MOST_DEQUANTIZED), None)
    return found | ({"base, converted for completions": kept} if kept else {})


def frozen_linears(config: RunConfig, shape: Shape) -> int:
    """Count the weights of the linear layers that a token passes through, without the head."""
    stack = proxy_stack(config, shape)
    if stack is None:
        return shape.linear_parameters
    return len(stack.middle) * shape.hidden_size**2


def described_modules(config: RunConfig, shape: Shape) -> str:
    """Describe the adapted modules in one line."""
    if not config.backend.spec.has_adapter:
        return "every weight"
    stack = proxy_stack(config, shape)
    if stack is None:
        return described(chosen(config.lora, shape), shape.num_hidden_layers)
    middle = len(stack.middle)
    return f"mid in {middle} of {shape.num_hidden_layers} layers; lm_head: {middle + 1} modules"
