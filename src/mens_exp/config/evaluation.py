"""Settings of the answers to a suite's items."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mens_exp.config.fields import setting

__all__ = ["EngineKind", "EvalConfig"]


class EngineKind(Enum):
    """The engine that generates the answers."""

    hf = "hf"
    vllm = "vllm"
    openai = "openai"


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """The way a suite's items are answered, the same for every suite."""

    engine: EngineKind = setting(
        EngineKind.hf,
        "hf: the graph at hand, base and tuned in one process; vllm: vLLM on a GPU, with the "
        "published base weights (task=evaluate); openai: an OpenAI-compatible server "
        "(task=evaluate).",
    )
    base_url: str | None = setting(
        None, "The server's address, http://<host>:<port>/v1 (engine=openai)."
    )
    model: str | None = setting(None, "The server's name of the model (engine=openai).")
    api_key_env: str | None = setting(
        None,
        "The environment variable that holds the server's key; null sends none (engine=openai).",
    )
    temperature: float = setting(
        0.0, "0 takes the likeliest token; above, tokens are drawn.", ge=0, le=10
    )
    top_p: float = setting(
        1.0,
        "Tokens are drawn from the fewest that have this share of the probability.",
        gt=0,
        le=1,
    )
    samples: int = setting(
        1, "Answers drawn for each item; pass@k has this k (Chen et al. 2021).", ge=1, le=1000
    )
    max_retries: int = setting(0, "How often an answer is sent back with its errors.", ge=0, le=8)
    keep_passing: str | None = setting(
        None,
        "Write the answers that pass to this file as training rows, for data=jsonl (rejection "
        "sampling; task=evaluate, with a suite of tasks of your own that no model is scored by). "
        "The tuned model alone is asked, where there is one.",
    )
    keep_per_prompt: int = setting(
        4, "Answers kept of one prompt at most, no two alike (unverified guess).", ge=1
    )
    seed: int = setting(
        0, "Seed of drawn tokens: each item, sample and attempt has a stream of its own.", ge=0
    )
