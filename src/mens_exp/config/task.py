"""Tasks and their settings, including merging and the parity budget of merges and exports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.fields import Condition, section, setting, unless, when
from mens_exp.config.quant import QuantType

TASKS = (
    *("train", "plan", "evaluate", "compare", "promote", "chat", "serve", "inspect", "attribute"),
    *("merge", "export", "push", "sync", "corpus", "doctor", "rejection_sampling"),
)  # a test compares them with the options


class ExportFormat(Enum):
    """The output format of task=export."""

    bundle = "bundle"
    peft = "peft"
    v2 = "v2"
    v3 = "v3"
    hf = "hf"
    ollama = "ollama"
    vllm = "vllm"
    gguf = "gguf"


class GgufDtype(Enum):
    """Storage format of the matrices in a GGUF file."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """One task; the YAML of its option names it."""

    name: str = setting(MISSING, "The task's name; set by the option.")


@dataclass(kw_only=True, slots=True)
class ChatConfig:
    """Settings of task=chat."""

    prompt: str | None = setting(
        None,
        "A single question; null: a conversation that ends with Ctrl-D.",
        example="'What is NF4?'",
    )
    max_new_tokens: int = setting(256, "Longest answer, in tokens (a rough choice).", ge=1)
    temperature: float = setting(
        0.0, "0: the most likely token; above 0: tokens are sampled with `seed`.", ge=0
    )


@dataclass(kw_only=True, slots=True)
class PushConfig:
    """Settings of uploads by task=push."""

    repo: str | None = setting(
        None, "The hub's repository, <user>/<name>.", example="me/my-adapter"
    )
    private: bool = setting(True, "Create a new repository as a private one.")
    message: str | None = setting(
        None, "Commit message; null names the run.", example="'First adapter'"
    )


@dataclass(kw_only=True, slots=True)
class SyncConfig:
    """The destination and the timeout of uploads by task=sync."""

    project: str | None = setting(
        None,
        "W&B project; null is each run's own logger.project, mens_exp where it had none.",
        example="qlora-study",
    )
    entity: str | None = setting(
        None,
        "W&B entity; null is each run's own logger.entity, or the account's default.",
        example="my-team",
    )
    timeout_s: float = setting(
        600.0,
        "Seconds after which a run counts as not sent, and sync ends (a rough choice).",
        gt=0,
    )


class RoundStart(Enum):
    """The weights from which a round of rejection sampling trains."""

    base = "base"
    last = "last"


class RoundRows(Enum):
    """The sampled rows that a round of rejection sampling trains on."""

    all = "all"
    newest = "newest"


@dataclass(kw_only=True, slots=True)
class RejectionSamplingConfig:
    """Settings of task=rejection_sampling: its rounds, and how answers are sampled in each."""

    output: str | None = setting(
        None,
        "Directory of the rounds; the same command continues the rounds in it.",
        example="rounds",
    )
    sample: list[str] = setting(
        [],
        "Overrides of task=evaluate with which each round samples: a suite of tasks to train on, "
        "which must not be the suite that scores, and how answers are drawn. eval.seed among them "
        "holds in every round; otherwise it grows by one from round to round.",
        example="['suite=humaneval','suite.path=tasks.jsonl','eval.samples=8',"
        "'eval.temperature=0.8']",
    )
    rounds: int = setting(
        3,
        "Rounds of sampling and training (a rough choice: Singh et al. 2023, ReST-EM, gain little "
        "after two or three).",
        ge=1,
    )
    start: RoundStart = setting(
        RoundStart.base,
        "Starting point of each round's training. base: from the base model, so that errors do not "
        "add up (Zelikman et al. 2022, STaR); last: from the adapter of the round before.",
    )
    rows: RoundRows = setting(
        RoundRows.all,
        "Sampled rows that a round trains on. all: the distinct rows of all rounds (Yuan et al. "
        "2023, RFT); newest: those of the round itself.",
    )
    hours: float | None = setting(
        None,
        "Hours of all rounds together, after which no further round begins; null: no limit.",
        gt=0,
        example="4",
    )


@dataclass(kw_only=True, slots=True)
class AttributeConfig:
    """The data that task=attribute measures on, and the limits of its suggestions."""

    tokens: int = setting(
        1024,
        "Approximate number of calibration tokens from the validation documents, the same for "
        "every seed.",
        ge=1,
    )
    position_bounds: list[int] = setting(
        [0, 16, 64, 256],
        "Lowest position of each bucket in the comparison by position, ascending from 0 "
        "(a rough choice).",
        example="[0,32,128]",
    )
    extra_bits: float = setting(
        0.25,
        "Bits per parameter of the quantized modules that the suggested quant.skip may add "
        "(a rough choice).",
        ge=0,
        le=28,
    )
    targets_frac: float = setting(
        0.8,
        "Share of the modules' summed KL that the suggested lora.targets cover (a rough choice).",
        gt=0,
        le=1,
    )
    rank: int | None = setting(
        None,
        "Mean rank of adapters: a lora.rank_pattern with as many adapter parameters is suggested, "
        "by the error that low-rank adapters can take away; null suggests none.",
        ge=1,
        example="8",
    )
    quant_types: list[QuantType] = setting(
        [],
        "Further quantizers to measure each module with; of these and the configured one, the "
        "mixture with the least summed KL is suggested as quant.type_pattern.",
        example="[nf2,nf8]",
    )
    bits: float | None = setting(
        None,
        "Bits per parameter of the quantized modules that the mixture may take, with scales; null "
        "is what the configured quantizer takes.",
        gt=0,
        le=32,
        only_if=unless("attribute.quant_types", [], needs="attribute.quant_types=[nf2,nf8]"),
        idle=None,
    )


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """Settings of task=export other than `out`."""

    format: ExportFormat = setting(
        ExportFormat.bundle,
        "Form to write: a whole run as a bundle, or its adapter in another format.",
    )
    checkpoints: bool = setting(
        False,
        "Pack the training states too, so that the run can be continued elsewhere (bundle).",
        only_if=when("export.format", "bundle"),
    )
    allow_absolute_paths: bool = setting(
        False,
        "Pack even where the records name absolute paths of this machine (bundle).",
        only_if=when("export.format", "bundle"),
    )
    base_quant: QuantType | None = setting(
        None,
        "Quantization of the base during training, for adapters that do not record it; null: nf4 "
        "for schema v2, whose trainer has no other, and none for PEFT.",
        only_if=when("export.format", "peft", "v2", "v3"),
    )
    double_quant: bool | None = setting(
        None,
        "Whether its scales were quantized too; null is true for nf4 and fp4, false for others.",
        only_if=when("export.format", "peft", "v2", "v3"),
    )


@dataclass(kw_only=True, slots=True)
class GgufConfig:
    """Settings of export.format=gguf."""

    dtype: GgufDtype = setting(
        GgufDtype.f16,
        "Of the matrices: f32 and bf16 hold a model of that type exactly, q8_0 takes half of f16 "
        "(default: what every reader runs).",
    )


class OllamaForm(Enum):
    """The kind of model that an Ollama Modelfile refers to."""

    merged = "merged"
    adapter = "adapter"


@dataclass(kw_only=True, slots=True)
class OllamaConfig:
    """Settings of export.format=ollama, except its Modelfile, which gguf writes too."""

    form: OllamaForm = setting(
        OllamaForm.merged,
        "merged: the whole model in safetensors; adapter: only the adapter, on a base that Ollama "
        "knows by the name in the Modelfile.",
    )


class ExportKind(Enum):
    """Kinds of output of task=export."""

    bundle = "a run packed whole"
    adapter = "an adapter"
    merged = "a merged model"
    base = "a base model"


_ADAPTERS = frozenset({ExportFormat.peft, ExportFormat.v2, ExportFormat.v3, ExportFormat.vllm})


def export_kind(config: Any) -> ExportKind:
    """Return the kind of output that task=export writes."""
    if config.path == "base" and config.export.format is ExportFormat.hf:
        return ExportKind.base
    if config.export.format is ExportFormat.bundle:
        return ExportKind.bundle
    of_ollama = (
        config.export.format is ExportFormat.ollama and config.ollama.form is OllamaForm.adapter
    )
    return (
        ExportKind.adapter if of_ollama or config.export.format in _ADAPTERS else ExportKind.merged
    )


def _writes(*kinds: ExportKind) -> Condition:
    def words(config: Any) -> str:
        of_base = export_kind(config) is ExportKind.base
        return (
            f"with export.format={config.export.format.value}{' and path=base' if of_base else ''}"
        )

    return Condition(
        holds=lambda config: export_kind(config) in kinds,
        words=words,
        needs=f"a format of {' or '.join(kind.value for kind in kinds)}",
        tasks=EXPORT,
    )


EXPORT = frozenset({"export"})
NAMES_BASE = replace(
    _writes(ExportKind.adapter, ExportKind.base),
    needs="a format of an adapter, or export.format=hf with path=base",
)
WRITES_MERGED = _writes(ExportKind.merged)
WRITES_WEIGHTS = _writes(ExportKind.adapter, ExportKind.merged)
# The deltas of adapter formats are compared directly; any other graph is evaluated on a text.
RUNS_GRAPH = unless("export.format", "bundle", "v2", "v3", tasks=EXPORT)


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """Settings of the server started by task=serve."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. By default only this machine can connect; an address that other "
        "machines can reach needs a token (serve.token_env).",
        example="192.168.0.7",
    )
    port: int = setting(0, "Port to listen on; 0: any free port.", ge=0, le=65535)
    token_env: str = setting(
        "MENS_EXP_SERVE_TOKEN",
        "The environment variable that holds the token. If it is set, requests must send the "
        "token as `Authorization: Bearer <token>`.",
        example="MY_SERVER_TOKEN",
    )


