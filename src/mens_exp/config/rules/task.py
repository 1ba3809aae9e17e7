"""Rules for tasks: the settings that each requires, and those that have no effect on it."""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from mens_exp.config.fields import shown
from mens_exp.config.promotion import (
    DECIDES,
    BurnProductionPolicy,
    CompareTarget,
    CompareTest,
    Sequential,
)
from mens_exp.config.quant import DEFAULT_QUANTIZER, names_made_again
from mens_exp.config.root import LOGS
from mens_exp.config.task import ExportFormat, MergeMode
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.promotion import StudyConfig
    from mens_exp.config.root import RunConfig

_READS_A_PATH = {
    "evaluate": "no run to evaluate",
    "chat": "no run to talk to",
    "push": "no run to upload",
    "export": "nothing to export",
    "serve": "no model to serve",
    "inspect": "nothing to inspect",
    "compare": "nothing to compare",
    "sync": "nothing to upload",
}
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def task_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the requirements that the chosen task does not meet."""
    name = config.task.name
    if name in _READS_A_PATH and config.path is None and not _brings_models(config):
        yield ConfigError(
            _READS_A_PATH[name],
            where="path",
            expected="a model directory"
            if _reads_a_model(config)
            else "runs, a sweep's directory, or latest"
            if name in {"compare", "sync"}
            else "a run directory, or latest",
            remedy="add path=<directory>" if _reads_a_model(config) else "add path=latest",
        )
    takes_base = name in {"chat", "evaluate"} or (
        name == "export" and config.export.format is ExportFormat.hf
    )
    if config.path == "base" and name in _READS_A_PATH and not takes_base:
        yield ConfigError(
            "the base model alone works only with task=chat, task=evaluate and task=export "
            "export.format=hf",
            where="path",
            found="base",
            expected="a run directory, or latest",
        )
    if name == "evaluate" and not config.suite.spec.scores:
        yield ConfigError(
            f"suite={config.suite.name} evaluates nothing",
            where="suite",
            found=config.suite.name,
            expected="a suite that scores answers",
            remedy="write suite=heldout_syntax, or another suite",
        )
    if name == "push" and not _REPO.fullmatch(config.push.repo or ""):
        yield ConfigError(
            "no repository given",
            where="push.repo",
            found=config.push.repo,
            expected="<user>/<name>, the user or organisation and a name",
            remedy="add push.repo=<user>/<name>",
        )
    export = config.export
    told = export.base_quant or DEFAULT_QUANTIZER
    if export.double_quant is not None and "double_quant" not in told.spec.settings:
        yield ConfigError(
            f"contradicts export.base_quant={told.value}, which has no scales to quantize again",
            where="export.double_quant",
            found=export.double_quant,
            expected="null, or another export.base_quant",
        )
    if name == "attribute":
        yield from _attribution(config)
    if name == "rejection_sampling":
        yield from _rounds(config)
    yield from _logger_problems(config)
    if name == "chat" and config.chat.prompt is not None and not config.chat.prompt.strip():
        yield ConfigError("is empty", where="chat.prompt", expected="a question, or null")


def _rounds(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of rejection sampling: no directory for its rounds, or no tasks."""
    if config.rejection_sampling.output is None:
        yield ConfigError(
            "no output directory given",
            where="rejection_sampling.output",
            expected="a directory; a second run of the same command finds there what is done",
            remedy="add rejection_sampling.output=<directory>",
        )
    if not config.rejection_sampling.sample:
        yield ConfigError(
            "no tasks given",
            where="rejection_sampling.sample",
            expected="a suite of tasks, and how answers are drawn",
            remedy="add \"rejection_sampling.sample=['suite=humaneval','suite.path=<tasks>',"
            "'eval.samples=8','eval.temperature=0.8']\"",
        )


