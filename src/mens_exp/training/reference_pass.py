"""Log-likelihoods under the base, computed once before training and kept in the cache.

An objective that compares with the base needs one number per answer, which training does not
change: see `objective.precompute_ref_log_probs` and :mod:`mens_exp.training.cached_pass`. The key
of a cache entry also covers the base's quantization and compute format, and the adapter's method
and targets, because its layers compute the base too.

Shapes: D documents of a side, S documents of a micro-batch.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.config.objective_spec import PRECOMPUTED, SHARED, shares_prompts
from mens_exp.errors import ConfigError
from mens_exp.objective.preference import KnownReference, OfAnswers
from mens_exp.training.cached_pass import CachedPass, surroundings
from mens_exp.training.contract_probe import preserve_state

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.sources import BaseModel
    from mens_exp.planning.machine import Rank
    from mens_exp.training.module import RunRecord, TrainingModule

_NAME = "reference_log_probs"
# Settings of `lora` that change only the adapter's values; the adapter is disabled in this pass.
_OFF = {"r": 1, "alpha": 1, "dropout": 0.0, "rank_pattern": {}, "alpha_pattern": {}}


def known_reference(
    config: RunConfig,
    run: RunRecord,
    base: BaseModel,
    module: TrainingModule,
    data: RowsDataModule,
    rank: Rank,
) -> KnownReference:
    """Read the log-likelihoods that a run needs from the cache, and compute the missing ones.

    This is a collective operation; each process computes its share.

    Args:
        config: the whole configuration.
        run: the open run, whose manifest records it.
        base: the base model.
        module: the module to be trained; it is left unchanged.
        data: the rows.
        rank: the rank of this process.

    Raises:
        ConfigError: the objective is of a class that compares in another way.
    """
    if not isinstance(module.objective, OfAnswers):
        raise ConfigError(
            "the objective's class may compare with the base in another way",
            where=f"objective.{PRECOMPUTED}",
            found=type(module.objective).__qualname__,
            expected="a class that extends mens_exp.objective.preference.OfAnswers",
            remedy=f"set objective.{PRECOMPUTED}=false",
        )
    began = time.monotonic()
    common = _key(config, run, base, module)
    val = data.val_dataloader()
    sides = {
        "train": CachedPass(
            _NAME, common, data.in_blocks(), data.trained_blocks(), data.train_counts.sha256
        ),
        "val": CachedPass(_NAME, common, val, np.arange(val.total), data.val_counts.sha256),
    }
    cached = 0
    with preserve_state(module):
        for name, side in sides.items():
            module.train(name == "train")  # same mode as the passes that it replaces
            side.read(run, rank)
            cached += side.known
            side.complete(functools.partial(_passed, module), rank)
    documents = {f"{name}_documents": len(side.needed_values) for name, side in sides.items()}
    values = b"".join(side.needed_values.tobytes() for side in sides.values())
    run.manifest.facts[_NAME] = {
        **documents,
        "from_cache": cached,
        "sha256": sha256_bytes(values),
        "seconds": round(time.monotonic() - began, 3),
    }
    run.save()
    train_D, val_D = (torch.from_numpy(side.values[:, 0]) for side in sides.values())
    return KnownReference(train_D, val_D)


def _key(
    config: RunConfig, run: RunRecord, base: BaseModel, module: TrainingModule
) -> dict[str, Any]:
    """Return the part of the key that covers all but documents and micro-batches."""
    off: dict[str, Any] = {name: one for name, one in _OFF.items() if hasattr(config.lora, name)}
    assert isinstance(module.objective, OfAnswers), "known_reference refuses others"
    return {
        **surroundings(run, base, next(module.parameters()).device),
        "backend": repr(config.backend),
        "quant": repr(config.quant),
        "lora": repr(replace(config.lora, **off)),
        "chunk_tokens": module.objective.chunk_tokens,
        "packing": config.data.packing,
        **({SHARED: True} if shares_prompts(config.objective) else {}),
    }


def _passed(module: TrainingModule, batch: Batch) -> np.ndarray:
    """Return the log-likelihoods of a micro-batch's documents under the base, f32 ``[S]``."""
    there = batch.to(next(module.parameters()).device)
    module.backend.begin(batch.index)
    assert isinstance(module.objective, OfAnswers), "known_reference refuses others"
    found: np.ndarray = module.objective.reference_logp(module.of_base(there)).cpu().numpy()
    return found
