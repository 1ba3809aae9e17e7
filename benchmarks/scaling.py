"""Memory, time and communication of QLoRA on 1 to 512 GPUs, by formula, next to published runs.

    python benchmarks/scaling.py

Nothing is measured on a GPU here. Memory is what a plan states. Time has two bounds: the layers'
weights are gathered entirely while the device computes, or entirely before. A device computes at
one rate, calibrated on one published run of it, and every other published run is then a test of
the formula. Published runs are of other programs: their rows, kernels and head differ from ours.
Not in the formula: units of the GPU that small batches leave idle. Assumed, not measured: what it
takes to start a collective operation (`LATENCY_S`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import record

from mens_exp.config.compose import compose, typed
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import adapter_parameters
from mens_exp.planning.activations import Documents
from mens_exp.planning.memory import base_bits, memory, offloaded_codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from record import Figure

    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.planning.memory import Memory

QUESTION = "What do memory, time and communication come to on 1 to 512 GPUs, by formula?"
GIB, F32 = 2**30, 4
NEAR = 1.2
LATENCY_S = 10e-6  # per process in a ring; assumed
# Layers, hidden size, MLP, query heads, KV heads, vocabulary, from their config.json.
SIZES = {
    "Llama 2 7B": (32, 4096, 11008, 32, 32, 32000),
    "Yi 34B": (60, 7168, 20480, 56, 8, 64000),
    "Llama 2 70B": (80, 8192, 28672, 64, 8, 32000),
    "Qwen 7B": (32, 4096, 11008, 32, 32, 151936),
    "Qwen 14B": (40, 5120, 13696, 40, 40, 152064),
    "Qwen 72B": (80, 8192, 24576, 64, 64, 152064),
    "8B": (32, 4096, 14336, 32, 8, 128256),  # Llama 3
    "70B": (80, 8192, 28672, 64, 8, 128256),
    "405B": (126, 16384, 53248, 128, 8, 128256),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A fine-tuning job: model, devices, and micro-batch per device."""

    model: str
    gpus: int
    batch: int
    tokens: int
    sharded: bool = True
    rank: int = 64  # as in the published runs
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The job in words."""
        strategy = "" if self.gpus == 1 else ", fsdp" if self.sharded else ", ddp"
        count = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}{strategy}"
        return f"{self.model}, {count}, {self.batch} × {self.tokens}"

    def config(self) -> RunConfig:
        """Compose the job's configuration, with the model's dimensions and random weights."""
        layers, hidden, mlp, heads, kv, vocabulary = SIZES[self.model]
        sizes = (
            f"num_hidden_layers={layers}",
            f"hidden_size={hidden}",
            f"intermediate_size={mlp}",
            f"num_attention_heads={heads}",
            f"num_key_value_heads={kv}",
            f"vocab_size={vocabulary}",
            "tie_word_embeddings=false",
            "gradient_checkpointing=on",
        )
        devices = f"trainer={'fsdp' if self.sharded else 'ddp'}" if self.gpus > 1 else "trainer=gpu"
        overrides = [
            *("task=plan", "logger=none", "suite=none", "model=random", "model.family=llama"),
            *(f"model.{one}" for one in sizes),
            *(devices, f"lora.r={self.rank}", f"data.seq_len={self.tokens}"),
            f"data.micro_batch_size={self.batch}",
            *([f"trainer.devices={self.gpus}", "trainer.accelerator=gpu"] if self.gpus > 1 else []),
            *(["quant.storage_dtype=bf16"] if self.gpus > 1 and self.sharded else []),
            *self.more,
        ]
        return typed(compose([overrides])[0].values)

    def memory(self) -> Memory:
        """Return the planned memory per process."""
        config = self.config()
        documents = Documents(longest=self.tokens, typical=self.tokens, varied=False)
        return memory(config, shape_of(config.model), documents, kind="cuda")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU in its machine.

    Attributes:
        rate: FLOP/s in the matrix products of a step.
        link: bytes/s received from other devices.
    """

    rate: float
    link: float


