"""A teacher's most probable tokens, computed once before training and kept in the cache.

With `objective.top_k`, the run's documents pass through the teacher, which is freed before the
student is loaded: see :mod:`mens_exp.training.cached_pass`. It is not loaded at all if the cache is
complete.

Shapes: M targets of a micro-batch, K kept tokens.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mens_exp.artifacts import host
from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.backends.frozen_base import Teacher
from mens_exp.errors import ConfigError
from mens_exp.layout.shape import shape_of
from mens_exp.objective.distillation import (
    Distillation,
    KnownTeacher,
    KnownTeachers,
    top_tokens,
)
from mens_exp.planning.machine import ALONE
from mens_exp.training.build import device_of, objective_of
from mens_exp.training.cached_pass import CachedPass, surroundings
from mens_exp.training.contract_probe import probed_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.data.stream import MicroBatches
    from mens_exp.model.sources import BaseModel
    from mens_exp.planning.machine import Rank
    from mens_exp.rows.documents import Encoded
    from mens_exp.training.module import RunRecord

_NAME = "teacher_top_tokens"


def teacher_for(
    config: RunConfig,
    run: RunRecord,
    teacher: BaseModel | None,
    data: RowsDataModule,
    rank: Rank = ALONE,
) -> BaseModel | KnownTeachers | None:
    """Return the teacher that training needs: the model itself, or its cached top tokens.

    With `objective.top_k`, the cache is read and completed. This is a collective operation; each
    process computes its share.

    Args:
        config: the whole configuration.
        run: the open run, whose manifest records it.
        teacher: the teacher model on disk; None if the objective has none.
        data: the rows.
        rank: the rank of this process.

    Raises:
        ConfigError: the objective is of a class that may compare in another way.
    """
    settings: Any = config.objective
    if teacher is None or not settings.spec.passes_before(settings):
        return teacher
    if not isinstance(objective_of(config), Distillation):
        raise ConfigError(
            "the objective's class may compare with the teacher in another way",
            where="objective.top_k",
            found=settings._target_,  # Hydra's own spelling
            expected="a class that extends mens_exp.objective.distillation.Distillation",
            remedy="set objective.top_k=null",
        )
    began = time.monotonic()
    device = device_of(config.trainer.accelerator, rank.local_rank)
    vocab_size, on_gpu = shape_of(config.model).vocab_size, device.type == "cuda"
    arguments = settings.spec.arguments(settings, vocab_size, on_gpu=on_gpu)
    common = {
        **surroundings(run, teacher, device),
        "compute_dtype": config.quant.compute_dtype.value,
        "packing": config.data.packing,
        "top_k": settings.top_k,
        "temperature": arguments["temperature"],
        "chunk_tokens": arguments["chunk_tokens"],
    }
    val = data.val_dataloader()
    sides = [
        _side(common, data.in_blocks(), data.trained_blocks(), data.train_counts.sha256),
        _side(common, val, np.arange(val.total), data.val_counts.sha256),
    ]
    if config.data.contract.probe:
        probed = probed_stream(data)
        sides.append(_side(common, probed, np.arange(probed.total), _content(probed.documents)))
    for side in sides:
        side.read(run, rank)
    from_cache = sum(side.known for side in sides[:2])
    if any(side.missing for side in sides):
        host.collect_as_usual()
        passed = _passed(Teacher(config, teacher, device), common, device)
        for side in sides:
            side.complete(passed, rank)
        del passed  # frees the teacher before the student is loaded
        gc.collect()
        host.release_free()
    content = hashlib.sha256()
    for side in sides[:2]:
        content.update(side.needed_values.tobytes())
    run.manifest.facts[_NAME] = {
        "train_tokens": sides[0].known,
        "val_tokens": sides[1].known,
        "from_cache": from_cache,
        "sha256": content.hexdigest(),
        "seconds": round(time.monotonic() - began, 3),
    }
    run.save()
    return KnownTeachers(*map(_known, sides))


def _side(
    common: dict[str, Any], stream: MicroBatches, needed: np.ndarray, sha256: str
) -> CachedPass:
    width = 2 * common["top_k"] + 2
    counts_D = np.diff(_before(stream.documents))
    return CachedPass(_NAME, common, stream, needed, sha256, counts_D=counts_D, width=width)


def _before(documents: Encoded) -> np.ndarray:
    """Return the number of supervised tokens before each document, and of all, int64."""
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents.supervised)])
    before: np.ndarray = totals[documents.offsets]
    return before


def _content(documents: Encoded) -> str:
    parts = (documents.ids, documents.supervised, documents.offsets)
    return sha256_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def _known(side: CachedPass) -> KnownTeacher:
    before = torch.from_numpy(_before(side.stream.documents)[:-1])
    return KnownTeacher(before, side.mapped())


def _passed(
    teacher: Teacher, common: dict[str, Any], device: torch.device
) -> Callable[[Batch], np.ndarray]:
    """Return a function that computes the values of a micro-batch, f32 ``[M, 2 K + 2]``."""
    kept = functools.partial(
        top_tokens,
        top_k=common["top_k"],
        chunk_tokens=common["chunk_tokens"],
        temperature=common["temperature"],
    )

    def passed(batch: Batch) -> np.ndarray:
        with torch.no_grad():
            found = kept(teacher.passed(batch.to(device)))
            parts = (found.ids_MK.float(), found.logp_ML, found.target_logp_M[:, None])
            values: np.ndarray = torch.cat(parts, dim=1).cpu().numpy()
        return values

    return passed
