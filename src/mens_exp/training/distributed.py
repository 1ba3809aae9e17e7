"""Processes that train together: start, process group, and sharding of the frozen base (FSDP2).

PyTorch's ``fully_shard`` gathers a layer just before it computes, forward and backward, and frees
it after. What is trained is small compared with the base and is whole in every process, as it is
under DDP, and so are embedding, last norm and head, which a step needs from its first to its last
moment. Nothing of a checkpoint, an adapter or an optimizer depends on the number of processes.
Lightning is told that the processes are there, and leaves signals to the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from mens_exp.artifacts import host
from mens_exp.backends.frozen_base import backbone
from mens_exp.config.trainer import Strategy as Chosen
from mens_exp.errors import TrainingError
from mens_exp.layout.shape import shape_of
from mens_exp.planning.machine import cores, look
from mens_exp.planning.memory import bits_per_weight, dense_experts
from mens_exp.quant.bnb import (
    compute_dtype,
    keep_quantization_state,
    quantized_linears,
    quantizing_on,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lightning import Trainer
    from lightning.fabric.utilities.types import _PATH
    from torch.distributed.device_mesh import DeviceMesh

    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.config.root import RunConfig
    from mens_exp.planning.machine import Rank

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


def publish(store: Store, value: Any) -> None:
    """Give the others plain JSON, before they join."""
    store.set(_TOLD, json.dumps(value))


def receive(store: Store) -> Any:
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


def all_gather(value: Any, rank: Rank) -> list[Any]:
    """Return what each process gives, in their order."""
    box: list[Any] = [None] * rank.world_size
    torch.distributed.all_gather_object(box, value)
    return box


def as_peer_failure(error: BaseException) -> TrainingError | None:
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


_LOADING = 1.5  # of a base's own bytes, while it is read and quantized; a guess


def is_sharded(config: RunConfig, rank: Rank) -> bool:
    """Whether this process holds the base in part."""
    return config.trainer.strategy is Chosen.fsdp and not rank.is_alone


def sharded(
    config: RunConfig,
    rank: Rank,
    device: torch.device,
    build: Callable[[torch.device], QloraBackend],
) -> QloraBackend:
    """Build a graph and keep this process's part of its base; all processes do so together.

    A base is loaded whole in the host's memory before it is taken apart, by as many processes of
    a machine at a time as it has room for. A GPU never holds more than its part and a few layers.

    Args:
        config: the whole configuration.
        rank: which of the processes this is; they have joined already.
        device: where it computes.
        build: makes the graph with its base loaded on a device.
    """
    mesh = init_device_mesh(device.type, (rank.world_size,))
    at_once = min(all_gather(_room_for(config), rank))
    mine: QloraBackend | None = None
    for first in range(0, rank.local_world_size, at_once):
        if first <= rank.local_rank < first + at_once:
            with quantizing_on(device) if config.quant.is_four_bit else nullcontext():
                mine = _in_parts(build(torch.device("cpu")), mesh, device)
        torch.distributed.barrier()
    assert mine is not None, "each has its turn"
    return mine


def _room_for(config: RunConfig) -> int:
    """Return how many bases the host's free memory has room for, one at least."""
    shape = shape_of(config.model)
    width = compute_dtype(config.quant).itemsize
    dense = dense_experts(config, shape)
    whole = (shape.linear_parameters - dense) * bits_per_weight(config.quant) / 8
    whole += (shape.embedding_parameters + dense) * width
    free = look("cpu").free_bytes
    return 1 if free is None else max(1, int(free // (_LOADING * whole)))


def _in_parts(backend: QloraBackend, mesh: DeviceMesh, device: torch.device) -> QloraBackend:
    """Leave of every decoder layer's frozen weights what is this process's, on its device."""
    from torch.distributed.fsdp import fully_shard

    causal_lm = backend.causal_lm
    keep_quantization_state(causal_lm)
    learned = set(backend.trainable().values())
    for layer in causal_lm.get_submodule(backend.shape.family.layers):
        fully_shard(layer, mesh=mesh, ignored_params=learned, reshard_after_forward=True)
    # What stands around the layers has no part of its own, and makes one schedule of theirs.
    fully_shard(backbone(causal_lm), mesh=mesh, ignored_params=set(causal_lm.parameters()))
    for module in quantized_linears(causal_lm).values():
        module.quant_state.to(device)  # no parameter of the module's
    return backend.to(device)


def averaged(gradients: Sequence[torch.Tensor]) -> None:
    """Make gradients the mean over all processes, in place and in one collective."""
    together = torch.cat([one.flatten() for one in gradients])
    torch.distributed.all_reduce(together)
    together /= torch.distributed.get_world_size()
    sizes = [one.numel() for one in gradients]
    for gradient, mean in zip(gradients, torch.split(together, sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


class ShardedBase(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, over a graph whose trained part is whole in each process.

    Checkpoints are therefore those of any other strategy: Lightning would gather the base.
    """

    def __init__(self, rank: Rank) -> None:
        """Share the data among all processes of the run."""
        super().__init__(data_parallel_size=rank.world_size, tensor_parallel_size=1)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """It is restored as everywhere."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the module's own hook says what a checkpoint holds."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, which is the same in each process."""
        return Strategy.optimizer_state(self, optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Put that back."""
        Strategy.load_optimizer_state_dict(self, checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Have the first process write it."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what the first process has."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)


_END_S = 10.0  # for a process that was asked to end
_LINE = 200  # characters of a log's last line that a message shows


class WorkerProcesses:
    """Processes by rank; each writes what it has to say into a log of its own."""

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]], logs: Path) -> None:
        """Take processes that were just started; the first logs into ``1.log`` under ``logs``."""
        self.processes = dict(processes)
        self.logs = logs

    def failed(self) -> TrainingError | None:
        """Say which process has ended as it should not; None where none has."""
        for rank, process in self.processes.items():
            code = process.poll()
            if code:
                log = self.logs / f"{rank}.log"
                return TrainingError(
                    f"process {rank} of {len(self.processes) + 1} has ended",
                    where=f"trainer, process number {process.pid}",
                    found=_how(code, log),
                    expected="all processes to train to the end",
                    remedy=f"see {log}, and go on with resume={self.logs.parent}",
                )
        return None

    def failed_within(self, seconds: float) -> TrainingError | None:
        """Wait so long for a process to end as it should not: its end may not be seen at once."""
        deadline = time.monotonic() + seconds
        while (found := self.failed()) is None and time.monotonic() < deadline:
            if all(process.poll() is not None for process in self.processes.values()):
                return self.failed()
            time.sleep(0.05)
        return found

    def wait(self) -> None:
        """Wait until all have ended; one that does not is ended."""
        deadline = time.monotonic() + _END_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def end(self) -> None:
        """End those that still run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        self.wait()

    def drop_empty_logs(self) -> None:
        """Remove the logs of processes that had nothing to say."""
        for rank in self.processes:
            log = self.logs / f"{rank}.log"
            if log.is_file() and log.stat().st_size == 0:
                log.unlink()
        if self.logs.is_dir() and not any(self.logs.iterdir()):
            self.logs.rmdir()


def _how(code: int, log: Path) -> str:
    """Say how a process ended, and the last thing that it said."""
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last[:_LINE]}" if last else how


@contextmanager
def started_workers(
    arguments: Mapping[int, Sequence[str]], logs: Path, *, stuck: Callable[[TrainingError], None]
) -> Iterator[WorkerProcesses]:
    """Start processes for the block, and end them with it.

    Args:
        arguments: of ``python``, by rank.
        logs: directory of what they print.
        stuck: called from another thread where a process has ended and the block goes on all the
            same, half a minute later: a GPU's collective waits for ever.
    """
    logs.mkdir(exist_ok=True)
    others = WorkerProcesses(
        {
            rank: _start(line, logs / f"{rank}.log", len(arguments) + 1)
            for rank, line in arguments.items()
        },
        logs,
    )
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(others, over, stuck), daemon=True)
    watch.start()
    try:
        yield others
        others.wait()
    finally:
        over.set()
        watch.join()
        others.end()
        others.drop_empty_logs()


def _start(arguments: Sequence[str], log: Path, processes: int) -> subprocess.Popen[bytes]:
    """Start one in a session of its own: Ctrl-C ends it through the first process alone."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    with log.open("ab") as output:
        return host.spawn_python(arguments, output=output, environment=environment)


STUCK_S = 30.0


def _watch(
    others: WorkerProcesses, over: threading.Event, stuck: Callable[[TrainingError], None]
) -> None:
    found = None
    while found is None:
        if over.wait(0.2):
            return
        found = others.failed()
    if not over.wait(STUCK_S):
        stuck(found)


class StartedProcesses(ClusterEnvironment):
    """Says that the processes are there, have joined, and which of them this is.

    One process alone is told too: Lightning would look for a cluster around it.
    """

    def __init__(self, rank: Rank) -> None:
        """Stand for one process."""
        self._rank = rank

    @property
    def creates_processes_externally(self) -> bool:
        """Not by Lightning."""
        return True

    @property
    def main_address(self) -> str:
        """Nowhere: the processes have met before Lightning would make them."""
        return ""

    @property
    def main_port(self) -> int:
        """None, for the same reason."""
        return 0

    @staticmethod
    def detect() -> bool:
        """It is named, never found."""
        return False

    def world_size(self) -> int:
        """Processes on all machines."""
        return self._rank.world_size

    def set_world_size(self, size: int) -> None:
        """Take note of what Lightning has counted."""
        assert size == self._rank.world_size, "Lightning counts the same processes"

    def global_rank(self) -> int:
        """The number of this process among all."""
        return self._rank.rank

    def set_global_rank(self, rank: int) -> None:
        """Take note of how Lightning numbers this process."""
        assert rank == self._rank.rank, "Lightning numbers them the same way"

    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return self._rank.local_rank

    def node_rank(self) -> int:
        """The number of its machine."""
        return self._rank.rank // self._rank.local_world_size


def keep_signals(trainer: Trainer) -> None:
    """Have a trainer leave the process's signal handlers alone.

    Lightning's own for SIGTERM tells the other processes by a broadcast from inside the signal.
    They wait in another collective by then, so that none of them would ever end.
    """
    connector = trainer._signal_connector  # noqa: SLF001  # Lightning has no other name for it
    connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