def flops_per_token(shape: Shape, tokens: int) -> float:
    """Return the FLOPs per token: frozen weights, checkpointing, and causal attention.

    A frozen weight takes 2 FLOPs forward, 2 for the gradient of its input, and 2 when activations
    are recomputed; the head takes 4. Those of the adapter are neglected (about r/d of the total).
    Attention: 2 · tokens · d forward, the same for recomputation, and 2.5 times that backward
    (FlashAttention-2, arXiv:2307.08691).
    """
    head = shape.vocab_size * shape.hidden_size
    width = shape.num_attention_heads * shape.head_dim
    attention = 4.5 * 2 * tokens * width * shape.num_hidden_layers
    return 6 * shape.linear_parameters + 4 * head + attention


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds per micro-batch on each process."""

    compute: float
    gather: float
    latency: float
    reduce: float  # per optimizer step of one micro-batch

    @property
    def best(self) -> float:
        """Time if all weights are gathered while the device computes."""
        return max(self.compute, self.gather + self.latency) + self.reduce

    @property
    def worst(self) -> float:
        """Time if no weight is gathered while the device computes."""
        return self.compute + self.gather + self.latency + self.reduce


def times(job: Job, device: Device, *, gathers_head: bool) -> Times:
    """Return the times of a job.

    Args:
        job: the job.
        device: its devices.
        gathers_head: whether embedding and head are also sharded, in 16 bits, as FSDP does by
            default; here every process holds them.
    """
    config = job.config()
    shape = shape_of(config.model)
    share = (job.gpus - 1) / job.gpus
    many = job.batch * job.tokens
    weights = 0.0
    if job.sharded and job.gpus > 1:
        weights = shape.linear_parameters * base_bits(config.quant, shape) / 8
        weights += shape.embedding_parameters * 2 if gathers_head else 0
    ring = 2 * shape.num_hidden_layers * (job.gpus - 1) * LATENCY_S if weights else 0.0
    gradients = adapter_parameters(config.lora, shape) * F32
    return Times(
        compute=many * flops_per_token(shape, job.tokens) / device.rate,
        gather=2 * weights * share / device.link,  # forward and backward
        latency=ring,
        reduce=2 * share * gradients / device.link,
    )


def calibrated(job: Job, seconds: float, link: float) -> Device:
    """Return the device on which a job without gathering takes `seconds` per micro-batch."""
    shape = shape_of(job.config().model)
    flops = job.batch * job.tokens * flops_per_token(shape, job.tokens)
    return Device(rate=flops / seconds, link=link)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Published runs on one kind of device: those for calibration, and the others.

    Attributes:
        source: the publication.
        link: bytes/s received per device, from its specification; `link_from` replaces it.
        rate_from: the job that calibrates the rate, with seconds per micro-batch.
        link_from: a job whose time beyond computation calibrates the link.
        others: jobs with seconds per micro-batch.
        peaks: jobs with their peak memory in GiB.
    """

    source: str
    link: float
    rate_from: tuple[Job, float]
    link_from: tuple[Job, float] | None = None
    others: tuple[tuple[Job, float], ...] = ()
    peaks: tuple[tuple[Job, float], ...] = ()

    def device(self) -> Device:
        """Return the device calibrated by the published runs."""
        found = calibrated(*self.rate_from, link=self.link)
        if self.link_from is None:
            return found
        job, seconds = self.link_from
        alone = times(job, found, gathers_head=True)
        moved = (alone.gather + alone.reduce) * found.link
        return Device(rate=found.rate, link=moved / (seconds - alone.compute - alone.latency))


def _of(model: str, gpus: int, batch: int, tokens: int, *, sharded: bool = True) -> Job:
    # Logits of all positions at once, as in those programs.
    positions = f"objective.chunk_tokens={batch * tokens}"
    return Job(
        model=model, gpus=gpus, batch=batch, tokens=tokens, sharded=sharded, more=(positions,)
    )


def _each(total: float, job: Job, samples: int = 1024) -> float:
    """Return the seconds per micro-batch, given the seconds for all samples."""
    return total * job.batch * job.gpus / samples


