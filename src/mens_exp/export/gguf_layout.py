"""Lay out a model's GGUF file (header, tensors and vocabulary) without reading weights.

Names are those of gguf's own tensor map. In this format, q and k of the Llama architecture are
stored with the two halves of each head interleaved, GPT-2's Conv1D weights in the layout of Linear,
and Llama 3's frequency scaling as the tensor ``rope_freqs.weight``. A tied head is not stored
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

GGUF does not contain tokenizer.json. Readers know the splitting rules of some pre-tokenizers by
name, and merge a SentencePiece-like vocabulary only by scores. Any other tokenizer would split text
differently, and is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mens_exp.errors import ModelFileError, Problems, RequestError
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.model.quiet import quiet
from mens_exp.tokenizer.implementations import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.errors import MensError
    from mens_exp.layout.checkpoint_files import ModelDirectory

# model_type -> gguf's architecture; verified by reading back a file of each with equal logits.
ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# Buffers in older checkpoints, which are not parameters of the model.
_BUFFER = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
_GELU_TANH = {"gelu_new", "gelu_pytorch_tanh"}  # the same formula, which llama.cpp uses for GPT-2
_ROPE = {"default", "linear"}
_INSTEAD = (
    "use a merged model in safetensors, as export.format=hf writes it: task=serve and vLLM serve it"
)


class Form(Enum):
    """The conversion of a stored matrix to the file's layout."""

    plain = "plain"
    transposed = "transposed"
    interleaved = "interleaved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor of the file.

    Attributes:
        name: its name in the file.
        key: its key in the checkpoint.
        shape: its shape in the file, the fastest dimension last.
        form: conversion from the checkpoint's layout.
        heads: number of heads of an interleaved matrix.
        is_small: whether the format always stores it in F32.
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
        architecture: gguf's name of the architecture.
        directory: the model's files.
        config: transformers' configuration of the model, with all defaults.
        tensors: the tensors, in the order of the file.
        rope_factors: divisors of the rotary frequencies, [head_dim / 2]; None means ones.
    """

    architecture: str
    directory: ModelDirectory
    config: Any
    tensors: tuple[Stored, ...]
    rope_factors: tuple[float, ...] | None

    @property
    def context_length(self) -> int:
        """Positions for which the file is equivalent to the model; GGUF has no attention window."""
        window = getattr(self.config, "sliding_window", None)
        if not window or not getattr(self.config, "use_sliding_window", True):
            return int(self.config.max_position_embeddings)
        return int(min(window, self.config.max_position_embeddings))


def layout_of(source: Path) -> GgufLayout:
    """Lay out the GGUF file of a complete model directory.

    Args:
        source: directory of config.json, safetensors and tokenizer files.

    Raises:
        ModelFileError: a file or tensor is missing, or a shape contradicts config.json.
        RequestError: GGUF cannot represent the model exactly.
        Problems: several of these.
    """
    directory = read_directory(source)
    architecture = _architecture(source, directory)
    skeleton = _skeleton(source)
    config = skeleton.config
    Problems.raise_if(_architecture_problems(config, str(source / "config.json")))
    return GgufLayout(
        architecture=architecture,
        directory=directory,
        config=config,
        tensors=tuple(_tensors(directory, skeleton, architecture)),
        rope_factors=_rope_factors(config),
    )


def refuse_unwritable(source: Path) -> None:
    """Refuse a model whose graph or tokenizer has no equivalent in GGUF, without reading weights.

    Args:
        source: directory of the base that an adapter will be merged into.

    Raises:
        ModelFileError: a file is missing.
        RequestError: the family or the tokenizer has no equivalent.
        Problems: several settings have none.
    """
    from transformers import AutoConfig

    _architecture(source, read_directory(source))
    with quiet():
        config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    Problems.raise_if(_architecture_problems(config, str(source / "config.json")))
    vocabulary_of(HfTokenizer.from_directory(source), int(config.vocab_size))


def _architecture(source: Path, directory: ModelDirectory) -> str:
    """Return gguf's name for the family of a model."""
    family = directory.config.get("model_type")
    if family not in ARCHITECTURES:
        raise RequestError(
            "models of this family cannot be written as GGUF",
            where=str(source / "config.json"),
            found=str(family),
            expected=" or ".join(ARCHITECTURES),
            remedy=_INSTEAD,
        )
    return ARCHITECTURES[family]