def _logger_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield loggers that receive nothing from the task, and `none` combined with others."""
    name, chosen = config.task.name, config.logger
    others = [sink for sink in config.loggers if config.loggers[sink] is not config.wandb]
    if name in LOGS and others:
        yield ConfigError(
            f"logs training steps, and task={name} has none",
            where="logger",
            found=",".join(others),
            expected="wandb or none",
        )
    if isinstance(chosen, dict) and len(config.loggers) < len(chosen):
        yield ConfigError(
            "none means no logger, but there are others",
            where="logger",
            found=",".join(chosen),
            expected="either none or the others",
        )


def _attribution(config: RunConfig) -> Iterator[ConfigError]:
    """Yield settings that leave nothing to attribute, or nothing to sort by."""
    if not config.quant.spec.is_made_again:
        yield ConfigError(
            "has no quantization error to attribute",
            where="quant.quant_type",
            found=config.quant.quant_type.value,
            expected=f"one of {', '.join(names_made_again())}",
        )
    yield from _mixture(config)
    if config.tokenizer.name == "vox":
        yield ConfigError(
            "a 4-bit base is measured on its own tokens",
            where="tokenizer",
            found="vox",
            expected="hf",
        )
    bounds = config.attribute.position_bounds
    if bounds[:1] != [0] or bounds != sorted(set(bounds)):
        yield ConfigError(
            "are not bounds of buckets",
            where="attribute.position_bounds",
            found=bounds,
            expected="ascending positions, the first 0, such as [0,16,64]",
        )


def _mixture(config: RunConfig) -> Iterator[ConfigError]:
    """Yield quantizers that cannot be in a mixture, or that are measured anyway."""
    where, named = "attribute.quant_types", config.attribute.quant_types
    for one in named:
        if not one.spec.is_made_again:
            yield ConfigError(
                "cannot be mixed with another quantizer",
                where=where,
                found=one.value,
                expected=f"some of {', '.join(names_made_again())}",
            )
    if config.quant.quant_type in named:
        yield ConfigError(
            "is the configured quantizer, which is measured anyway",
            where=where,
            found=config.quant.quant_type.value,
            expected="other quantizers",
        )
    if len(set(named)) < len(named):
        yield ConfigError(
            "a quantizer is named twice",
            where=where,
            found=", ".join(one.value for one in named),
            expected="each quantizer once",
        )


def _brings_models(config: RunConfig) -> bool:
    """Return whether the suite's own file names the models to evaluate."""
    return config.task.name == "evaluate" and config.suite.spec.brings_models


def _reads_a_model(config: RunConfig) -> bool:
    return config.task.name == "serve"


def merge_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of a merge's inputs."""
    if config.task.name != "merge":
        return
    if config.adapter.file is not None:
        yield from _files(config, config.adapter.file)
    else:
        yield from _directory(config)


def _directory(config: RunConfig) -> Iterator[ConfigError]:
    if config.path is None:
        yield ConfigError(
            "no adapter to merge",
            where="path",
            expected="a run, an adapter directory (schema v2, v3 or PEFT), or latest",
            remedy="add path=latest, or adapter=… merge.meta=… merge.base_shard=[…] out=…",
        )
    elif config.path == "base":
        yield ConfigError(
            "the base model alone has nothing to merge",
            where="path",
            found="base",
            expected="a run or an adapter directory, or latest",
        )


def _files(config: RunConfig, file: str) -> Iterator[ConfigError]:
    if PurePath(file).suffix == ".bin":
        yield ConfigError(
            "a Burn checkpoint is not a safetensors adapter",
            where="adapter.file",
            found=file,
            expected="a .safetensors file of schema v2 or v3",
            remedy="merge it where it was made, with: vox mens merge-weights; an adapter that "
            "backend=burn trained here merges with task=merge path=<its run>",
        )
    merge = config.merge
    needed: dict[str, tuple[str | list[str] | None, str, str]] = {
        "merge.meta": (merge.meta, "the adapter's JSON header, of schema v2 or v3", "<json>"),
        "merge.base_shard": (merge.base_shard, "the base's safetensors files", "[a.safetensors,…]"),
        "out": (config.out, "the file to write", "<file>"),
    }
    for name, (given, expected, form) in needed.items():
        if not given:
            yield ConfigError(
                "is required with adapter=<safetensors>",
                where=name,
                expected=expected,
                remedy=f"add {name}={form}",
            )
    if merge.mode is MergeMode.full:
        yield ConfigError(
            "shards alone are not a whole model",
            where="merge.mode",
            found="full",
            expected="subset",
            remedy="merge by path= and base=<directory>",
        )


