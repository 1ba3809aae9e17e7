"""Checks of the machine: memory, disk, kernels, number formats, processes, tools, packages."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from mens_exp.config.evaluation import BubblewrapSandbox, ExecutingSandbox
from mens_exp.config.fields import range_problems
from mens_exp.config.logger import TensorboardLogger
from mens_exp.config.model import Kernels
from mens_exp.config.optim import (
    ApolloConfig,
    GaloreConfig,
    LowRankConfig,
    MuonConfig,
    PagedAdamw8bitConfig,
    ProdigyConfig,
    ScheduleFreeConfig,
)
from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import ConfigError, MensError, MissingExtra, RequestError, SetupError
from mens_exp.layout.modules import linear_weights
from mens_exp.layout.shape import shape_of
from mens_exp.planning import compiling, kernels, machine, messages
from mens_exp.planning.forecast import (
    attribution_memory,
    device_of_plan,
    disk,
    documents_of,
    for_all_on_a_machine,
    forecast,
)
from mens_exp.planning.machine import may_use_gpu, of_torchrun
from mens_exp.planning.memory import WHOLE, is_in_parts, offloaded_codes
from mens_exp.rows.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.config.trainer import TrainerConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.planning.forecast import Disk
    from mens_exp.planning.machine import Rank
    from mens_exp.planning.memory import Memory

_GIB = 1 << 30


def check_machine(config: RunConfig) -> Iterator[MensError]:
    """Yield the machine's shortcomings for a run; a plan shows them next to its figures instead."""
    if config.task.name == "plan" or any(range_problems(config)):
        return
    try:
        shape = shape_of(config.model)
    except MensError:
        return  # reported by the check of the model's files
    cache = cache_root()
    device = machine.look(config.trainer.accelerator)
    if config.task.name == "attribute":
        memory = attribution_memory(config, shape)
    else:
        memory = forecast(config, shape, documents_of(config, {}), device, cache).memory
    errors, _ = findings(config, device, memory, disk(config, shape, cache, None), cache)
    yield from errors


def findings(
    config: RunConfig, device: machine.Machine, expected: Memory, written: Disk, cache: Path
) -> tuple[list[MensError], list[str]]:
    """Return the errors that prevent the run on this device, and warnings."""
    errors = [*_formats(config, device), *_disk_errors(written, cache)]
    if config.trainer.device_gib is None:  # libraries of another device are unknown
        errors = [*_kernels(device), *errors]
    warnings = []
    low, high = (
        for_all_on_a_machine(config, bound, device.kind) for bound in (expected.low, expected.high)
    )
    # On a CPU, loading also holds the whole base in memory.
    scored = expected.components.get(WHOLE, 0) if device.kind == "cuda" else 0
    unscored = low * (1 - scored / expected.estimate)
    if device.free_bytes is not None:
        if low > device.free_bytes:
            error = messages.memory_too_small(
                device.name,
                low,
                device.free_bytes,
                attributes=config.task.name == "attribute",
                by_scoring=unscored <= device.free_bytes,
            )
            errors.append(error)
        elif high > device.free_bytes:
            bounds = (low, high, device.free_bytes)
            warnings.append(messages.memory_may_be_small(device.name, *bounds))
    warnings += _beyond_class(config, device, low, high)
    if device.kind == "cpu" and device.has_bf16 is False and _in_bf16(config):
        warnings.append(messages.bf16_emulated(device.name))
    return errors, warnings


def _beyond_class(config: RunConfig, device: machine.Machine, low: int, high: int) -> Iterator[str]:
    """Yield a warning if GPUs of the preset's class may not have enough memory for the run."""
    trainer = config.trainer
    if device.kind != "cuda" or trainer.class_gib is None or trainer.device_gib is not None:
        return
    if high > trainer.class_gib * _GIB:
        yield messages.memory_beyond_class(
            trainer.class_gib,
            low,
            high,
            micro_batch=config.data.micro_batch_size,
            accumulated=trainer.accumulate_grad_batches,
        )


