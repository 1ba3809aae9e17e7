"""The frozen base in parts: each process keeps its share of every decoder layer (FSDP2).

PyTorch's ``fully_shard`` gathers a layer just before it computes, forward and backward, and frees
it after. What is trained is small beside the base and lies whole in every process, as it does
under DDP, and so do embedding, last norm and head, which a step needs from its first to its last
moment. Nothing of a checkpoint, an adapter or an optimizer depends on the number of processes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import init_device_mesh

from mens_exp.backends.causal_forward import backbone
from mens_exp.config.trainer import Strategy as Chosen
from mens_exp.layout.shape import shape_of
from mens_exp.plan.machine import look
from mens_exp.plan.memory import bits_per_weight, dense_experts
from mens_exp.quant.bnb import (
    compute_dtype,
    keep_quantization_state,
    quantized_linears,
    quantizing_on,
)
from mens_exp.training.process_group import told_by_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning.fabric.utilities.types import _PATH
    from torch.distributed.device_mesh import DeviceMesh

    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.config.root import RunConfig
    from mens_exp.plan.ranks import Rank

__all__ = ["ShardedBase", "averaged", "is_sharded", "sharded"]

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
    at_once = min(told_by_all(_room_for(config), rank))
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
