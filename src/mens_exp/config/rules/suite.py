"""Rules for suites, generation and the sandbox, including settings that have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.evaluation import EngineKind
from mens_exp.config.trainer import ScorecardConfig
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig


def suite_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `suite` and `eval`."""
    yield from _files(config)
    settings = config.eval
    if settings.samples > 1 and settings.temperature == 0:
        yield ConfigError(
            "greedy samples are all the same",
            where="eval.samples",
            found=settings.samples,
            expected="1, or eval.temperature above 0",
            remedy="add eval.temperature=0.8",
        )
    if settings.engine is not EngineKind.hf:
        yield from _elsewhere(config)
    if settings.engine is EngineKind.openai:
        yield from _server(config)
    if settings.keep_passing is not None:
        yield from _keeping(config)
    yield from _while_training(config)


def scorecard_of(config: RunConfig) -> ScorecardConfig | None:
    """Return the callback that scores during training; None if it is disabled."""
    found = [one for one in config.callbacks.values() if isinstance(one, ScorecardConfig)]
    return found[0] if found else None


def _keeping(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems that prevent passing answers from being kept as rows."""
    if config.task.name != "evaluate":
        yield ConfigError(
            "only task=evaluate keeps answers",
            where="eval.keep_passing",
            found=f"task={config.task.name}",
            expected="task=evaluate, or null",
        )
    suite = config.suite
    if not suite.spec.is_yours(suite):
        yield ConfigError(
            f"suite={suite.name} is an evaluation, so no model may be trained on its tasks",
            where="eval.keep_passing",
            found=f"suite={suite.name}",
            expected="tasks of your own: suite=humaneval, rust or jsonl with suite.path",
        )
    if suite.spec.executes and config.sandbox.name == "none":
        yield ConfigError(
            "no answer can pass if none is executed",
            where="sandbox",
            found="none, with eval.keep_passing",
            expected="sandbox=bubblewrap",
        )


def _while_training(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of the scorecard during training."""
    node = scorecard_of(config)
    if node is None or node.every_n_steps is None:
        return
    suite = config.suite
    if not suite.spec.scores:
        yield ConfigError(
            "there is no suite to score with during training",
            where="callbacks.scorecard.every_n_steps",
            found=f"{node.every_n_steps} with suite={suite.name}",
            expected="a suite, such as suite=mini_python",
            remedy="choose a suite, or callbacks.scorecard.every_n_steps=null",
        )
    if suite.spec.asked_by is not None:
        yield ConfigError(
            f"{suite.spec.asked_by} scores a finished model, not one in training",
            where="callbacks.scorecard.every_n_steps",
            found=f"{node.every_n_steps} with suite={suite.name}",
            expected="a built-in suite, such as suite=mini_python",
            remedy=f"score by suite={suite.name} at the end, with "
            "callbacks.scorecard.every_n_steps=null",
        )
    trainer = config.trainer
    if trainer.max_steps > 0 and trainer.max_epochs <= 0:
        yield from late_scorecard_problems(config, trainer.max_steps, "trainer.max_steps")


def late_scorecard_problems(
    config: RunConfig, total_steps: int, bound: str
) -> Iterator[ConfigError]:
    """Yield a problem if training ends before the first scorecard.

    Args:
        config: the whole configuration.
        total_steps: optimizer steps of the run.
        bound: the setting that determines this length, for the message.
    """
    node = scorecard_of(config)
    if node is not None and node.every_n_steps is not None and node.every_n_steps > total_steps:
        yield ConfigError(
            "training ends before its first scorecard",
            where="callbacks.scorecard.every_n_steps",
            found=node.every_n_steps,
            expected=f"at most {bound} ({total_steps})",
        )


def _files(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of a suite that is read from a file."""
    suite = config.suite
    kind = suite.spec.path
    if kind is not None and not suite.spec.reads_files(suite):
        yield ConfigError(
            f"suite={suite.name} is a {kind} of your own",
            where="suite.path",
            expected="its path",
            remedy=f"add suite.path=<{kind}>",
        )
    if suite.spec.brings_models and config.task.name in {"train", "plan"}:
        yield ConfigError(
            f"suite={suite.name} brings its own models and does not score trained ones",
            where="suite",
            found=suite.name,
            expected="another suite",
            remedy=f"use task=evaluate suite={suite.name}",
        )
    yield from suite.spec.problems(suite, config.task.name)


def _elsewhere(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the features that only the local graph supports."""
    engine = config.eval.engine.value
    if config.task.name != "evaluate":
        yield ConfigError(
            f"eval.engine={engine} answers for a finished model, not for the one in training",
            where="eval.engine",
            found=engine,
            expected=f"hf with task={config.task.name}",
            remedy="use task=evaluate",
        )
    suite = config.suite
    if suite.spec.asked_by is not None:
        yield ConfigError(
            f"{suite.spec.asked_by} uses the loaded model, also for likelihoods",
            where="eval.engine",
            found=engine,
            expected=f"hf with suite={suite.name}",
        )


def _server(config: RunConfig) -> Iterator[ConfigError]:
    if config.suite.spec.from_rows:
        yield ConfigError(
            "the held-out rows belong to a run's own model",
            where="suite",
            found=config.suite.name,
            expected="a suite with its own items, with eval.engine=openai",
            remedy="choose suite=mini_python",
        )
    url = config.eval.base_url
    if url is not None and not url.startswith(("http://", "https://")):
        yield ConfigError(
            "must begin with http:// or https://",
            where="eval.base_url",
            found=url,
            expected="http://<host>:<port>/v1",
        )
    for name in ("base_url", "model"):
        if getattr(config.eval, name) is None:
            yield ConfigError(
                "is required for eval.engine=openai",
                where=f"eval.{name}",
                expected="the server's address, http://<host>:<port>/v1"
                if name == "base_url"
                else "the name that the server calls the model",
            )