def _skeleton(source: Path) -> Any:
    """Return the model on the meta device: names and shapes without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(str(source), local_files_only=True)
        return AutoModelForCausalLM.from_config(config)


def _architecture_problems(config: Any, where: str) -> list[MensError]:
    """List settings for which the format's graph would compute something different."""
    found: list[MensError] = []

    def must(name: str, accepted: set[Any]) -> None:
        if getattr(config, name) not in accepted:
            found.append(
                RequestError(
                    f"{name} has no equivalent in GGUF",
                    where=where,
                    found=getattr(config, name),
                    expected=" or ".join(sorted(map(str, accepted))),
                    remedy=_INSTEAD,
                )
            )

    if config.model_type == "gpt2":
        must("activation_function", _GELU_TANH)
        must("scale_attn_weights", {True})
        must("scale_attn_by_inverse_layer_idx", {False})
        return found
    must("hidden_act", {"silu"})
    # For the architecture llama alone, llama.cpp reads a bias of o_proj and rope_freqs.weight:
    # https://github.com/ggml-org/llama.cpp/tree/master/src/models (llama.cpp, qwen2.cpp, qwen3.cpp)
    is_llama = ARCHITECTURES[config.model_type] == "llama"
    if config.model_type == "qwen3":
        must("attention_bias", {False})
    kind = config.rope_parameters["rope_type"]
    accepted = _ROPE | ({"llama3"} if is_llama else set())
    if kind not in accepted:
        found.append(
            RequestError(
                "this scaling of the rotary frequencies cannot be written as GGUF",
                where=f"{where}: rope_parameters",
                found=kind,
                expected=" or ".join(sorted(accepted)),
                remedy=_INSTEAD,
            )
        )
    return found