def _kernels(device: machine.Machine) -> Iterator[MensError]:
    """Check for the library that bitsandbytes would load (its cextension.py: same CUDA major)."""
    if device.kind == "cuda" and device.torch is not None and device.torch_cuda is None:
        yield messages.torch_without_cuda(device.torch)
        return
    if device.libraries is None:
        yield messages.no_four_bit_kernels(device.name, "no bitsandbytes", "bitsandbytes")
    elif device.kind == "cpu":
        if "cpu" not in device.libraries:
            found = ", ".join(sorted(device.libraries)) or "no library"
            yield messages.no_four_bit_kernels(device.name, found, "libbitsandbytes_cpu")
    elif device.torch_cuda is not None:
        major = device.torch_cuda.partition(".")[0]
        have = sorted(name for name in device.libraries if name.startswith("cuda"))
        if not any(name.removeprefix("cuda")[: len(major)] == major for name in have):
            found = ", ".join(have) or "no CUDA library"
            expected = f"one for CUDA {device.torch_cuda}"
            yield messages.no_four_bit_kernels(device.name, found, expected)


def _formats(config: RunConfig, device: machine.Machine) -> Iterator[MensError]:
    if device.kind == "cuda" and device.has_bf16 is False and _in_bf16(config):
        yield messages.bf16_unsupported(device.name, str(device.capability))


def _in_bf16(config: RunConfig) -> bool:
    return config.quant.compute_dtype is ComputeDtype.bf16


def _disk_errors(written: Disk, cache: Path) -> Iterator[MensError]:
    """Compare the sizes of the run directory and the cache with the free disk space."""
    run, run_free = machine.space(Path.cwd())
    base, base_free = machine.space(cache)
    in_run = f"checkpoints {messages.size(written.checkpoint * (written.checkpoints_kept + 1))}, "
    in_run += f"adapter {messages.size(written.adapter + written.peft)}"
    in_base = f"the base model {messages.size(written.base)}"
    if run.stat().st_dev == base.stat().st_dev:
        needed = written.in_run + written.base
        if needed > run_free:
            yield messages.disk_too_small(str(run), needed, run_free, f"{in_run}, {in_base}")
        return
    if written.in_run > run_free:
        yield messages.disk_too_small(str(run), written.in_run, run_free, in_run)
    if written.base > base_free:
        yield messages.disk_too_small(str(base), written.base, base_free, in_base)


# Peak learning rates of published QLoRA runs with AdamW (arXiv:2305.14314, table 9): 7B and 13B,
# then 33B and 65B. Smaller models have none; our 135M model trains best at ten times the first.
_FEWEST, _MANY = 3e9, 2e10  # parameters
_RATE, _RATE_OF_MANY = 2e-4, 1e-4
_FAR = 4.0  # factor, in either direction; unverified guess


_HAS_MUON = Version("2.9")
_HAS_FP8 = Version("8.9")  # compute capability; from NVIDIA's table of tensor cores


def check_optimizer(config: RunConfig) -> Iterator[MensError]:
    """Yield an error for an optimizer that this machine cannot run."""
    accelerator = config.trainer.accelerator
    if isinstance(config.optim, PagedAdamw8bitConfig) and not may_use_gpu(accelerator):
        yield ConfigError(
            "paged memory needs a CUDA GPU",
            where="optim",
            found=f"{config.optim.name} with trainer={accelerator}, and no GPU to use",
            expected="optim=adamw, adamw_8bit or lion, which run on CPU",
            remedy="use optim=adamw_8bit, which is the same arithmetic, or optim=adamw",
        )
    if isinstance(config.optim, MuonConfig) and Version(version("torch")) < _HAS_MUON:
        yield SetupError(
            "this torch has no Muon",
            where="optim",
            found=f"torch {version('torch')}",
            expected=f"torch {_HAS_MUON} or newer",
            remedy="install a newer torch, or choose optim=adamw",
        )
    package, extra = _PACKAGES.get(type(config.optim), (None, None))
    if package is not None and find_spec(package) is None:
        yield MissingExtra(
            f"{package} is not installed",
            where="optim",
            found=config.optim.name,
            expected=f"the package {package}, or another optimizer, such as optim=adamw",
            remedy=f"pip install 'mens-exp[{extra}]'",
        )
    if isinstance(config.optim, LowRankConfig) and not any(range_problems(config.model)):
        yield from _rank_problems(config, config.optim)


