"""Settings of the answers to a suite's items."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mens_exp.config.fields import Condition, setting, unless

__all__ = ["GRAPH_ANSWERS", "OWN_GRAPH_ANSWERS", "EngineKind", "EvalConfig", "asks_a_server"]


class EngineKind(Enum):
    """The engine that generates the answers."""

    hf = "hf"
    vllm = "vllm"
    openai = "openai"


def asks_a_server(config: Any) -> bool:
    """Tell whether a server answers, or models that a specification names."""
    return config.eval.engine is EngineKind.openai or config.suite.name == "scorecard_spec"


def _answered(config: Any) -> str:
    return f"with suite={config.suite.name} and eval.engine={config.eval.engine.value}"


GRAPH_ANSWERS = Condition(
    holds=lambda config: not asks_a_server(config),
    words=_answered,
    needs="eval.engine=hf, and a suite without models of its own",
    tasks=frozenset({"evaluate"}),
)
OWN_GRAPH_ANSWERS = Condition(
    holds=lambda config: config.eval.engine is not EngineKind.vllm,
    words=_answered,
    needs="eval.engine=hf",
    tasks=frozenset({"evaluate"}),
)
_SERVER_ANSWERS = Condition(
    holds=asks_a_server,
    words=lambda config: f"with eval.engine={config.eval.engine.value}",
    needs="eval.engine=openai",
)
_SUITE_LEAVES_IT_OPEN = unless("suite.name", "lm_eval", why="whose task files say it")
_NO_SPECIFICATION = unless("suite.name", "scorecard_spec", why="which says it of each condition")
_DRAWS = unless("eval.temperature", 0, needs="eval.temperature above 0")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """The way a suite's items are answered, the same for every suite."""

    engine: EngineKind = setting(
        EngineKind.hf,
        "hf: the graph at hand, base and tuned in one process; vllm: vLLM on a GPU, with the "
        "published base weights (task=evaluate); openai: an OpenAI-compatible server "
        "(task=evaluate).",
        only_if=_NO_SPECIFICATION,
    )
    base_url: str | None = setting(
        None,
        "The server's address, http://<host>:<port>/v1 (engine=openai).",
        only_if=(_NO_SPECIFICATION, _SERVER_ANSWERS),
    )
    model: str | None = setting(
        None,
        "The server's name of the model (engine=openai).",
        only_if=(_NO_SPECIFICATION, _SERVER_ANSWERS),
    )
    api_key_env: str | None = setting(
        None,
        "The environment variable that holds the server's key; null sends none (engine=openai).",
        only_if=_SERVER_ANSWERS,
    )
    temperature: float = setting(
        0.0,
        "0 takes the likeliest token; above, tokens are drawn.",
        ge=0,
        le=10,
        only_if=_SUITE_LEAVES_IT_OPEN,
    )
    top_p: float = setting(
        1.0,
        "Tokens are drawn from the fewest that have this share of the probability.",
        gt=0,
        le=1,
        only_if=(_SUITE_LEAVES_IT_OPEN, _DRAWS),
    )
    samples: int = setting(
        1,
        "Answers drawn for each item; pass@k has this k (Chen et al. 2021).",
        ge=1,
        le=1000,
        only_if=_SUITE_LEAVES_IT_OPEN,
    )
    max_retries: int = setting(
        0,
        "How often an answer is sent back with its errors.",
        ge=0,
        le=8,
        only_if=(_SUITE_LEAVES_IT_OPEN, _NO_SPECIFICATION),
    )
    keep_passing: str | None = setting(
        None,
        "Write the answers that pass to this file as training rows, for data=jsonl (rejection "
        "sampling; task=evaluate, with a suite of tasks of your own that no model is scored by). "
        "The tuned model alone is asked, where there is one.",
    )
    keep_per_prompt: int = setting(
        4,
        "Answers kept of one prompt at most, no two alike (unverified guess).",
        ge=1,
        only_if=unless("eval.keep_passing", None, needs="eval.keep_passing=<file>"),
    )
    seed: int = setting(
        0,
        "Seed of drawn tokens: each item, sample and attempt has a stream of its own.",
        ge=0,
        only_if=(_SUITE_LEAVES_IT_OPEN, _DRAWS),
    )
