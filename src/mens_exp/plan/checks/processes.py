"""Whether the processes that a run asks for can be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import Version

from mens_exp.errors import ConfigError, MensError, RequestError, SetupError
from mens_exp.plan import machine
from mens_exp.plan.device import may_use_gpu
from mens_exp.plan.parts import is_in_parts
from mens_exp.plan.ranks import of_torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["check", "started_for_one"]

_KEEPS_WHOLE = Version("2.7")  # fully_shard's ignored_params


def started_for_one(where: str, found: str) -> RequestError:
    """Say that torchrun started what one process does."""
    return RequestError(
        "torchrun started several processes for what one does",
        where=where,
        found=found,
        expected="a training run of several processes",
        remedy="start it without torchrun, or choose task=train trainer=ddp",
    )


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what does not go with the way this process was started, and devices that lack."""
    trainer, launched = config.trainer, of_torchrun()
    trains = config.task.name == "train"
    if launched is not None and not (trains and trainer.world_size > 1):
        if trains:
            yield started_for_one("trainer.strategy", trainer.strategy.value)
        else:
            yield started_for_one("task", config.task.name)
        return
    if not trains:
        return
    if launched is not None:
        for name, asked, started in (
            ("devices", trainer.devices, launched.local_world_size),
            ("num_nodes", trainer.num_nodes, launched.world_size // launched.local_world_size),
        ):
            if asked != started:
                yield ConfigError(
                    "is not what torchrun started",
                    where=f"trainer.{name}",
                    found=asked,
                    expected=str(started),
                    remedy=f"choose trainer.{name}={started}",
                )
    elif trainer.num_nodes > 1:
        yield ConfigError(
            "several machines are started by torchrun",
            where="trainer.num_nodes",
            found=trainer.num_nodes,
            expected="1, or the command under torchrun on each machine",
            remedy=f"torchrun --nnodes={trainer.num_nodes} --nproc-per-node={trainer.devices} "
            "--node-rank=<0, 1, …> --master-addr=<the first> --master-port=29500 -m mens_exp …",
        )
    yield from _torch(config)
    if trainer.world_size > 1 and may_use_gpu(trainer.accelerator):
        there = len(machine.gpu_ids())
        if there and there < trainer.devices:
            yield SetupError(
                "there are fewer GPUs than processes",
                where="trainer.devices",
                found=trainer.devices,
                expected=f"at most {there}",
                remedy=f"choose trainer.devices={there}",
            )


def _torch(config: RunConfig) -> Iterator[MensError]:
    torch = machine.look("cpu").torch if is_in_parts(config) else None
    if torch is not None and Version(torch) < _KEEPS_WHOLE:
        yield SetupError(
            "this torch cannot leave the adapter whole beside a base in parts",
            where="trainer.strategy",
            found=f"torch {torch}",
            expected=f"torch {_KEEPS_WHOLE} or newer",
            remedy="update torch, or choose trainer=ddp",
        )
