"""What a suite needs, and settings of answers that nothing reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.evaluation import EngineKind
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems", "unread"]

_OF_A_SERVER = frozenset({"eval.base_url", "eval.model", "eval.api_key_env"})
_OF_THE_GRAPH = frozenset({"model", "tokenizer", "quant", "lora", "backend", "data", "trainer"})
_OF_DRAWING = frozenset({"eval.top_p", "eval.seed"})


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `suite` and `eval`."""
    settings = config.eval
    if settings.samples > 1 and settings.temperature == 0:
        yield ConfigError(
            "samples of the likeliest tokens are all the same",
            where="eval.samples",
            found=settings.samples,
            expected="1, or eval.temperature above 0",
            remedy="add eval.temperature=0.8",
        )
    if settings.engine is EngineKind.openai:
        yield from _server(config)


def _server(config: RunConfig) -> Iterator[ConfigError]:
    if config.task.name != "evaluate":
        yield ConfigError(
            "a server answers for a finished model, not for the one in training",
            where="eval.engine",
            found="openai",
            expected=f"hf with task={config.task.name}",
            remedy="use task=evaluate",
        )
    if config.suite.name == "heldout_syntax":
        yield ConfigError(
            "the held-out rows belong to a run's own model",
            where="suite",
            found="heldout_syntax",
            expected="a suite with items of its own with eval.engine=openai",
            remedy="choose suite=mini_python",
        )
    url = config.eval.base_url
    if url is not None and not url.startswith(("http://", "https://")):
        yield ConfigError(
            "no address of a server",
            where="eval.base_url",
            found=url,
            expected="http://<host>:<port>/v1",
        )
    for name in ("base_url", "model"):
        if getattr(config.eval, name) is None:
            yield ConfigError(
                "missing for eval.engine=openai",
                where=f"eval.{name}",
                expected="the server's address, http://<host>:<port>/v1"
                if name == "base_url"
                else "the name that the server calls the model",
            )


def unread(config: RunConfig, keys: Iterable[str]) -> Iterator[ConfigError]:
    """Yield explicit settings that other settings leave without effect.

    Args:
        config: the whole configuration.
        keys: override keys as given.
    """
    settings = config.eval
    for key in keys:
        if key.partition(".")[0] == "eval" and config.suite.name == "none":
            yield _no_effect(key, "suite=none", "a suite, such as suite=mini_python")
        elif config.task.name == "evaluate" and key.partition(".")[0] in _unread_groups(config):
            because = f"suite={config.suite.name} and eval.engine={settings.engine.value}"
            yield _no_effect(key, because, "suite=heldout_syntax with eval.engine=hf")
        elif key in _OF_A_SERVER and settings.engine is not EngineKind.openai:
            yield _no_effect(key, f"eval.engine={settings.engine.value}", "eval.engine=openai")
        elif key in _OF_DRAWING and settings.temperature == 0:
            yield _no_effect(key, "eval.temperature=0", "eval.temperature above 0")


def _unread_groups(config: RunConfig) -> frozenset[str]:
    """Return the groups that an evaluation has no use for."""
    if config.eval.engine is EngineKind.openai:
        return _OF_THE_GRAPH
    return frozenset() if config.suite.name == "heldout_syntax" else frozenset({"data"})


def _no_effect(key: str, because: str, expected: str) -> ConfigError:
    return ConfigError(
        f"has no effect with {because}",
        where=key,
        expected=expected,
        remedy=f"drop {key}, or choose {expected}",
    )
