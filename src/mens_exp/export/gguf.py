"""GGUF files of models and of LoRA adapters, and the Modelfile with which Ollama imports them.

Only one tensor is in memory at a time, in its stored and its output form. The same directory gives
the same bytes. Syntax of a Modelfile: https://github.com/ollama/ollama/blob/main/docs/modelfile.md.
Ollama uses Go templates, models use Jinja templates. Only ChatML is translated; for any other
template, Ollama uses the one in the model itself, and a comment in the Modelfile states this.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mens_exp.artifacts import atomic
from mens_exp.config.task import GgufDtype
from mens_exp.errors import DataError, MissingExtra, ModelFileError, RequestError
from mens_exp.export.gguf_layout import (
    ARCHITECTURES,
    Form,
    layout_of,
    stored_as,
    tensor_names,
    vocabulary_of,
)
from mens_exp.export.handoff import BackendFamily, Handoff, write_handoff
from mens_exp.layout.checkpoint_files import read_header
from mens_exp.model.quiet import quiet
from mens_exp.tokenizer.implementations import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.export.gguf_layout import GgufLayout, GgufVocabulary, Stored
    from mens_exp.layout.adapter_base import AdapterBase
    from mens_exp.tokenizer.load import Tokenizer
    from mens_exp.tokenizer.templates import Message

_PIECE = 1 << 22  # elements converted at once: 16 MB of f32
_QUANTIZATION_VERSION = 2  # of the block formats, as in gguf's constants
ROPE_FACTORS = "rope_freqs.weight"
# The largest finite number of each type; a block of Q8_0 has an F16 scale for 127 steps.
_LARGEST = {"F32": 3.4028235e38, "BF16": 3.3895314e38, "F16": 65504.0, "Q8_0": 65504.0 * 127}


def require_gguf() -> None:
    """Check that the gguf library is installed.

    Raises:
        MissingExtra: it is not.
    """
    try:
        import gguf  # noqa: F401  # import check only
    except ImportError as error:
        raise MissingExtra(
            "gguf is needed to write a GGUF file",
            where="export.format",
            remedy="run: pip install 'mens-exp[gguf]'",
        ) from error


def write_gguf(source: Path, target: Path, dtype: GgufDtype) -> None:
    """Write a model as a GGUF file, atomically.

    Args:
        source: a complete Hugging Face directory: config.json, safetensors, tokenizer files.
        target: the file.
        dtype: type of the matrices. Vectors and GPT-2's position table stay F32, as readers expect,
            and with Q8_0, matrices whose row length is not a multiple of 32 are stored as F16.

    Raises:
        MissingExtra: gguf is not installed.
        ModelFileError: a file or tensor is missing, or a weight is not finite or exceeds the type.
        RequestError: GGUF cannot represent the model or its tokenizer exactly.
        Problems: several of these.
    """
    require_gguf()
    import gguf

    layout = layout_of(source)
    tokenizer = HfTokenizer.from_directory(source)
    vocabulary = vocabulary_of(tokenizer, int(layout.config.vocab_size))
    _refuse_second_head(layout)
    with quiet(), atomic.file(target) as temporary:
        writer = gguf.GGUFWriter(temporary, layout.architecture)
        try:
            _add_model(writer, layout, dtype)
            _add_tokenizer(writer, tokenizer, vocabulary)
            _write_tensors(writer, layout, dtype)
        finally:
            writer.close()


def _add_model(writer: Any, layout: GgufLayout, dtype: GgufDtype) -> None:
    import gguf

    config = layout.config
    writer.add_type("model")
    writer.add_file_type(int(gguf.LlamaFileType[_FILE_TYPES[dtype]]))
    writer.add_quantization_version(_QUANTIZATION_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(layout.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _add_tokenizer(writer: Any, tokenizer: HfTokenizer, vocabulary: GgufVocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    for add, name in (
        (writer.add_bos_token_id, "bos_token"),
        (writer.add_eos_token_id, "eos_token"),
        (writer.add_unk_token_id, "unk_token"),
        (writer.add_pad_token_id, "pad_token"),
    ):
        token = tokenizer.core.token_to_id(tokenizer.special_tokens.get(name, ""))
        if token is not None:
            add(token)
    turn_ends = sorted(tokenizer.turn_end_ids - {tokenizer.eos_id})
    if turn_ends:
        writer.add_eot_token_id(turn_ends[0])
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    writer.add_add_space_prefix(vocabulary.adds_space)
    if tokenizer.has_own_template:
        writer.add_chat_template(tokenizer.chat_template)


_FILE_TYPES = {
    GgufDtype.f32: "ALL_F32",
    GgufDtype.f16: "MOSTLY_F16",
    GgufDtype.bf16: "MOSTLY_BF16",
    GgufDtype.q8_0: "MOSTLY_Q8_0",
}


def _kind(stored: Stored, dtype: GgufDtype) -> Any:
    """Return gguf's type of one tensor."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if stored.is_small:
        return kinds.F32
    kind = kinds[dtype.value.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if stored.shape[-1] % block == 0 else kinds.F16


def _write_tensors(writer: Any, layout: GgufLayout, dtype: GgufDtype) -> None:
    import gguf

    kinds = {stored.name: _kind(stored, dtype) for stored in layout.tensors}
    factors = np.array(layout.rope_factors or [], np.float32)
    if layout.rope_factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for stored in layout.tensors:
        block, size = gguf.GGML_QUANT_SIZES[kinds[stored.name]]
        n_bytes = int(np.prod(stored.shape)) // block * size
        info = (stored.name, stored.shape, np.dtype(np.float32), n_bytes, kinds[stored.name])
        writer.add_tensor_info(*info)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if layout.rope_factors is not None:
        writer.write_tensor_data(factors)
    for stored, tensor in _read(layout):
        writer.write_tensor_data(_converted(stored, tensor, kinds[stored.name]))


def _read(layout: GgufLayout) -> Iterator[tuple[Stored, torch.Tensor]]:
    """Yield every tensor in the file's layout, one at a time, in the checkpoint's dtype."""
    from safetensors import safe_open

    shard_of = {key: shard for shard in layout.directory.shards for key in read_header(shard)}
    for stored in layout.tensors:
        with safe_open(shard_of[stored.key], framework="pt") as file:
            yield stored, _formed(stored, file.get_tensor(stored.key))


def _formed(stored: Stored, tensor: Any) -> Any:
    """Return a matrix of torch or numpy in the file's layout."""
    if stored.form is Form.transposed:
        return tensor.T.contiguous()
    if stored.form is Form.interleaved:  # rows i and i + d/2 of a head become adjacent
        halves = tensor.reshape(stored.heads, 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def _converted(stored: Stored, tensor: torch.Tensor, kind: Any) -> np.ndarray[Any, Any]:
    """Round a tensor to the file's type, piece by piece."""
    from gguf.quants import quantize

    rows = tensor.reshape(-1, tensor.shape[-1])
    step = max(1, _PIECE // rows.shape[1])
    pieces = []
    for start in range(0, len(rows), step):
        piece = rows[start : start + step].float().numpy()
        largest = float(np.abs(piece).max())
        if not largest <= _LARGEST[kind.name]:  # also true for NaN
            raise ModelFileError(
                f"a weight is not finite in {kind.name}",
                where=stored.key,
                found=f"magnitude {largest:g}",
                expected=f"at most {_LARGEST[kind.name]:g}",
                remedy="write gguf.dtype=f32" if math.isfinite(largest) else "merge or train again",
            )
        pieces.append(quantize(piece, kind))
    return np.concatenate(pieces)


def _refuse_second_head(layout: GgufLayout) -> None:
    """Refuse a tied model whose checkpoint has a separate head: transformers would use it."""
    written = {stored.key for stored in layout.tensors}
    second = [key for key in layout.directory.tensors if key == "lm_head.weight"]
    if not second or second[0] in written:
        return
    import torch
    from safetensors import safe_open

    embedding = next(stored.key for stored in layout.tensors if stored.name == "token_embd.weight")
    shard_of = {key: shard for shard in layout.directory.shards for key in read_header(shard)}
    with (
        safe_open(shard_of[second[0]], framework="pt") as heads,
        safe_open(shard_of[embedding], framework="pt") as tables,
    ):
        if torch.equal(heads.get_tensor(second[0]), tables.get_tensor(embedding)):
            return
    raise ModelFileError(
        "has an untied head, but config.json ties it to the embedding",
        where=f"{layout.directory.path}: lm_head.weight",
        remedy="set tie_word_embeddings to false in config.json, or merge again",
    )


ADAPTER_FILE = "adapter.gguf"


def write_gguf_adapter(
    target: Path,
    manifest: AdapterManifest,
    tensors: Mapping[str, np.ndarray],
    base: AdapterBase,
) -> None:
    """Write a LoRA adapter as a GGUF file, for llama.cpp and Ollama.

    Readers multiply ``B A`` by ``adapter.lora.alpha`` over the rank of the pair. The rows of B are
    in the order of the base's rows in its own GGUF file.

    Args:
        target: the file.
        manifest: the adapter's manifest, with the same alpha for every layer.
        tensors: its tensors, f32, by logical name.
        base: its base model.

    Raises:
        MissingExtra: gguf is not installed.
    """
    require_gguf()
    import gguf

    writer = gguf.GGUFWriter(target, _architecture_of(base))
    try:
        writer.add_type("adapter")
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, manifest.alpha)
        for layer, stored in _adapted(manifest, base).items():
            writer.add_tensor(f"{stored.name}.lora_a", tensors[f"{layer}.lora_a"])
            B_OR = np.ascontiguousarray(_formed(stored, tensors[f"{layer}.lora_b"]))
            writer.add_tensor(f"{stored.name}.lora_b", B_OR)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def read_gguf_adapter(
    path: Path, manifest: AdapterManifest, base: AdapterBase
) -> tuple[int, dict[str, np.ndarray]]:
    """Read a file of :func:`write_gguf_adapter`.

    Args:
        path: the file.
        manifest: manifest of the adapter that was written; its layers and names are kept.
        base: its base model.

    Returns:
        Alpha, and the tensors by logical name.
    """
    import gguf

    file = gguf.GGUFReader(path)
    stored = {one.name: np.array(one.data) for one in file.tensors}
    found: dict[str, np.ndarray] = {}
    for layer, place in _adapted(manifest, base).items():
        B_OR = stored[f"{place.name}.lora_b"]
        if place.form is Form.interleaved:
            pairs = B_OR.reshape(place.heads, -1, 2, B_OR.shape[1])
            B_OR = pairs.swapaxes(1, 2).reshape(B_OR.shape)
        found |= {f"{layer}.lora_a": stored[f"{place.name}.lora_a"], f"{layer}.lora_b": B_OR}
    return int(file.fields[gguf.Keys.Adapter.LORA_ALPHA].contents()), found


def _architecture_of(base: AdapterBase) -> str:
    model_type = base.shape.family.model_type
    return ARCHITECTURES.get(model_type, model_type)


def _adapted(manifest: AdapterManifest, base: AdapterBase) -> dict[str, Stored]:
    """Return the tensor of the base's file that each layer of an adapter adds to."""
    modules, shape = base.modules, base.shape
    names = tensor_names(_architecture_of(base), shape.num_hidden_layers)
    return {
        layer: stored_as(
            f"{names.get_name(modules[layer].path)}.weight",
            modules[layer].path,
            (modules[layer].out, modules[layer].width),
            model_type=shape.family.model_type,
            heads=shape.num_attention_heads,
            key_value_heads=shape.num_key_value_heads,
        )
        for layer in manifest.layer_order
    }


MODELFILE = "Modelfile"
_CHATML = (
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n"
)
_SYSTEM = re.compile(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n", re.DOTALL)
_Turns = tuple[tuple[str, str], ...]
# Conversations that distinguish ChatML from similar templates: white space, all roles and turns.
_PROBES: tuple[_Turns, ...] = (
    (("user", "one"),),
    (("user", " spaced \n"), ("assistant", " answer \n"), ("user", "two")),
    (("system", "rules"), ("user", "one")),
    (("system", " rules \n"), ("user", "one"), ("assistant", "two"), ("user", "three")),
)
# Turns that templates otherwise like ChatML change or leave out, and their names.
_EDGES: Final = {
    "an earlier answer's <think> part": (
        ("user", "one"),
        ("assistant", "<think>\nwhy\n</think>\n\ntwo"),
        ("user", "three"),
    ),
    "an empty system turn": (("system", ""), ("user", "one")),
}


def modelfile(tokenizer: HfTokenizer, *, base: str, adapter: str | None = None) -> str:
    """Return the Modelfile; the same arguments give the same text.

    Args:
        tokenizer: the model's tokenizer, with its chat template.
        base: argument of FROM: ``.`` for the Modelfile's directory, ``./name.gguf``, or the name of
            an adapter's base model.
        adapter: argument of ADAPTER: a GGUF file, relative to the Modelfile.

    Raises:
        RequestError: a name has a line break.
    """
    for name in (base, adapter or ""):
        if "\n" in name:
            raise RequestError("a name in a Modelfile has no line break", found=name)
    lines = [f"FROM {base}"]
    if adapter is not None:
        lines.append(f"ADAPTER {adapter}")
    if is_chatml(tokenizer):
        others = [name for name, probe in _EDGES.items() if not _is_same(tokenizer, probe)]
        if others:
            lines.append(f"# The model's own template renders otherwise: {', '.join(others)}.")
        lines.append(f'TEMPLATE """{_CHATML}"""')
        system = default_system(tokenizer)
        if system:
            lines.append(f'SYSTEM """{system}"""')
    else:
        lines += [
            "# No TEMPLATE: this chat template is not ChatML, and is not translated by guessing.",
            "# Send prompts that are rendered already, or write a TEMPLATE and compare its text.",
        ]
    ends = sorted(tokenizer.spell([end]) for end in tokenizer.end_ids)
    lines += [f'PARAMETER stop "{end}"' for end in ends]
    return "\n".join(lines) + "\n"


def is_chatml(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template is ChatML, apart from a default system turn."""
    return all(_is_same(tokenizer, probe) for probe in _PROBES)


def _is_same(tokenizer: Tokenizer, probe: _Turns) -> bool:
    """Return whether the chat template renders a conversation as ChatML."""
    system = default_system(tokenizer)
    if system is None:
        return False
    try:
        return _rendered(tokenizer, probe) == _chatml(_with_system(probe, system))
    except DataError:  # the template refuses the conversation
        return False


def default_system(tokenizer: Tokenizer) -> str | None:
    """Return the template's default system turn, or "" if it has none.

    None means that the template begins differently, or with text that a Modelfile cannot quote.
    """
    try:
        text = _rendered(tokenizer, _PROBES[0])
    except DataError:
        return None
    if text.startswith("<|im_start|>user\n"):
        return ""
    found = _SYSTEM.match(text)
    return found[1] if found and '"""' not in found[1] else None


def _rendered(tokenizer: Tokenizer, turns: _Turns) -> str:
    messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.unguard(tokenizer.render(messages, add_generation_prompt=True))


def _with_system(turns: _Turns, system: str) -> _Turns:
    has_one = turns[0][0] == "system"
    return turns if has_one or not system else (("system", system), *turns)


def _chatml(turns: _Turns) -> str:
    said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{said}<|im_start|>assistant\n"


GGUF_FILE = "model.gguf"


def export_gguf(source: Path, target: Path, dtype: GgufDtype, *, base: str) -> None:
    """Write the export directory atomically.

    Args:
        source: a complete Hugging Face directory.
        target: the directory to write.
        dtype: type of the matrices.
        base: name of the model in the record.

    Raises:
        MissingExtra: gguf is not installed.
        ModelFileError: the model's files are missing or contradictory.
        RequestError: GGUF cannot represent the model exactly.
        Problems: several of these.
    """
    tokenizer = HfTokenizer.from_directory(source)
    with atomic.directory(target) as directory:
        write_gguf(source, directory / GGUF_FILE, dtype)
        text = modelfile(tokenizer, base=f"./{GGUF_FILE}")
        (directory / MODELFILE).write_text(text, encoding="utf-8", newline="\n")
        write_handoff(
            Handoff(
                backend_family=BackendFamily.OLLAMA,
                base_model=base,
                artifact_dir=".",
                tokenizer_source=GGUF_FILE,
                prompt_format=(
                    "chatml" if is_chatml(tokenizer) else "the tokenizer's chat template"
                ),
                notes=f"{dtype.value}; also read by llama.cpp: llama-server -m {GGUF_FILE}",
            ),
            directory,
        )
