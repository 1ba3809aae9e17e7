"""Distributed training: process start, process group, and sharding of the frozen base (FSDP2).

PyTorch's ``fully_shard`` gathers a layer just before it computes, in the forward and the backward
pass, and frees it afterwards. The trained parameters are small compared with the base and are
replicated in every process, as under DDP. So are embedding, final norm and head, which are needed
throughout a step. Checkpoints, adapters and optimizer state do not depend on the number of
processes. Lightning is configured to use the existing processes, and leaves signals to the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from hydra.utils import instantiate
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from mens_exp.artifacts import host
from mens_exp.backends.forward import backbone
from mens_exp.config.trainer import Strategy as Chosen
from mens_exp.errors import TrainingError
from mens_exp.layout.shape import shape_of
from mens_exp.planning.machine import cores, look
from mens_exp.planning.memory import base_bits, dense_experts
from mens_exp.quant.binding import binding_of, compute_dtype
from mens_exp.quant.layers import keep_quantization_state, quantized_linears

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from lightning import Trainer
    from lightning.fabric.utilities.types import _PATH
    from torch.distributed.device_mesh import DeviceMesh

    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.config.root import RunConfig
    from mens_exp.planning.machine import Rank

HOST = "127.0.0.1"  # rendezvous of the processes of one machine
# Timeout for waiting on other processes: the first one may score, render or download meanwhile.
# gloo notices a dead process at once, because its connection breaks.
_PATIENCE = timedelta(hours=1)
_STORE_KEY = "mens_exp"


def strategy_of(config: RunConfig, rank: Rank) -> Strategy | str:
    """Return the Lightning strategy for a process of the group."""
    if rank.is_alone:
        return "auto"
    from lightning.pytorch.strategies import DDPStrategy

    if is_sharded(config, rank):
        return ShardedBase(rank)
    usual: dict[str, Any] = {"forward_sync_buffers": False}
    chosen = config.trainer.strategy
    if not isinstance(chosen, dict):
        return DDPStrategy(**usual)
    made: Strategy = instantiate({**usual, **chosen}, _convert_="all")
    return made


def open_store(world_size: int) -> TCPStore:
    """Open the rendezvous store for the processes of this machine, on a free port."""
    return TCPStore(HOST, 0, world_size, is_master=True, timeout=_PATIENCE, wait_for_workers=False)


def store_at(port: int, world_size: int) -> Store:
    """Connect another process of this machine to the rendezvous store."""
    return TCPStore(HOST, port, world_size, timeout=_PATIENCE)


def store_of_torchrun() -> Store:
    """Return the rendezvous store that torchrun's environment names."""
    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    assert isinstance(store, Store), "torch declares nothing of it"
    return store


def publish(store: Store, value: Any) -> None:
    """Send plain JSON to the other processes before they join the group."""
    store.set(_STORE_KEY, json.dumps(value))


def receive(store: Store) -> Any:
    """Wait for the value that the first process publishes, and return it."""
    return json.loads(store.get(_STORE_KEY))