def _rows(*rows: tuple[Job, float]) -> tuple[tuple[Job, float], ...]:
    return tuple((job, _each(total, job)) for job, total in rows)


_FSDP_QLORA = "AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md: 1,024 samples"
_QWEN = "QwenLM/Qwen, README.md, Profiling of Memory and Speed: 8 micro-batches"
_DDP = _of("Llama 2 7B", 2, 8, 2048, sharded=False)
_SHORT = _of("Llama 2 7B", 2, 1, 512)
_ONE = _of("Qwen 7B", 1, 1, 8192)
_EIGHT = _of("Llama 2 70B", 8, 4, 2048)
PUBLISHED = {
    "2 × RTX 3090": Published(
        source=_FSDP_QLORA,
        link=1e9,
        rate_from=(_DDP, _each(875, _DDP)),
        link_from=(_SHORT, _each(1082, _SHORT)),
        others=_rows(
            (_of("Llama 2 7B", 2, 1, 2048), 1564),
            (_of("Llama 2 7B", 2, 4, 2048), 998),
            (_of("Llama 2 7B", 2, 10, 2048), 936),
            (_of("Yi 34B", 2, 2, 2048), 5041),
        ),
        peaks=(
            (_SHORT, 4.98),
            (_of("Llama 2 7B", 2, 1, 2048), 5.21),
            (_of("Llama 2 7B", 2, 4, 2048), 11.22),
            (_of("Llama 2 7B", 2, 10, 2048), 20.97),
            (_DDP, 20.94),
            (_of("Yi 34B", 2, 2, 2048), 23.05),
        ),
    ),
    "2 × RTX 4090": Published(
        source=_FSDP_QLORA,
        link=32e9 * 0.8,  # PCIe 4.0 x16, minus protocol overhead
        rate_from=(_DDP, _each(450, _DDP)),
        others=_rows(
            (_of("Llama 2 7B", 2, 10, 2048), 466),
            (_of("Yi 34B", 2, 2, 2048), 2072),
        ),
    ),
    "A100 40 GB": Published(
        source=_FSDP_QLORA,
        link=300e9,  # NVLink 3, one direction
        rate_from=(_EIGHT, _each(672, _EIGHT)),
        others=_rows(
            (_of("Llama 2 70B", 4, 4, 2048), 1266),
            (_of("Llama 2 70B", 2, 1, 2048), 3277),
        ),
    ),
    "A100 80 GB": Published(
        source=_QWEN,
        link=300e9,
        rate_from=(_ONE, 22.3 / 8),
        others=(
            (_of("Qwen 7B", 1, 1, 2048), 7.0 / 8),
            (_of("Qwen 14B", 1, 1, 2048), 11.8 / 8),
            (_of("Qwen 14B", 1, 1, 8192), 38.3 / 8),
            (_of("Qwen 72B", 1, 1, 2048), 59.5 / 8),
            (_of("Qwen 72B", 1, 1, 8192), 179.8 / 8),
        ),
        peaks=(
            (_of("Qwen 7B", 1, 1, 2048), 13.9),
            (_ONE, 23.5),
            (_of("Qwen 14B", 1, 1, 2048), 19.9),
            (_of("Qwen 14B", 1, 1, 8192), 27.9),
            (_of("Qwen 72B", 1, 1, 2048), 64.1),
            (_of("Qwen 72B", 1, 1, 8192), 75.6),
        ),
    ),
}
# Four H100 of 80 GB took 667 s for Llama 2 70B, micro-batches of 8 (AnswerDotAI/fsdp_qlora), which
# gives their rate. Eight per machine with NVLink 4, and a 400 Gbit/s network adapter each.
_FOUR = _of("Llama 2 70B", 4, 8, 2048)
H100 = calibrated(_FOUR, _each(667, _FOUR), link=450e9)
ACROSS = Device(rate=H100.rate, link=50e9)
IN_A_MACHINE = 8
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHOWN = (1, 8, 64, 512)
HELD_BY_H100, HELD_BY_4090 = 80e9, 24e9  # bytes
PCIE = 50e9  # bytes/s of PCIe 5 x16 from page-locked memory; assumed
PASSES = 3  # that read a base's codes: forward, recomputed, backward


