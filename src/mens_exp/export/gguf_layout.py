"""Contents of a model's GGUF file: its header values and its tensors, none of them read yet.

Names are those of gguf's own tensor map. Facts of the format: q and k of the Llama architecture are
stored with the two halves of each head interleaved, GPT-2's Conv1D weights as Linear has them, a
tied head not at all, and Llama 3's frequency scaling as the tensor ``rope_freqs.weight``
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mens_exp.errors import ModelFileError, Problems, RequestError
from mens_exp.layout.directory import read_directory
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.errors import MensError
    from mens_exp.layout.directory import ModelDirectory

__all__ = ["ARCHITECTURES", "Form", "GgufLayout", "Stored", "layout_of"]

# model_type -> gguf's architecture. A file of each has been read back, and gave the same logits.
ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# Buffers that older checkpoints carry; no parameter of the model.
_BUFFER = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
_GELU_TANH = {"gelu_new", "gelu_pytorch_tanh"}  # two names of one formula, GPT-2's in llama.cpp
_ROPE = {"default", "linear", "llama3"}


class Form(Enum):
    """The conversion of a stored matrix to the file's layout."""

    plain = "plain"
    transposed = "transposed"
    interleaved = "interleaved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor of the file.

    Attributes:
        name: in the file.
        key: in the checkpoint.
        shape: in the file, the fastest dimension last.
        form: how the checkpoint's becomes the file's.
        heads: of an interleaved matrix.
        is_small: whether the format keeps it in F32 whatever the rest is.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    form: Form
    heads: int
    is_small: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufLayout:
    """The contents of a file.

    Attributes:
        architecture: gguf's name.
        directory: the model's own files.
        config: transformers' configuration of the model, every default filled in.
        tensors: in the order of the file.
        rope_factors: what the rotary frequencies are divided by, [head_dim / 2]; None is ones.
    """

    architecture: str
    directory: ModelDirectory
    config: Any
    tensors: tuple[Stored, ...]
    rope_factors: tuple[float, ...] | None

    @property
    def context_length(self) -> int:
        """Positions for which the file's graph is the model's: a window is not part of it."""
        window = getattr(self.config, "sliding_window", None)
        if not window or not getattr(self.config, "use_sliding_window", True):
            return int(self.config.max_position_embeddings)
        return int(min(window, self.config.max_position_embeddings))


def layout_of(source: Path) -> GgufLayout:
    """Lay out the GGUF file of a complete model directory.

    Args:
        source: config.json, safetensors and tokenizer files.

    Raises:
        ModelFileError: a file or tensor is missing, or of a shape that config.json denies.
        RequestError: the model cannot be said in GGUF exactly.
        Problems: several of these.
    """
    directory = read_directory(source)
    family = directory.config.get("model_type")
    if family not in ARCHITECTURES:
        raise RequestError(
            "models of this family are not written as GGUF",
            where=str(source / "config.json"),
            found=str(family),
            expected=" or ".join(ARCHITECTURES),
            remedy="serve the directory itself: task=serve, vLLM or Ollama read safetensors",
        )
    skeleton = _skeleton(source)
    config = skeleton.config
    Problems.raise_if(_unsayable(config, str(source / "config.json")))
    return GgufLayout(
        architecture=ARCHITECTURES[family],
        directory=directory,
        config=config,
        tensors=tuple(_tensors(directory, skeleton, ARCHITECTURES[family])),
        rope_factors=_rope_factors(config),
    )


def _skeleton(source: Path) -> Any:
    """Return the model on the meta device: names and shapes, and not one weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(str(source), local_files_only=True)
        return AutoModelForCausalLM.from_config(config)


def _unsayable(config: Any, where: str) -> list[MensError]:
    """List what the format's graph of the architecture would compute otherwise."""
    found: list[MensError] = []

    def must(name: str, accepted: set[Any]) -> None:
        if getattr(config, name) not in accepted:
            found.append(
                RequestError(
                    f"{name} has no equal in GGUF",
                    where=where,
                    found=getattr(config, name),
                    expected=" or ".join(sorted(map(str, accepted))),
                )
            )

    if config.model_type == "gpt2":
        must("activation_function", _GELU_TANH)
        must("scale_attn_weights", {True})
        must("scale_attn_by_inverse_layer_idx", {False})
        return found
    must("hidden_act", {"silu"})
    kind = config.rope_parameters["rope_type"]
    if kind not in _ROPE:
        found.append(
            RequestError(
                "this scaling of the rotary frequencies is not written as GGUF",
                where=f"{where}: rope_parameters",
                found=kind,
                expected=" or ".join(sorted(_ROPE)),
            )
        )
    return found


def _rope_factors(config: Any) -> tuple[float, ...] | None:
    """Return by what Llama 3's scaling divides each frequency, or None where it is another."""
    if config.model_type == "gpt2" or config.rope_parameters["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double()
    width = 2 * len(scaled)
    theta = float(config.rope_parameters["rope_theta"])
    return tuple(theta ** (-2 * i / width) / float(f) for i, f in enumerate(scaled))


def _tensors(directory: ModelDirectory, skeleton: Any, architecture: str) -> list[Stored]:
    import gguf

    config, keys = skeleton.config, set(directory.tensors)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = set(skeleton.all_tied_weights_keys) if config.tie_word_embeddings else set()
    found, problems = [], []
    for path, parameter in skeleton.named_parameters():
        if path in tied:
            continue
        key = path if path in keys else path.partition(".")[2]  # saved without the head
        shape = tuple(parameter.shape)
        if key not in keys or directory.tensors[key].shape != shape:
            problems.append(_missing(directory, path, key, shape))
            continue
        keys.discard(key)
        module, _, part = path.rpartition(".")
        found.append(_stored(f"{names.get_name(module)}.{part}", key, shape, config))
    keys = {key for key in keys if not _BUFFER.search(key)} - tied
    problems += [
        ModelFileError("is no tensor of the model", where=f"{directory.path}: {key}")
        for key in sorted(keys)
    ]
    Problems.raise_if(problems)
    return found


def _missing(
    directory: ModelDirectory, path: str, key: str, shape: tuple[int, ...]
) -> ModelFileError:
    there = directory.tensors.get(key)
    return ModelFileError(
        "weights disagree with config.json",
        where=f"{directory.path}: {path}",
        found="no such tensor" if there is None else str(list(there.shape)),
        expected=str(list(shape)),
    )


def _stored(name: str, key: str, shape: tuple[int, ...], config: Any) -> Stored:
    form, heads = Form.plain, 0
    if config.model_type == "gpt2" and len(shape) > 1 and name.startswith("blk."):
        form, shape = Form.transposed, shape[::-1]
    elif config.model_type in {"llama", "mistral"} and (
        turned := re.search(r"\.attn_([qk])\.", name)
    ):
        form = Form.interleaved
        heads = config.num_attention_heads if turned[1] == "q" else config.num_key_value_heads
    is_small = len(shape) == 1 or name == "position_embd.weight"
    return Stored(name=name, key=key, shape=shape, form=form, heads=heads, is_small=is_small)
