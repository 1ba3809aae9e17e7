"""The commands that task=rejection_sampling runs in its rounds, and their problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.config.data import JsonlData
from mens_exp.config.override_values import override_of
from mens_exp.config.task import RoundRows, RoundStart
from mens_exp.config.validate import overrides_not_read
from mens_exp.errors import ConfigError, GateError, MensError, NoEffectError
from mens_exp.evals.suite import frozen_suite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mens_exp.config.root import RunConfig

SECTION = "rejection_sampling"
PASSING, ROWS = "passing.jsonl", "rows.jsonl"
_BUNDLES = ("experiment", "preset")
_DECIDED = ("task", "path", "eval.keep_passing", "eval.keep_failing")  # set by the rounds
# Sampling has a different suite, and neither the rows nor the loggers of training.
_NOT_OF_SAMPLING = {"task", "suite", "data", "logger", "path", "hydra"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCommands:
    """The commands of all rounds.

    Attributes:
        config: the configuration of the whole command.
        typed: the command's overrides, as typed.
        output: the directory of the rounds.
    """

    config: RunConfig
    typed: Sequence[str]
    output: Path

    @property
    def compares_answers(self) -> bool:
        """Whether rounds train on all graded answers instead of only on passing ones."""
        return self.config.objective.spec.compares_groups

    def place(self, number: int) -> Path:
        """Return the directory of a round."""
        return self.output / f"round_{number}"

    def sampling(self, number: int) -> list[str]:
        """Return the overrides of a round's sampling command."""
        path = "base" if number == 1 else str(self.place(number - 1) / "train")
        own = self.config.rejection_sampling.sample
        seed = f"eval.seed={self.config.eval.seed + number - 1}"
        seeds = [] if any(_key(text) == "eval.seed" for text in own) else [seed]
        unread = overrides_not_read("evaluate", map(_key, self.typed), path=path)
        skipped = {str(one.where) for one in unread if path != "base" or one.where not in _BUNDLES}
        skipped |= {_key(text) for text in (*own, *seeds)}
        kept = [
            text
            for text in self.typed
            if _key(text) not in skipped and _key(text).split(".")[0] not in _NOT_OF_SAMPLING
        ]
        rows = override_of("eval.keep_passing", str(self.place(number) / "sample" / PASSING))
        beside = ["logger=none", *seeds, override_of("path", path), rows]
        beside += ["eval.keep_failing=true"] if self.compares_answers else []
        return ["task=evaluate", *kept, *own, *beside]

    def training(self, number: int, *, has_rows: bool = True) -> list[str]:
        """Return the overrides of a round's training command, with or without sampled rows."""
        kept = [text for text in self.typed if not _is_of_rounds(_key(text))]
        start = []
        if number > 1 and self.config.rejection_sampling.start is RoundStart.last:
            start = [override_of("lora.init_from", str(self.place(number - 1) / "train"))]
            kept = [text for text in kept if not text.startswith("lora.prompt_tuning_init")]
        own = self.config.data.path if isinstance(self.config.data, JsonlData) else []
        files = [own] if isinstance(own, str) else [*own]
        files += [str(self.place(number) / ROWS)] if has_rows else []
        quoted = ",".join(override_of("", str(file)).partition("=")[2] for file in files)
        return ["task=train", *kept, *start, "data=jsonl", f"data.path=[{quoted}]"]

    def problems(self) -> Iterator[ConfigError]:
        """Yield settings that contradict the rounds."""
        settings = self.config.rejection_sampling
        for text in settings.sample:
            if _key(text) in _DECIDED:
                yield ConfigError(
                    "is decided by the rounds",
                    where=f"{SECTION}.sample",
                    found=text,
                    expected="a suite and settings of how answers are drawn",
                    remedy=f"drop {text}",
                )
        if "eval.engine=openai" in {*self.typed, *settings.sample}:
            yield ConfigError(
                "a server's model stays the same, and every round samples from another one",
                where=f"{SECTION}.sample",
                found="eval.engine=openai",
                expected="eval.engine=hf, or vllm on a GPU",
                remedy="drop eval.engine",
            )
        chosen = [text for text in self.typed if _key(text) == "data" and text != "data=jsonl"]
        if chosen:
            yield ConfigError(
                "rounds train on sampled answers, and only files of rows can be added to them",
                where="data",
                found=chosen[-1],
                expected="no choice, or data=jsonl data.path=<rows of yours>",
                remedy=f"drop {chosen[-1]}",
            )
        if self.config.lora.init_from is not None:
            yield ConfigError(
                "rounds begin at the base model",
                where="lora.init_from",
                found=self.config.lora.init_from,
                expected=f"null; {SECTION}.start=last continues from the round before",
                remedy="drop lora.init_from",
            )
        yield from self._problems_of_groups() if self.compares_answers else ()

    def _problems_of_groups(self) -> Iterator[ConfigError]:
        """Yield settings under which a round would not train the adapter that gave its answers."""
        settings = self.config.rejection_sampling
        if settings.start is not RoundStart.last or settings.rows is not RoundRows.newest:
            yield ConfigError(
                "learns from answers of the adapter that training starts from",
                where=f"objective={self.config.objective.name}",
                found=f"{SECTION}.start={settings.start.value} "
                f"{SECTION}.rows={settings.rows.value}",
                expected="each round to start from the adapter before and train on its answers",
                remedy=f"add {SECTION}.start=last {SECTION}.rows=newest",
            )
        if isinstance(self.config.data, JsonlData):
            yield ConfigError(
                f"objective={self.config.objective.name} learns from sampled answers alone",
                where="data.path",
                found=self.config.data.path,
                expected="no rows of your own",
                remedy="drop data and data.path; train on your rows first, and merge the adapter",
            )


