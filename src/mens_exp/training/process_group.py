"""The processes of a run as one group: what they tell each other, and what Lightning is told."""

from __future__ import annotations

import json
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from mens_exp.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch.strategies import Strategy

    from mens_exp.config.root import RunConfig
    from mens_exp.plan.ranks import Rank

__all__ = [
    "joined",
    "lost_touch",
    "open_store",
    "store_at",
    "store_of_torchrun",
    "strategy_of",
    "tell",
    "told",
    "told_by_all",
]

HOST = "127.0.0.1"  # where the processes of one machine meet
# How long a process waits for the others: the first one may score, render or download meanwhile.
# That one has died is noticed at once by gloo, whose connection breaks.
_PATIENCE = timedelta(hours=1)
_TOLD = "mens_exp"


def strategy_of(config: RunConfig, rank: Rank) -> Strategy | str:
    """Return Lightning's strategy for a process of the group."""
    if rank.is_alone:
        return "auto"
    from lightning.pytorch.strategies import DDPStrategy

    from mens_exp.training.sharding import ShardedBase, is_sharded

    if is_sharded(config, rank):
        return ShardedBase(rank)
    return DDPStrategy(forward_sync_buffers=False)


def open_store(world_size: int) -> TCPStore:
    """Open the place where the processes of this machine meet, on a port that is free."""
    return TCPStore(HOST, 0, world_size, is_master=True, timeout=_PATIENCE, wait_for_workers=False)


def store_at(port: int, world_size: int) -> Store:
    """Return that place for another process of this machine."""
    return TCPStore(HOST, port, world_size, timeout=_PATIENCE)


def store_of_torchrun() -> Store:
    """Return the place that torchrun's environment names."""
    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    assert isinstance(store, Store), "torch declares nothing of it"
    return store


def tell(store: Store, value: Any) -> None:
    """Give the others plain JSON, before they join."""
    store.set(_TOLD, json.dumps(value))


def told(store: Store) -> Any:
    """Return what the first process tells, once it does."""
    return json.loads(store.get(_TOLD))


@contextmanager
def joined(rank: Rank, device: torch.device, store: Store) -> Iterator[None]:
    """Be one of the group inside the block.

    Args:
        rank: which of them.
        device: what this process computes on; CUDA devices talk through NCCL, CPUs through gloo.
        store: where the processes meet.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=rank.rank,
        world_size=rank.world_size,
        store=store,
        timeout=_PATIENCE,
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def told_by_all(value: Any, rank: Rank) -> list[Any]:
    """Return what each process gives, in their order."""
    box: list[Any] = [None] * rank.world_size
    torch.distributed.all_gather_object(box, value)
    return box


def lost_touch(error: BaseException) -> TrainingError | None:
    """Return what to say where an error means that another process cannot be reached."""
    is_ours = isinstance(error, torch.distributed.DistError)
    if not is_ours and not (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return None
    return TrainingError(
        "another process of this run cannot be reached",
        where="trainer",
        found=str(error).partition("\n")[0],
        remedy="look at what ended on the other machines, and go on with resume=<run>",
    )