@dataclass(kw_only=True, slots=True)
class InspectConfig:
    """The checks that task=inspect repeats; a difference ends with exit code 4."""

    verify: bool = setting(
        False,  # a plain inspection reads and hashes nothing that is large
        "Recompute every hash and figure that path depends on, back to its base model, and "
        "compare them with the records.",
    )
    replay: bool = setting(
        False,  # as above
        "Repeat the first steps of a run and name the first tensor that differs.",
    )
    replay_steps: int = setting(
        3,
        "Optimizer steps that inspect.replay repeats, from the first (a rough choice).",
        ge=1,
        only_if=when(
            "inspect.replay",
            True,
            remedy="add inspect.replay=true, or drop inspect.replay_steps",
        ),
    )


class MergeMode(Enum):
    """The part of the model that a merge writes."""

    full = "full"
    subset = "subset"


class MergeDtype(Enum):
    """Number format of merged weights."""

    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"


class MergeBase(Enum):
    """The weights to which the delta is added."""

    original = "original"
    dequantized = "dequantized"


_BY_FILE = (
    when("task.name", "merge", tasks=EXPORT),
    unless("adapter.file", None, needs="adapter=<safetensors>", tasks={"merge"}),
)


@dataclass(kw_only=True, slots=True)
class MergeConfig:
    """The output of task=merge; `out` is the directory, or for a subset the file."""

    meta: str | None = setting(
        None,
        "JSON header, of schema v2 or v3, of the tensors that adapter= names.",
        only_if=_BY_FILE,
        idle=None,
        example="candle_qlora_adapter_meta.json",
    )
    base_shard: list[str] = setting(
        [],
        "Safetensors files of the base to merge into, for the adapter that adapter= names.",
        only_if=_BY_FILE,
        idle=[],
        example="[model.safetensors]",
    )
    mode: MergeMode | None = setting(
        None,
        "full: a complete Hugging Face directory; subset: one safetensors file with only the "
        "merged tensors. null: full, but subset for merge.base_shard and for proxy adapters.",
    )
    dtype: MergeDtype | None = setting(
        None,
        "Format of what is written: f32, bf16 or f16. Sums are taken in f32 and rounded once, to "
        "the nearest. null is bf16 for a base in bf16, else f32.",
    )
    base: MergeBase | None = setting(
        None,
        "original: the published weights; dequantized: the quantized values that the adapter was "
        "trained against. null is dequantized for an adapter of a quantized base, but original "
        "for int8, which has no dequantized form here, and for merge.base_shard where the adapter "
        "does not say what quantized its base.",
    )
    untie: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Give a tied head that has a delta its own weight, in weights and config.json; false "
        "merges it into the embedding table, as the Vox mens trainer does. The input embedding "
        "then moves too: the result is not the trained model, and the certificate measures how far "
        "off.",
    )
    any_base: bool = setting(
        False,  # as above
        "Merge even where the base's content hash is not the one that the adapter was trained on.",
    )


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    """Largest allowed differences between an output and the trained model; null sets no limit."""

    mean_kl: float | None = setting(
        0.005,
        "Mean KL(trained‖written) over the probe's tokens, nats (measured: a right merge of a "
        "bf16 run of SmolLM2 has 0.0016, its delta on the unquantized base 0.29).",
        gt=0,
    )
    max_kl: float | None = setting(None, "KL of the worst token, nats.", gt=0)
    top1_agreement: float | None = setting(
        0.95,
        "Lowest share of tokens with the same most likely next token (measured: a right merge "
        "has 0.975, on the unquantized base 0.78).",
        gt=0,
        le=1,
    )
    nll_difference: float | None = setting(
        0.02, "Mean negative log likelihood, written less trained, either sign, nats.", gt=0
    )
    hidden_error: float | None = setting(
        None, "Relative error of the hidden states after any layer, Frobenius.", gt=0
    )
    weight_error: float | None = setting(
        0.05,
        "Difference between a written tensor and W + ΔW rounded to its format, as a share of ΔW, "
        "Frobenius norm (an adapter's form: only ΔW). A wrong scale, layer or side is near 1.",
        gt=0,
    )


@dataclass(kw_only=True, slots=True)
class ParityConfig:
    """parity.json, the certificate that accompanies a merge or an export."""

    tokens: int = setting(
        2048,
        "Lowest number of tokens of real text to compare on; held-out rows come first.",
        ge=2,
        only_if=RUNS_GRAPH,
    )
    text: str | None = setting(
        None,
        "A file of plain text to compare on; null takes the run's held-out rows.",
        only_if=RUNS_GRAPH,
        example="held_out.txt",
    )
    accept: bool = setting(
        False, "Keep a result that exceeds the budget; the certificate and the card say so."
    )
    budget: BudgetConfig = section(BudgetConfig)
