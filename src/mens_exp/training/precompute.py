"""Values that other models give for the rows, computed once before training.

Each pass gives numbers that training does not change. :func:`teacher_for` reads a teacher's most
probable tokens (`objective.top_k`); the teacher is freed before the student is loaded, and not
loaded at all if the cache is complete. :func:`known_reference` reads the log-likelihoods of answers
under the base (`objective.precompute_ref_log_probs`). Both are kept in the cache, see
:mod:`mens_exp.training.cached_pass`.

:func:`known_answers` computes the log-probabilities of sampled answers under the adapter that
training starts from and, with a KL term, under the base, and the answers' advantages. A resumed run
computes them again: the checkpoint's adapter is loaded later, and blocks always pass one by one in
stored order. The values equal those of a training step bit for bit if a micro-batch is one block,
and within rounding if it has several.

Shapes: D documents and T supervised tokens of a side, S documents and M targets of a micro-batch,
K kept tokens.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mens_exp.artifacts import host
from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.backends.frozen_base import Teacher
from mens_exp.config.objective_spec import PRECOMPUTED, SHARED, shares_prompts
from mens_exp.errors import ConfigError
from mens_exp.layout.shape import shape_of
from mens_exp.objective.causal import Passed
from mens_exp.objective.distillation import Distillation, KnownTeacher, KnownTeachers, top_tokens
from mens_exp.objective.groups import GroupRelative, SampledSide, places
from mens_exp.objective.preference import KnownReference, OfAnswers
from mens_exp.planning.machine import ALONE
from mens_exp.report import terminal
from mens_exp.rows.rewards import groups_of
from mens_exp.training.build import device_of, objective_of
from mens_exp.training.cached_pass import CachedPass, environment_key
from mens_exp.training.contract_probe import preserve_state, probed_stream
from mens_exp.training.distributed import all_gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.data.stream import MicroBatches
    from mens_exp.model.sources import BaseModel
    from mens_exp.planning.machine import Rank
    from mens_exp.rows.documents import Encoded
    from mens_exp.rows.rewards import Groups
    from mens_exp.training.module import RunRecord, TrainingModule

_TOP_TOKENS = "teacher_top_tokens"


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
        **environment_key(run, teacher, device),
        "compute_dtype": config.quant.compute_dtype.value,
        "packing": config.data.packing,
        "top_k": settings.top_k,
        "temperature": arguments["temperature"],
        "chunk_tokens": arguments["chunk_tokens"],
    }
    val = data.val_dataloader()
    sides = [
        _side_of_teacher(common, data.in_blocks(), data.trained_blocks(), data.train_counts.sha256),
        _side_of_teacher(common, val, np.arange(val.total), data.val_counts.sha256),
    ]
    if config.data.contract.probe:
        probed = probed_stream(data)
        sides.append(
            _side_of_teacher(common, probed, np.arange(probed.total), _content(probed.documents))
        )
    for side in sides:
        side.read(run, rank)
    from_cache = sum(side.known for side in sides[:2])
    if any(side.missing for side in sides):
        host.collect_as_usual()
        passed = _teacher_passes(Teacher(config, teacher, device), common, device)
        for side in sides:
            side.complete(passed, rank)
        del passed  # frees the teacher before the student is loaded
        gc.collect()
        host.release_free()
    content = hashlib.sha256()
    for side in sides[:2]:
        content.update(side.needed_values.tobytes())
    run.manifest.facts[_TOP_TOKENS] = {
        "train_tokens": sides[0].known,
        "val_tokens": sides[1].known,
        "from_cache": from_cache,
        "sha256": content.hexdigest(),
        "seconds": round(time.monotonic() - began, 3),
    }
    run.save()
    return KnownTeachers(*map(_known_teacher, sides))


def _side_of_teacher(
    common: dict[str, Any], stream: MicroBatches, needed: np.ndarray, sha256: str
) -> CachedPass:
    width = 2 * common["top_k"] + 2
    counts_D = np.diff(_supervised_before(stream.documents))
    return CachedPass(_TOP_TOKENS, common, stream, needed, sha256, counts_D=counts_D, width=width)


def _supervised_before(documents: Encoded) -> np.ndarray:
    """Return the number of supervised tokens before each document, and of all, int64."""
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(documents.supervised)])
    before: np.ndarray = totals[documents.offsets]
    return before


def _content(documents: Encoded) -> str:
    parts = (documents.ids, documents.supervised, documents.offsets)
    return sha256_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def _known_teacher(side: CachedPass) -> KnownTeacher:
    before = torch.from_numpy(_supervised_before(side.stream.documents)[:-1])
    return KnownTeacher(before, side.mapped())


def _teacher_passes(
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


_LOG_PROBS = "reference_log_probs"
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
    common = _reference_key(config, run, base, module)
    val = data.val_dataloader()
    sides = {
        "train": CachedPass(
            _LOG_PROBS, common, data.in_blocks(), data.trained_blocks(), data.train_counts.sha256
        ),
        "val": CachedPass(_LOG_PROBS, common, val, np.arange(val.total), data.val_counts.sha256),
    }
    cached = 0
    with preserve_state(module):
        for name, side in sides.items():
            module.train(name == "train")  # same mode as the passes that it replaces
            side.read(run, rank)
            cached += side.known
            side.complete(functools.partial(_reference_logp, module), rank)
    documents = {f"{name}_documents": len(side.needed_values) for name, side in sides.items()}
    values = b"".join(side.needed_values.tobytes() for side in sides.values())
    run.manifest.facts[_LOG_PROBS] = {
        **documents,
        "from_cache": cached,
        "sha256": sha256_bytes(values),
        "seconds": round(time.monotonic() - began, 3),
    }
    run.save()
    train_D, val_D = (torch.from_numpy(side.values[:, 0]) for side in sides.values())
    return KnownReference(train_D, val_D)


def _reference_key(
    config: RunConfig, run: RunRecord, base: BaseModel, module: TrainingModule
) -> dict[str, Any]:
    """Return the part of the key that covers all but documents and micro-batches."""
    off: dict[str, Any] = {name: one for name, one in _OFF.items() if hasattr(config.lora, name)}
    assert isinstance(module.objective, OfAnswers), "known_reference refuses others"
    return {
        **environment_key(run, base, next(module.parameters()).device),
        "backend": repr(config.backend),
        "quant": repr(config.quant),
        "lora": repr(replace(config.lora, **off)),
        "chunk_tokens": module.objective.chunk_tokens,
        "packing": config.data.packing,
        **({SHARED: True} if shares_prompts(config.objective) else {}),
    }


def _reference_logp(module: TrainingModule, batch: Batch) -> np.ndarray:
    """Return the log-likelihoods of a micro-batch's documents under the base, f32 ``[S]``."""
    there = batch.to(next(module.parameters()).device)
    module.backend.begin(batch.index)
    assert isinstance(module.objective, OfAnswers), "known_reference refuses others"
    found: np.ndarray = module.objective.reference_logp(module.of_base(there)).cpu().numpy()
    return found


_SAMPLED = "sampled_answers"


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
            _sampled_side(module, data.in_blocks(), data.trained_blocks(), groups[0], rank),
            _sampled_side(module, val, np.arange(val.total), groups[1], rank),
        )
    run.manifest.facts[_SAMPLED] = {
        "groups": sum(one.groups for one in groups),
        "groups_of_equal_rewards": sum(one.equal for one in groups),
        "sha256": sha256_bytes(b"".join(one.old_logp_T.numpy().tobytes() for one in sides)),
        "seconds": round(time.monotonic() - began, 3),
    }
    run.save()
    return sides


def _sampled_side(
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
        found.append((places(batch, before_D).numpy(), _sampled_logp(module, batch, kinds)))
    for share in [found] if rank.is_alone else all_gather(found, rank):
        for place_M, logp in share:
            values[:, torch.from_numpy(place_M)] = torch.from_numpy(logp)
    return SampledSide(
        before_D,
        torch.from_numpy(groups.advantages),
        values[0],
        values[1] if kinds > 1 else None,
    )


def _sampled_logp(module: TrainingModule, batch: Batch, kinds: int) -> np.ndarray:
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
