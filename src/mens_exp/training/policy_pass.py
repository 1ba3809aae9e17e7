"""Log-probabilities of sampled answers, computed once before training, and their advantages.

An objective that compares answers in groups needs, for each of their tokens, the log-probability
under the adapter that training starts from and, with a KL term, under the base. Training changes
neither. A resumed run computes the same values again: the checkpoint's adapter is loaded later, and
blocks always pass one by one in stored order. The values equal those of a training step bit for bit
if a micro-batch is one block, and within rounding if it has several.

Shapes: D documents and T supervised tokens of a side, M targets of a micro-batch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.errors import ConfigError
from mens_exp.objective.causal import Passed
from mens_exp.objective.groups import GroupRelative, SampledSide, places
from mens_exp.report import terminal
from mens_exp.rows.rewards import groups_of
from mens_exp.training.contract_probe import preserve_state
from mens_exp.training.distributed import all_gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.data.batch import Batch
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.data.stream import MicroBatches
    from mens_exp.planning.machine import Rank
    from mens_exp.rows.rewards import Groups
    from mens_exp.training.module import RunRecord, TrainingModule

_FACT = "sampled_answers"


def known_answers(
    run: RunRecord,
    module: TrainingModule,
    data: RowsDataModule,
    rank: Rank,
) -> tuple[SampledSide, SampledSide]:
    """Compute the values that a group objective needs of the training and validation answers.

    This is a collective operation; each process computes its share.

    Args:
        run: the open run, whose manifest records it.
        module: the module to be trained; it is left unchanged.
        data: the rows.
        rank: the rank of this process.

    Raises:
        ConfigError: the objective is of a class that compares in another way.
        DataError: a prompt has only one answer.
    """
    if not isinstance(module.objective, GroupRelative):
        raise ConfigError(
            "the objective's class may compare answers in another way",
            where="objective._target_",
            found=type(module.objective).__qualname__,
            expected="a class that extends mens_exp.objective.groups.GroupRelative",
        )
    began = time.monotonic()
    scale = module.objective.scale
    val = data.val_dataloader()
    groups = [groups_of(side, scale) for side in (data.train_documents, data.val_documents)]
    with preserve_state(module):
        sides = (
            _side(module, data.in_blocks(), data.trained_blocks(), groups[0], rank),
            _side(module, val, np.arange(val.total), groups[1], rank),
        )
    run.manifest.facts[_FACT] = {
        "groups": sum(one.groups for one in groups),
        "groups_of_equal_rewards": sum(one.equal for one in groups),
        "sha256": sha256_bytes(b"".join(one.old_logp_T.numpy().tobytes() for one in sides)),
        "seconds": round(time.monotonic() - began, 3),
    }
    run.save()
    return sides


def _side(
    module: TrainingModule,
    stream: MicroBatches,
    needed: Sequence[int] | np.ndarray,
    groups: Groups,
    rank: Rank,
) -> SampledSide:
    """Pass the needed micro-batches of a side through the model and the base.

    Every process makes the same number of passes, because a sharded base needs all of them.
    """
    documents = stream.documents
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents.supervised)])
    before_D = torch.from_numpy(totals[documents.offsets[:-1]])
    assert isinstance(module.objective, GroupRelative), "known_answers refuses others"
    kinds = 2 if module.objective.beta > 0 else 1
    values = torch.full((kinds, int(totals[-1])), torch.nan)
    if rank.is_first:
        terminal.say(
            f"computing log-probabilities of {len(needed)} micro-batches before training",
            on=terminal.console(stderr=True),
        )
    found: list[tuple[Any, Any]] = []
    for turn in range(-(-len(needed) // rank.world_size)):
        number = int(needed[min(turn * rank.world_size + rank.rank, len(needed) - 1)])
        batch = stream.batch(number)
        found.append((places(batch, before_D).numpy(), _passed(module, batch, kinds)))
    for share in [found] if rank.is_alone else all_gather(found, rank):
        for place_M, logp in share:
            values[:, torch.from_numpy(place_M)] = torch.from_numpy(logp)
    return SampledSide(
        before_D,
        torch.from_numpy(groups.advantages),
        values[0],
        values[1] if kinds > 1 else None,
    )


def _passed(module: TrainingModule, batch: Batch, kinds: int) -> np.ndarray:
    """Return log-probabilities under the model and, if ``kinds`` is 2, the base, ``[kinds, M]``."""
    there = batch.to(next(module.parameters()).device)
    module.backend.begin(batch.index)
    objective = module.objective
    assert isinstance(objective, GroupRelative), "known_answers refuses others"
    with torch.no_grad():
        passes = [Passed(there, module.backend(there), module.backend.head)]
        passes += [module.of_base(there)] if kinds > 1 else []
        found: np.ndarray = torch.stack([objective.logp(one) for one in passes]).cpu().numpy()
    return found