def _rope_factors(config: Any) -> tuple[float, ...] | None:
    """Return the divisors of the frequencies in Llama 3's scaling; None for any other scaling."""
    if config.model_type == "gpt2" or config.rope_parameters["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double()
    width = 2 * len(scaled)
    theta = float(config.rope_parameters["rope_theta"])
    return tuple(theta ** (-2 * i / width) / float(f) for i, f in enumerate(scaled))


def _tensors(directory: ModelDirectory, skeleton: Any, architecture: str) -> list[Stored]:
    config, keys = skeleton.config, set(directory.tensors)
    names = tensor_names(architecture, config.num_hidden_layers)
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
        found.append(
            stored_as(
                f"{names.get_name(module)}.{part}",
                key,
                shape,
                model_type=config.model_type,
                heads=config.num_attention_heads,
                key_value_heads=getattr(config, "num_key_value_heads", 0),
            )
        )
    keys = {key for key in keys if not _BUFFER.search(key)} - tied
    problems += [
        ModelFileError("is not a tensor of the model", where=f"{directory.path}: {key}")
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


def tensor_names(architecture: str, layers: int) -> Any:
    """Return gguf's map from the modules of transformers to names in a file."""
    import gguf

    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(arch, layers)


def stored_as(
    name: str,
    key: str,
    shape: tuple[int, ...],
    *,
    model_type: str,
    heads: int,
    key_value_heads: int,
) -> Stored:
    """Return how a tensor of a checkpoint is stored.

    Args:
        name: its name in the file.
        key: its key in the checkpoint.
        shape: its shape there.
        model_type: type of the model.
        heads: number of attention heads.
        key_value_heads: number of heads of keys and values.
    """
    form, turned = Form.plain, None
    if model_type == "gpt2" and len(shape) > 1 and name.startswith("blk."):
        form, shape = Form.transposed, shape[::-1]
    elif model_type in {"llama", "mistral"} and (turned := re.search(r"\.attn_([qk])\.", name)):
        form = Form.interleaved
    return Stored(
        name=name,
        key=key,
        shape=shape,
        form=form,
        heads=0 if turned is None else heads if turned[1] == "q" else key_value_heads,
        is_small=len(shape) == 1 or name == "position_embd.weight",
    )


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece's representation of a space
_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Splitting pattern in tokenizer.json -> llama.cpp's name of the same splitting.
_SPLITS = {
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST: "llama-bpe",
    _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST: "qwen2",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """The tokenizer's part of a GGUF header.

    Attributes:
        model: ``gpt2`` for byte-level BPE, ``llama`` for a SentencePiece-like vocabulary.
        pre: name of the splitting.
        tokens: tokens by id, with placeholders for unused ids.
        types: gguf's type of each token.
        merges: merges of byte-level BPE, two parts separated by a space; None with scores.
        scores: scores of a SentencePiece-like vocabulary; None with merges.
        adds_space: whether a space is prepended to a text.
        adds_bos: whether the tokenizer prepends a begin-of-sequence token to a text.
        adds_eos: whether it appends an end-of-sequence token.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    adds_space: bool
    adds_bos: bool
    adds_eos: bool


def vocabulary_of(tokenizer: HfTokenizer, rows: int) -> GgufVocabulary:
    """Translate a tokenizer into GGUF's vocabulary.

    Args:
        tokenizer: the tokenizer of the model directory.
        rows: number of rows of the model's embedding; the vocabulary is padded to this size.

    Raises:
        RequestError: GGUF cannot represent the tokenizer, or it has more tokens than rows.
    """
    core = json.loads(tokenizer.core.to_str())
    model = core["model"]
    if model["type"] != "BPE":
        raise _vocabulary_problems("its model", model["type"], "BPE")
    if tokenizer.last_id >= rows:
        raise _vocabulary_problems(
            "its largest id", tokenizer.last_id, f"at most {rows - 1}, the rows"
        )
    is_scored = bool(model["byte_fallback"])
    tokens = _tokens(tokenizer, rows)
    adds_bos, adds_eos = _added_around(tokenizer)
    return GgufVocabulary(
        model="llama" if is_scored else "gpt2",
        pre="default" if is_scored else _splitting(core),
        tokens=tokens,
        types=_types(tokenizer, tokens, model, is_scored=is_scored),
        merges=None if is_scored else [" ".join(pair) for pair in _pairs(model)],
        scores=_scores(tokens, model) if is_scored else None,
        adds_space=is_scored and _adds_space(core),
        adds_bos=adds_bos,
        adds_eos=adds_eos,
    )


def _vocabulary_problems(what: str, found: object, expected: str) -> RequestError:
    return RequestError(
        f"GGUF cannot express this tokenizer: it differs in {what}",
        where="tokenizer.json",
        found=found if isinstance(found, str) else json.dumps(found, ensure_ascii=False),
        expected=expected,
        remedy="use export.format=hf, ollama or vllm, which keep tokenizer.json",
    )


def _tokens(tokenizer: HfTokenizer, rows: int) -> list[str]:
    by_id = {id_: token for token, id_ in tokenizer.core.get_vocab(with_added_tokens=True).items()}
    return [by_id.get(index, f"[PAD{index}]") for index in range(rows)]


def _types(
    tokenizer: HfTokenizer, tokens: list[str], model: dict[str, Any], *, is_scored: bool
) -> list[int]:
    added = tokenizer.core.get_added_tokens_decoder()
    unknown = model["unk_token"]

    def kind(index: int, token: str) -> int:
        if is_scored and token == unknown:
            return _UNKNOWN
        if index in added:
            return _CONTROL if added[index].special else _USER_DEFINED
        if token not in model["vocab"]:
            return _UNUSED
        is_byte = is_scored and len(token) == 6 and token.startswith("<0x")  # noqa: PLR2004
        return _BYTE if is_byte else _NORMAL

    return [kind(index, token) for index, token in enumerate(tokens)]


def _pairs(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the merges, best first; files store them as pairs or separated by a space."""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _added_around(tokenizer: HfTokenizer) -> tuple[bool, bool]:
    """Return whether the tokenizer itself adds a begin and an end of sequence."""
    bare = tokenizer.core.encode("a", add_special_tokens=False).ids
    whole = tokenizer.core.encode("a", add_special_tokens=True).ids
    for bos in (False, True):
        for eos in (False, True):
            around = [*[tokenizer.bos_id] * bos, *bare, *[tokenizer.eos_id] * eos]
            if around == whole:
                return bos, eos
    raise _vocabulary_problems(
        "what it adds to a text", whole, "a begin or end of sequence, or nothing"
    )


def _splitting(core: dict[str, Any]) -> str:
    """Return llama.cpp's name for the splitting of byte-level BPE."""
    normalizer = core["normalizer"]
    if normalizer not in (None, {"type": "NFC"}):  # readers do not normalize; most text is NFC
        raise _vocabulary_problems("its normalizer", normalizer, "none or NFC")
    if (core["decoder"] or {}).get("type") != "ByteLevel":
        raise _vocabulary_problems("its decoder", core["decoder"], "ByteLevel")
    if not core["model"]["merges"]:
        raise RequestError(
            "the model's tokenizer has no merges (each character or byte is a token), and readers "
            "of GGUF need merges",
            where="tokenizer.json",
            found="BPE without merges",
            expected="BPE with merges, as model=smollm2_135m has",
            remedy=_INSTEAD,
        )
    parts = core["pre_tokenizer"] or {}
    *before, level = parts["pretokenizers"] if parts.get("type") == "Sequence" else [parts]
    is_plain = level.get("type") == "ByteLevel" and not level["add_prefix_space"]
    has_regex = level.get("use_regex", True)
    name = None
    if is_plain and has_regex and not before:
        name = "gpt-2"
    elif is_plain and has_regex and before == [{"type": "Digits", "individual_digits": True}]:
        name = "smollm"
    elif is_plain and not has_regex and len(before) == 1 and before[0].get("type") == "Split":
        name = _SPLITS.get(before[0]["pattern"].get("Regex", ""))
        if before[0]["behavior"] != "Isolated" or before[0]["invert"]:
            name = None
    # Of the splittings with a name, only Llama 3's looks up whole words before it merges.
    if name is None or (core["model"].get("ignore_merges", False) and name != "llama-bpe"):
        raise _vocabulary_problems(
            "its pre-tokenizer", parts, "that of GPT-2, SmolLM, Llama 3 or Qwen 2 and 3"
        )
    return name


def _adds_space(core: dict[str, Any]) -> bool:
    """Return whether a SentencePiece-like tokenizer prepends a space to every text."""
    normalizer, splitting = core["normalizer"], core["pre_tokenizer"]
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if splitting is None and parts == [{"type": "Prepend", "prepend": _SPACE}, replace]:
        return True
    if splitting is None and parts == [replace]:
        return False
    # Metaspace's other schemes prepend no space to a text that starts with one; llama.cpp does.
    never = {"type": "Metaspace", "prepend_scheme": "never", "split": False, "replacement": _SPACE}
    if not parts and splitting == never:
        return False
    raise _vocabulary_problems(
        "its normalizer and pre-tokenizer",
        [normalizer, splitting],
        "a space before every text or before none, and no splitting",
    )


def _scores(tokens: list[str], model: dict[str, Any]) -> list[float]:
    """Return scores under which merging by score is equivalent to merging by rank.

    Raises:
        RequestError: no such scores exist. A reader merges any two tokens that form a third, the
            one with the best score first, and this tokenizer differs from that.
    """
    vocab = model["vocab"]
    ranks: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(_pairs(model)):
        ranks.setdefault(left + right, []).append(rank)
    in_order = [whole for _, whole in sorted((found[0], whole) for whole, found in ranks.items())]
    reached = 0
    for whole in in_order:
        splits = sum(whole[:cut] in vocab and whole[cut:] in vocab for cut in range(1, len(whole)))
        if ranks[whole] != list(range(reached, reached + splits)):
            raise _vocabulary_problems(
                "the order of its merges", whole, "that of one score for each token"
            )
        reached += splits
    made = {
        token
        for token in vocab
        if any(token[:cut] in vocab and token[cut:] in vocab for cut in range(1, len(token)))
        and not (token.startswith("<") and token.endswith(">"))
    }
    if made - ranks.keys():
        raise _vocabulary_problems(
            "its merges", min(made - ranks.keys()), "a merge for every token that two others make"
        )
    place = {whole: -float(index) for index, whole in enumerate(in_order)}
    lowest = -float(len(in_order))
    return [place.get(token, lowest) for token in tokens]