def _rank_problems(config: RunConfig, optim: LowRankConfig) -> Iterator[MensError]:
    """Yield an error if no weight exceeds the rank, so that AdamW would train all of them."""
    largest = max(min(sides) for sides in linear_weights(shape_of(config.model)).values())
    if not optim.projects(largest, largest):
        yield ConfigError(
            "no linear weight of the decoder is large enough to be projected",
            where="optim.rank",
            found=optim.rank,
            expected=f"less than {largest}, the largest shorter side of such a weight",
            remedy=f"set optim.rank={max(1, largest // 4)}, or choose optim=adamw",
        )


def check_quantizers(config: RunConfig) -> Iterator[SetupError]:
    """Yield the quantizers whose package is not installed."""
    for one in dict.fromkeys([config.quant.quant_type, *config.quant.type_pattern.values()]):
        package = one.spec.package
        if package is not None and find_spec(package) is None:
            yield MissingExtra(
                f"{package} is not installed",
                where="quant",
                found=one.value,
                expected=f"the package {package}, or another quantizer, such as quant=nf4",
                remedy=f"pip install 'mens-exp[{package}]'",
            )


def check_kernels(config: RunConfig) -> Iterator[SetupError]:
    """Yield an error if Liger's kernels were requested and none of them can run."""
    if config.model.kernels is not Kernels.liger:
        return
    on_gpu = device_of_plan(config).kind == "cuda"
    reason = kernels.why_not_at_all(config, on_gpu=on_gpu)
    if reason is None:
        return
    lacks = on_gpu and not kernels.is_installed()
    yield (MissingExtra if lacks else SetupError)(
        "Liger-Kernel cannot run",
        where="model.kernels",
        found=f"liger, but {reason}",
        expected="a CUDA GPU, the package liger-kernel, and backend=qlora or backend=lora",
        remedy=("pip install 'mens-exp[liger]', or " if lacks else "")
        + "choose model.kernels=auto, which uses torch where Liger-Kernel cannot run",
    )


def check_offload(config: RunConfig) -> Iterator[SetupError]:
    """Yield an error if the base is to be offloaded without a GPU, or the host cannot hold it."""
    if not config.model.offload or any(range_problems(config.model)):
        return
    codes = sum(offloaded_codes(config, shape_of(config.model)))
    if device_of_plan(config).kind != "cuda":
        yield SetupError(
            "there is no device to offload the base from",
            where="model.offload",
            found="true, on a CPU",
            expected="a CUDA GPU",
            remedy="set model.offload=false: on a CPU, the base is in host memory",
        )
        return
    total = machine.look("cpu").total_bytes
    on_each = codes * config.trainer.devices
    if total is not None and on_each > total:
        yield SetupError(
            "the host cannot hold the base",
            where="model.offload",
            found=f"{messages.size(on_each)} of codes, {messages.size(total)} of memory",
            expected="host memory for the codes of each process",
            remedy="choose a smaller base, or trainer.devices=1",
        )


def check_fp8(config: RunConfig) -> Iterator[SetupError]:
    """Yield an error if the device does not multiply in FP8."""
    if not config.model.fp8:
        return
    device = device_of_plan(config)
    has_fp8 = device.capability is None or Version(device.capability) >= _HAS_FP8
    if device.kind != "cuda" or not has_fp8:
        capability = "" if has_fp8 else f", compute capability {device.capability}"
        yield SetupError(
            "the device does not multiply in FP8",
            where="model.fp8",
            found=f"{device.name}{capability}",
            expected="a CUDA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)",
            remedy="set model.fp8=false",
        )


