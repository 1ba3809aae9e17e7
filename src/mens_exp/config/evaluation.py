"""Settings for generating answers to a suite's items, and for the sandbox that executes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.fields import Condition, setting, unless
from mens_exp.config.suite import SUITES


class EngineKind(Enum):
    """The engine that generates the answers."""

    hf = "hf"
    vllm = "vllm"
    openai = "openai"


def asks_a_server(config: Any) -> bool:
    """Return whether a server, or the suite's own models, generate the answers."""
    return config.eval.engine is EngineKind.openai or config.suite.spec.brings_models


def _answered(config: Any) -> str:
    return f"with suite={config.suite.name} and eval.engine={config.eval.engine.value}"


GRAPH_ANSWERS = Condition(
    holds=lambda config: not asks_a_server(config),
    words=_answered,
    needs="eval.engine=hf, and a suite without its own models",
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


def _left_open(name: str) -> Condition:
    """Return the condition that the suite does not fix a setting of `eval`."""
    others = [spec.name for spec in SUITES.built_in.values() if name in spec.fixes]
    return Condition(
        holds=lambda config: name not in config.suite.spec.fixes,
        words=lambda config: f"with suite={config.suite.name}, {config.suite.spec.fixed_by}",
        needs=f"another suite than {' or '.join(others)}",
    )


_DRAWS = unless("eval.temperature", 0, needs="eval.temperature above 0")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Generation settings for the answers to a suite's items, the same for every suite."""

    engine: EngineKind = setting(
        EngineKind.hf,
        "hf: the loaded model, base and tuned in one process; vllm: vLLM on a GPU, with the "
        "published base weights (task=evaluate); openai: an OpenAI-compatible server "
        "(task=evaluate).",
        only_if=_left_open("engine"),
    )
    base_url: str | None = setting(
        None,
        "The server's address, http://<host>:<port>/v1 (engine=openai).",
        only_if=(_left_open("base_url"), _SERVER_ANSWERS),
        example="http://127.0.0.1:8000/v1",
    )
    model: str | None = setting(
        None,
        "Name of the model on the server (engine=openai).",
        only_if=(_left_open("model"), _SERVER_ANSWERS),
        example="my-model",
    )
    api_key_env: str | None = setting(
        None,
        "The environment variable that holds the server's key; null sends none (engine=openai).",
        only_if=_SERVER_ANSWERS,
        example="OPENAI_API_KEY",
    )
    temperature: float = setting(
        0.0,
        "0: the most likely token; above 0: tokens are sampled.",
        ge=0,
        le=10,
        only_if=_left_open("temperature"),
    )
    top_p: float = setting(
        1.0,
        "Tokens are sampled from the smallest set with this share of the probability.",
        gt=0,
        le=1,
        only_if=(_left_open("top_p"), _DRAWS),
    )
    samples: int = setting(
        1,
        "Answers drawn for each item; pass@k has this k (Chen et al. 2021).",
        ge=1,
        le=1000,
        only_if=_left_open("samples"),
    )
    max_retries: int = setting(
        0,
        "Number of times that an answer is sent back with its errors.",
        ge=0,
        le=8,
        only_if=_left_open("max_retries"),
    )
    keep_passing: str | None = setting(
        None,
        "Write the answers that pass to this file as training rows, for data=jsonl (rejection "
        "sampling; task=evaluate, with a suite of your own tasks that is not used for scoring). "
        "Only the tuned model is asked, if there is one.",
        example="sampled.jsonl",
    )
    keep_per_prompt: int = setting(
        4,
        "Highest number of answers kept for one prompt, all different (a rough choice).",
        ge=1,
        only_if=(
            unless("eval.keep_passing", None, needs="eval.keep_passing=<file>"),
            unless("eval.keep_failing", True, why="which keeps every answer"),
        ),
    )
    keep_failing: bool = setting(
        False,
        "Keep the answers that fail too, each with its reward as a field: 1 if it passes, else 0 "
        "(for objective=grpo). Equal answers are all kept.",
        only_if=unless("eval.keep_passing", None, needs="eval.keep_passing=<file>"),
    )
    seed: int = setting(
        0,
        "Seed of sampled tokens; each item, sample and attempt has its own random stream.",
        ge=0,
        only_if=(_left_open("seed"), _DRAWS),
    )


@dataclass(kw_only=True, slots=True)
class SandboxConfig:
    """Settings common to all sandboxes."""

    name: str = setting(MISSING, "Name of the sandbox; set by the option.")


@dataclass(kw_only=True, slots=True)
class NoSandbox(SandboxConfig):
    """Execute no generated code: figures that need it are null; syntax is still measured."""

    name: str = "none"


@dataclass(kw_only=True, slots=True)
class ExecutingSandbox(SandboxConfig):
    """Resource limits of each program."""

    memory_mib: int = setting(
        512, "Memory of one program, all its processes together, in MiB.", ge=64, le=65_536
    )
    cpu_s: float = setting(
        10.0, "Processor time of one program, all its processes together, in s.", gt=0, le=3_600
    )
    wall_s: float = setting(
        10.0, "Time until the whole process tree of one program is killed, in s.", gt=0, le=3_600
    )
    output_kib: int = setting(
        256, "Longest stdout, and longest stderr, of one program, in KiB.", ge=1, le=65_536
    )
    file_mib: int = setting(16, "What one program may write into files, in MiB.", ge=1, le=65_536)
    workers: int | None = setting(
        None, "Programs executed at once; null: one for each processor.", ge=1, le=1_024
    )


@dataclass(kw_only=True, slots=True)
class BubblewrapSandbox(ExecutingSandbox):
    """No network, a read-only root, a private /tmp and no home; probed before use."""

    name: str = "bubblewrap"
    processes: int = setting(32, "Processes and threads of one program at once.", ge=1, le=4_096)


@dataclass(kw_only=True, slots=True)
class UnsafeSandbox(ExecutingSandbox):
    """No isolation: programs can read, write and send what you can. Not valid for promotion."""

    name: str = "unsafe"