def other_draws(samples: RunConfig) -> Iterator[ConfigError]:
    """Yield settings under which answers are not groups drawn from the model's distribution.

    Args:
        samples: the configuration of a round's sampling.
    """
    found = samples.eval
    for name, holds, wanted, why in (
        ("samples", found.samples > 1, 8, "answers to a task are compared with each other"),
        ("temperature", found.temperature == 1, 1, "answers are drawn as the model has them"),
        ("top_p", found.top_p == 1, 1, "answers are drawn as the model has them"),
        ("max_retries", found.max_retries == 0, 0, "answers are those to the prompt alone"),
    ):
        if not holds:
            yield ConfigError(
                f"does not fit an objective that compares answers, where {why}",
                where=f"{SECTION}.sample",
                found=f"eval.{name}={getattr(found, name)}",
                expected="2 or more" if name == "samples" else str(wanted),
                remedy=f"write eval.{name}={wanted}",
            )


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _is_of_rounds(key: str) -> bool:
    return key in {"task", "data", "data.path"} or key.startswith((f"{SECTION}.", "hydra."))


def is_of_bundle(problem: MensError) -> bool:
    """Return whether a problem only says that sampling does not use an experiment or a preset.

    It is ignored, because these also set keys of the base model, which the first sampling reads.
    """
    return isinstance(problem, NoEffectError) and problem.where in _BUNDLES


def shared_tasks(scores: RunConfig, samples: RunConfig) -> Iterator[GateError]:
    """Yield tasks that are both sampled and scored, which the data contract would refuse later.

    Args:
        scores: the configuration whose suite scores the rounds.
        samples: the configuration of a round's sampling.
    """
    if not scores.suite.spec.reads_files(scores.suite):
        return
    scored, sampled = (
        {item.prompt for item in frozen_suite(one.suite, calls_functions=False).items}
        for one in (scores, samples)
    )
    if shared := scored & sampled:
        yield GateError(
            "the suite that scores the rounds has tasks that are trained on",
            where="suite.path",
            found=f"{len(shared)} of {len(scored)} tasks",
            expected="tasks that are not sampled",
            remedy="score by other tasks, or suite=none",
        )