def check_compiling(config: RunConfig) -> Iterator[SetupError]:
    """Yield an error if compiled layers were requested and cannot be had."""
    if config.trainer.compile is not True:
        return
    reason = compiling.why_not(config, kind=device_of_plan(config).kind)
    if reason is not None:
        yield SetupError(
            "the decoder layers cannot be compiled",
            where="trainer.compile",
            found=f"true, but {reason}",
            remedy="choose trainer.compile=auto, which compiles where it can and pays",
        )


# Optimizers of other packages: the package's name, and the extra that installs it.
_PACKAGES: dict[type, tuple[str, str]] = {
    ApolloConfig: ("apollo_torch", "apollo"),
    GaloreConfig: ("pytorch_optimizer", "galore"),
    ProdigyConfig: ("prodigyopt", "prodigy"),
    ScheduleFreeConfig: ("schedulefree", "schedule-free"),
}


def rate_warnings(config: RunConfig, shape: Shape) -> Iterator[str]:
    """Yield a warning if an adapter's peak rate is far from those of published runs."""
    if isinstance(config.optim, ProdigyConfig):
        if not 1 / _FAR <= config.optim.lr <= _FAR:
            yield (
                f"optim.lr={config.optim.lr:g} multiplies the rate that Prodigy estimates, and is "
                "not a rate itself. Next: leave optim.lr at 1, and tune optim.d_coef"
            )
        return
    if not config.backend.spec.adapts_model or shape.parameters < _FEWEST:
        return
    published = _RATE if shape.parameters < _MANY else _RATE_OF_MANY
    usual = published / config.optim.usual_parts
    times = config.optim.lr / usual
    if not 1 / _FAR <= times <= _FAR:
        yield (
            f"optim.lr={config.optim.lr:g} is {times:.2g} times the rate that published QLoRA runs "
            f"of this size train with ({usual:g}; arXiv:2305.14314, table 9). "
            f"Next: set optim.lr={usual:g}, or sweep it"
        )


_KEEPS_WHOLE = Version("2.7")  # fully_shard's ignored_params


def started_for_one(where: str, found: str) -> RequestError:
    """Return an error for a single-process command that torchrun started."""
    return RequestError(
        "torchrun started several processes for a task that runs in one",
        where=where,
        found=found,
        expected="a training run of several processes",
        remedy="start it without torchrun, or choose task=train trainer=ddp",
    )


def check_processes(config: RunConfig, *, by_slurm: bool = False) -> Iterator[MensError]:
    """Yield conflicts with the way this process was started, and missing devices.

    Args:
        config: the whole configuration.
        by_slurm: whether Slurm will start the processes on other machines.
    """
    trainer, launched = config.trainer, of_torchrun()
    trains = config.task.name == "train"
    if launched is not None and not (trains and trainer.world_size > 1):
        if trains:
            yield started_for_one("trainer.strategy", trainer.sharing.value)
        else:
            yield started_for_one("task", config.task.name)
        return
    if not trains:
        return
    if launched is not None:
        yield from _started_otherwise(trainer, launched)
    elif trainer.num_nodes > 1 and not by_slurm:
        yield ConfigError(
            "several machines are started by torchrun or Slurm",
            where="trainer.num_nodes",
            found=trainer.num_nodes,
            expected="1, or the command under torchrun on each machine, or a sweep with "
            "hydra/launcher=slurm",
            remedy=f"torchrun --nnodes={trainer.num_nodes} --nproc-per-node={trainer.devices} "
            "--node-rank=<0, 1, …> --master-addr=<the first> --master-port=29500 -m mens_exp …",
        )
    yield from _torch(config)
    if trainer.world_size > 1 and not by_slurm and may_use_gpu(trainer.accelerator):
        there = len(machine.gpu_ids())
        if there and there < trainer.devices:
            yield SetupError(
                "there are fewer GPUs than processes",
                where="trainer.devices",
                found=trainer.devices,
                expected=f"at most {there}",
                remedy=f"choose trainer.devices={there}",
            )