def main() -> None:
    """Compare with published runs, then forecast."""
    given = record.begin(record.command_line(__file__, __doc__))
    known = dict(list(PUBLISHED.items())[-1:]) if given.smallest else PUBLISHED
    figures = [*of_published(known)]
    for model in ("8B",) if given.smallest else ("8B", "70B", "405B"):
        figures += forecast(model)
    record.finish(QUESTION, figures, given)


def of_published(known: dict[str, Published]) -> Iterator[Figure]:
    """Yield predicted and published times and peaks, and the number within bounds."""
    near, inside = [], []
    for name, one in known.items():
        device = one.device()
        for job, seconds in one.others:
            found = times(job, device, gathers_head=True)
            near.append(found.best / NEAR <= seconds <= found.worst * NEAR)
            bounds = {"at best": found.best, "at worst": found.worst}
            for bound, value in bounds.items() if found.worst > found.best else [("", found.best)]:
                figure_name = f"{name}: {job.name}: time {bound}".rstrip()
                yield record.figure(figure_name, value, "s", beside=("published", seconds))
        for job, peak in one.peaks:
            planned = job.memory()
            inside.append(planned.low <= peak * GIB <= planned.high)
            yield record.figure(
                f"{name}: {job.name}: planned peak",
                planned.estimate / GIB,
                "GiB",
                beside=("published", peak),
            )
    counted = {
        "times at most 20 % outside the bounds": near,
        "peaks in the plan's interval": inside,
    }
    for name, each in counted.items():
        share = sum(each) / len(each)
        yield record.figure(f"published {name}", share, "frac", record.Better.HIGHER)


def forecast(model: str) -> Iterator[Figure]:
    """Yield a model's memory and rates on H100s, and the limits of memory and scaling."""
    jobs = [Job(model=model, gpus=gpus, batch=1, tokens=2048, rank=16) for gpus in GPUS]
    for job in (one for one in jobs if one.gpus in SHOWN):
        name, planned, found = f"{model} on {job.gpus}", job.memory(), _on_h100(job)
        room = ("80 GB", HELD_BY_H100 / GIB)
        yield record.figure(
            f"{name}: planned peak of each", planned.estimate / GIB, "GiB", None, room
        )
        linear = ("without communication", job.gpus * job.tokens / found.compute)
        for bound, seconds in (("best", found.best), ("worst", found.worst)):
            rate = job.gpus * job.tokens / seconds
            yield record.figure(f"{name}: at {bound}", rate, "tokens/s", None, linear)
    holding = next(one.gpus for one in jobs if one.memory().estimate <= HELD_BY_H100)
    yield record.figure(f"{model}: GPUs that hold it", holding, "GPUs")
    yield from _offloaded(replace(jobs[0], more=("model.offload=true",)))
    waiting = next((one.gpus for one in jobs if _waits(_on_h100(one))), None)
    if waiting is not None:
        yield record.figure(f"{model}: GPUs that wait for the network at best", waiting, "GPUs")


def _offloaded(job: Job) -> Iterator[Figure]:
    """Yield the memory of a GPU whose base is in host memory, and the time to copy its codes."""
    config, planned = job.config(), job.memory()
    codes = sum(offloaded_codes(config, shape_of(config.model)))
    held = ("24 GB", HELD_BY_4090 / GIB)
    yield record.figure(
        f"{job.model} on 1, offloaded: planned peak", planned.estimate / GIB, "GiB", None, held
    )
    copied = PASSES * codes / PCIE
    computed = _on_h100(job).compute
    name = f"{job.model} on 1, offloaded: copies of a micro-batch"
    yield record.figure(name, copied, "s", None, ("its computation", computed))


def _on_h100(job: Job) -> Times:
    device = H100 if job.gpus <= IN_A_MACHINE else ACROSS
    return times(job, device, gathers_head=False)


def _waits(found: Times) -> bool:
    return found.gather + found.latency > found.compute


if __name__ == "__main__":
    main()