@contextmanager
def joined(rank: Rank, device: torch.device, store: Store) -> Iterator[None]:
    """Join the process group for the duration of the block.

    Args:
        rank: the rank of this process.
        device: its compute device; CUDA devices communicate through NCCL, CPUs through gloo.
        store: the rendezvous store.
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
    """Gather a value from every process, in rank order."""
    box: list[Any] = [None] * rank.world_size
    torch.distributed.all_gather_object(box, value)
    return box


def as_peer_failure(error: BaseException) -> TrainingError | None:
    """Return a clear error if this one means that another process cannot be reached."""
    is_ours = isinstance(error, torch.distributed.DistError)
    if not is_ours and not (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return None
    return TrainingError(
        "another process of this run cannot be reached",
        where="trainer",
        found=str(error).partition("\n")[0],
        remedy="check what ended on the other machines, and continue with resume=<run>",
    )


_LOADING = 1.5  # times a base's size, while it is read and quantized; a guess


def is_sharded(config: RunConfig, rank: Rank) -> bool:
    """Return whether this process holds only a shard of the base."""
    return config.trainer.sharing is Chosen.fsdp and not rank.is_alone


def sharded(
    config: RunConfig,
    rank: Rank,
    device: torch.device,
    build: Callable[[torch.device], QloraBackend],
) -> QloraBackend:
    """Build a model and keep this process's shard of its base; a collective operation.

    The complete base is loaded into host memory before it is sharded, by as many processes of a
    machine at a time as fit. A GPU never holds more than its shard and a few layers.

    Args:
        config: the whole configuration.
        rank: the rank of this process; the process group is already initialised.
        device: its compute device.
        build: builds the model with its base loaded on a device.
    """
    mesh = init_device_mesh(device.type, (rank.world_size,))
    at_once = min(all_gather(_room_for(config), rank))
    mine: QloraBackend | None = None
    for first in range(0, rank.local_world_size, at_once):
        if first <= rank.local_rank < first + at_once:
            with binding_of(config.quant.spec).quantizing_on(device):
                mine = _in_parts(build(torch.device("cpu")), mesh, device)
        torch.distributed.barrier()
    assert mine is not None, "each has its turn"
    return mine


def _room_for(config: RunConfig) -> int:
    """Return how many bases fit into the host's free memory, at least one."""
    shape = shape_of(config.model)
    width = compute_dtype(config.quant).itemsize
    dense = dense_experts(config, shape)
    whole = (shape.linear_parameters - dense) * base_bits(config.quant, shape) / 8
    whole += (shape.embedding_parameters + dense) * width
    free = look("cpu").free_bytes
    return 1 if free is None else max(1, int(free // (_LOADING * whole)))


def _in_parts(backend: QloraBackend, mesh: DeviceMesh, device: torch.device) -> QloraBackend:
    """Shard the frozen weights of every decoder layer onto this process's device."""
    from torch.distributed.fsdp import fully_shard

    causal_lm = backend.causal_lm
    keep_quantization_state(causal_lm)
    learned = set(backend.trainable().values())
    for layer in causal_lm.get_submodule(backend.shape.family.layers):
        fully_shard(layer, mesh=mesh, ignored_params=learned, reshard_after_forward=True)
    # The root wrapper has no shard, but puts the layers under one prefetch schedule.
    fully_shard(backbone(causal_lm), mesh=mesh, ignored_params=set(causal_lm.parameters()))
    for module in quantized_linears(causal_lm).values():
        module.quant_state.to(device)  # not a parameter of the module
    return backend.to(device)


def averaged(gradients: Sequence[torch.Tensor]) -> None:
    """Average gradients over all processes, in place and in one collective."""
    together = torch.cat([one.flatten() for one in gradients])
    torch.distributed.all_reduce(together)
    together /= torch.distributed.get_world_size()
    sizes = [one.numel() for one in gradients]
    for gradient, mean in zip(gradients, torch.split(together, sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


class ShardedBase(ModelParallelStrategy):
    """Lightning strategy for FSDP2 over a model whose trained part is replicated.

    Checkpoints are therefore the same as with any other strategy; Lightning's own would gather the
    base.
    """

    def __init__(self, rank: Rank) -> None:
        """Share the data among all processes of the run."""
        super().__init__(data_parallel_size=rank.world_size, tensor_parallel_size=1)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: the optimizer is restored as with other strategies."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the module's own hook fills the checkpoint."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer state, which is the same in each process."""
        return Strategy.optimizer_state(self, optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer state."""
        Strategy.load_optimizer_state_dict(self, checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write the checkpoint in the first process."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint of the first process."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)


_END_S = 10.0  # grace period of a process that was asked to end
_LINE = 200  # characters of a log's last line that a message shows


class WorkerProcesses:
    """Worker processes by rank; each writes its output to a separate log."""

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]], logs: Path) -> None:
        """Take over newly started processes; the first logs to ``1.log`` under ``logs``."""
        self.processes = dict(processes)
        self.logs = logs

    def failed(self) -> TrainingError | None:
        """Return the error of a process that ended unexpectedly; None if there is none."""
        for rank, process in self.processes.items():
            code = process.poll()
            if code:
                log = self.logs / f"{rank}.log"
                return TrainingError(
                    f"process {rank} of {len(self.processes) + 1} has ended",
                    where=f"trainer, process number {process.pid}",
                    found=_how(code, log),
                    expected="all processes to train to the end",
                    remedy=f"see {log}, and continue with resume={self.logs.parent}",
                )
        return None

    def failed_within(self, seconds: float) -> TrainingError | None:
        """Wait up to ``seconds`` for an unexpected end; it may show with a delay."""
        deadline = time.monotonic() + seconds
        while (found := self.failed()) is None and time.monotonic() < deadline:
            if all(process.poll() is not None for process in self.processes.values()):
                return self.failed()
            time.sleep(0.05)
        return found

    def wait(self) -> None:
        """Wait until all have ended; terminate those that do not end in time."""
        deadline = time.monotonic() + _END_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def end(self) -> None:
        """Terminate the processes that still run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        self.wait()

    def drop_empty_logs(self) -> None:
        """Remove the logs of processes without output."""
        for rank in self.processes:
            log = self.logs / f"{rank}.log"
            if log.is_file() and log.stat().st_size == 0:
                log.unlink()
        if self.logs.is_dir() and not any(self.logs.iterdir()):
            self.logs.rmdir()


def _how(code: int, log: Path) -> str:
    """Describe how a process ended, with the last line of its log."""
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last[:_LINE]}" if last else how


@contextmanager
def started_workers(
    arguments: Mapping[int, Sequence[str]], logs: Path, *, stuck: Callable[[TrainingError], None]
) -> Iterator[WorkerProcesses]:
    """Start processes for the duration of the block.

    Args:
        arguments: arguments of ``python``, by rank.
        logs: directory for their output.
        stuck: called from another thread if a process has ended and the block still runs half a
            minute later, because a GPU collective waits forever.
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
    """Start a process in its own session, so that Ctrl-C reaches it only via the first process."""
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
    """Cluster environment of processes that have already started and joined the group.

    It is also used for a single process, because Lightning would otherwise look for a cluster.
    """

    def __init__(self, rank: Rank) -> None:
        """Describe the process of ``rank``."""
        self._rank = rank

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning does not start the processes."""
        return True

    @property
    def main_address(self) -> str:
        """Empty: the process group exists before Lightning would create it."""
        return ""

    @property
    def main_port(self) -> int:
        """Unused, for the same reason."""
        return 0

    @staticmethod
    def detect() -> bool:
        """False: it is always passed explicitly."""
        return False

    def world_size(self) -> int:
        """Number of processes on all machines."""
        return self._rank.world_size

    def set_world_size(self, size: int) -> None:
        """Accept the size that Lightning has computed."""
        assert size == self._rank.world_size, "Lightning counts the same processes"

    def global_rank(self) -> int:
        """Rank of this process among all."""
        return self._rank.rank

    def set_global_rank(self, rank: int) -> None:
        """Accept the rank that Lightning has computed."""
        assert rank == self._rank.rank, "Lightning numbers them the same way"

    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._rank.local_rank

    def node_rank(self) -> int:
        """Rank of the machine."""
        return self._rank.rank // self._rank.local_world_size


def keep_signals(trainer: Trainer) -> None:
    """Prevent a trainer from replacing the process's signal handlers.

    Lightning's SIGTERM handler notifies the other processes with a broadcast from inside the
    handler. They are waiting in another collective by then, so none of them would ever end.
    """
    connector = trainer._signal_connector  # noqa: SLF001  # Lightning has no other name for it
    connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