def _started_otherwise(trainer: TrainerConfig, launched: Rank) -> Iterator[MensError]:
    """Yield settings that contradict the processes that torchrun has started."""
    for name, asked, started in (
        ("devices", trainer.devices, launched.local_world_size),
        ("num_nodes", trainer.num_nodes, launched.world_size // launched.local_world_size),
    ):
        if asked != started:
            yield ConfigError(
                "contradicts what torchrun started",
                where=f"trainer.{name}",
                found=asked,
                expected=str(started),
                remedy=f"choose trainer.{name}={started}",
            )


def _torch(config: RunConfig) -> Iterator[MensError]:
    torch = machine.look("cpu").torch if is_in_parts(config) else None
    if torch is not None and Version(torch) < _KEEPS_WHOLE:
        yield SetupError(
            "this torch cannot keep the adapter whole while the base is sharded",
            where="trainer.strategy",
            found=f"torch {torch}",
            expected=f"torch {_KEEPS_WHOLE} or newer",
            remedy="update torch, or choose trainer=ddp",
        )


def check_sandbox(config: RunConfig) -> Iterator[MensError]:
    """Yield missing sandbox tools; isolation itself is probed when the suite starts."""
    if not config.suite.spec.executes or not isinstance(config.sandbox, ExecutingSandbox):
        return
    needed = {"prlimit": "util-linux"}
    if isinstance(config.sandbox, BubblewrapSandbox):
        needed |= {"bwrap": "bubblewrap", "setpriv": "util-linux"}
    missing = {name: package for name, package in needed.items() if shutil.which(name) is None}
    if missing:
        yield SetupError(
            f"suite={config.suite.name} executes programs, which is not possible here",
            where="sandbox",
            found=f"no {', '.join(sorted(missing))}",
            expected=" and ".join(sorted(needed)),
            remedy=f"apt-get install {' '.join(sorted(set(missing.values())))}; or sandbox=none, "
            "which measures what needs no execution",
        )


# The package that a Lightning logger needs: its module, and its name on PyPI.
_OF_LOGGERS = {
    "TensorBoardLogger": ("tensorboard", "'mens-exp[tensorboard]'"),
    "MLFlowLogger": ("mlflow", "mlflow-skinny"),
    "CometLogger": ("comet_ml", "comet-ml"),
    "NeptuneLogger": ("neptune", "neptune"),
    "LitLogger": ("litlogger", "litlogger"),
}


def check_logger(config: RunConfig) -> Iterator[MensError]:
    """Yield an error for each missing package of a logger, and for Comet with ``online=false``."""
    for sink, node in config.loggers.items():
        target = str(getattr(node, "_target_", ""))
        kind = "TensorBoardLogger" if isinstance(node, TensorboardLogger) else target
        module, package = _OF_LOGGERS.get(kind.rpartition(".")[2], (None, ""))
        if module == "comet_ml" and getattr(node, "online", None) is False:
            yield ConfigError(
                "Lightning's CometLogger disables an experiment that is not online, and would "
                "write nothing",
                where="logger.online" if len(config.loggers) == 1 else f"logger.{sink}.online",
                found=False,
                expected="null",
                remedy="leave it out, and set COMET_START_ONLINE=false in the environment",
            )
        if module is not None and find_spec(module) is None:
            yield MissingExtra(
                f"{module} is not installed",
                where="logger",
                found=sink,
                expected=f"the package {module}, or another logger, such as logger=csv",
                remedy=f"pip install {package}",
            )