def compare_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield sequential rules and comparisons on other items that the test does not support."""
    told: list[tuple[str, Any]] = [("compare", config.compare), ("promote", config.promote)]
    told += [] if config.study is None else [("study", config.study.compared([]))]
    for group, one in told:
        if one.sequential is Sequential.always_valid and one.test is CompareTest.sign_flip:
            yield ConfigError(
                "the always-valid test is a t-test",
                where=f"{group}.sequential",
                found=one.sequential.value,
                expected=f"none with {group}.test=sign_flip",
                remedy=f"set {group}.test=t or {group}.sequential=none",
            )
        if one.target is CompareTarget.these_items:
            continue
        if one.test is CompareTest.sign_flip:
            yield ConfigError(
                "flips the signs of seeds, which does not generalize to other items",
                where=f"{group}.test",
                found=one.test.value,
                expected=f"t, or {group}.target=these_items",
                remedy=f"set {group}.test=t or {group}.target=these_items",
            )
        if one.sequential is Sequential.always_valid:
            yield ConfigError(
                "accounts for repeated looks at these items only",
                where=f"{group}.sequential",
                found=one.sequential.value,
                expected=f"none, or {group}.target=these_items",
                remedy=f"set {group}.sequential=none or {group}.target=these_items",
            )


_SHA256 = re.compile(r"[0-9a-f]{64}")
_PAIR = 2
_ANY = "policy=<name> and path=<compare.json>, or promote.open_cycle=<name>, or promote.replay=true"


def promote_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the task's missing or contradictory settings."""
    if config.task.name != "promote":
        return
    asked = [DECIDES.holds(config), config.promote.open_cycle is not None, config.promote.replay]
    if not any(asked):
        needed = {"policy=<name>": None, "path=<compare.json>": config.path}
        needed["ledger=<file>"] = config.ledger
        missing = [text for text, given in needed.items() if given is None]
        yield ConfigError(
            "nothing to do",
            where="task=promote",
            expected=_ANY,
            remedy=f"add {' and '.join(missing)}",
        )
        return
    if sum(asked) > 1:
        yield ConfigError(
            "several things at once",
            where="task=promote",
            expected=_ANY,
            remedy="keep one of them",
        )
    if config.ledger is None:
        yield ConfigError(
            "no ledger given",
            where="ledger",
            expected="a file, which is created if it is missing",
            remedy="add ledger=<file>",
        )
    if DECIDES.holds(config) and config.path is None:
        yield ConfigError(
            "no evidence given",
            where="path",
            expected="compare.json files, or directories of task=compare",
            remedy="add path=<compare.json>",
        )
    if config.promote.open_cycle is not None:
        yield from _cycle_problems(config)


def _cycle_problems(config: RunConfig) -> Iterator[ConfigError]:
    told = config.promote
    if config.policy is not None and not isinstance(config.policy, BurnProductionPolicy):
        yield ConfigError(
            "this policy does not use cycles",
            where="policy",
            found=config.policy.name,
            expected="burn_production, the only one that rests on cycles",
        )
    if not told.open_cycle or not told.open_cycle.strip():
        yield ConfigError(
            "is required to open a cycle", where="promote.open_cycle", found=told.open_cycle
        )
    if not _SHA256.fullmatch(told.suite_digest or ""):
        yield ConfigError(
            "must be the digest of a suite to open a cycle",
            where="promote.suite_digest",
            found=told.suite_digest,
            expected="64 hexadecimal digits, as a scorecard has them",
        )
    if not told.seeds or len(set(told.seeds)) != len(told.seeds):
        yield ConfigError(
            "must list distinct seeds to open a cycle",
            where="promote.seeds",
            found=told.seeds,
            expected="seeds, each once",
        )
    if len(set(told.arms)) < _PAIR or len(set(told.arms)) != len(told.arms):
        yield ConfigError(
            "must list at least two distinct arms to open a cycle",
            where="promote.arms",
            found=told.arms,
            expected="at least two backends or names of arms, each once",
        )
    if not told.factor:
        yield ConfigError(
            "is required to open a cycle",
            where="promote.factor",
            expected="what the arms differ in, such as backend",
        )


_OWN = frozenset({"seed", "study", "task", "path", "hydra", "sweep", "resume"})


def study_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems that prevent a study from having arms over seeds."""
    study = config.study
    if study is None:
        return
    if bool(study.arms) == bool(study.grid):
        yield ConfigError(
            "a study has arms, or a grid whose combinations are arms",
            where="study",
            found="both" if study.arms else "neither",
            expected="study.arms, names with overrides, or study.grid, keys with values",
        )
    for key, values in study.grid.items():
        if not isinstance(values, list) or not values:
            yield ConfigError(
                "must be a list of values",
                where=f"study.grid.{key}",
                found=shown(values),
                expected=f"a list, such as [{shown(values)}]",
            )
    count = len(study.arms) or math.prod(
        len(values) for values in study.grid.values() if isinstance(values, list)
    )
    if count < _PAIR:
        yield ConfigError("must list at least two arms", where="study", found=count)
    if len(set(study.seeds)) < _PAIR or len(set(study.seeds)) != len(study.seeds):
        yield ConfigError(
            "must list at least two distinct seeds", where="study.seeds", found=study.seeds
        )
    yield from _overrides_of_study(study)


def _overrides_of_study(study: StudyConfig) -> Iterator[ConfigError]:
    """Yield overrides of settings fixed by the study, and invalid overrides."""
    places = {"study.shared": study.shared}
    places |= {f"study.arms.{name}": texts for name, texts in study.arms.items()}
    places["study.grid"] = [f"{key}=" for key in study.grid]
    for where, texts in places.items():
        for text in texts:
            key = text.lstrip("+~").partition("=")[0]
            if "=" not in text and not text.startswith("~"):
                yield ConfigError(
                    "not an override", where=where, found=text, expected="key=value or group=option"
                )
            elif key.partition(".")[0].partition("/")[0] in _OWN:
                yield ConfigError(
                    "is determined by the study",
                    where=where,
                    found=text or key,
                    expected="settings of a training run; seeds stand under study.seeds",
                )
