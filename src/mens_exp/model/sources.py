"""Sources of a base model, each resolved to a model directory with content hashes.

The bundled GGUF file is dequantized once and stored in bf16. A model with random weights is written
without holding all of it in memory: each tensor is drawn from a separate generator, keyed by the
seed and the tensor's name, so that neither the order nor the sharding affects a weight. Biases and
norm scales are drawn too, so that code which omits a projection's bias gives different logits;
zeros would hide such an error. The tokenizer is byte-level: one id per byte, and ChatML's markers.
torch and transformers are imported only inside functions.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest, refuse_changed_model
from mens_exp.artifacts.host import file_lock
from mens_exp.config.model import BundledModel, HfModel, ModelConfig, RandomModel
from mens_exp.errors import MissingExtra, ModelFileError
from mens_exp.layout import hub
from mens_exp.layout.checkpoint_files import INDEX, SINGLE, license_of
from mens_exp.layout.model_cache import (
    damaged_files,
    hash_shards,
    hash_weights,
    marked_weights,
    place_of,
    random_config,
    record_files,
    verified_bundled,
)
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """A base model on disk.

    Attributes:
        directory: directory of config.json, safetensors and tokenizer.json.
        name: name shown in records; the Hub id if there is one.
        source: bundled, random, directory or hub.
        weights_sha256: hash of the names and contents of the shards.
        license: as named by the weights' publisher, if known.
        revision: the Hub commit, if there is one.
        trust_remote_code: whether code shipped with the model is run.
        made_again: damaged cache files because of which it was created or downloaded again.
        stamps: size, modification time and inode of each shard, taken before hashing.
    """

    directory: Path
    name: str
    source: str
    weights_sha256: str
    license: str | None
    revision: str | None = None
    trust_remote_code: bool = False
    made_again: tuple[str, ...] = field(default=(), compare=False)
    stamps: dict[str, tuple[int, int, int]] = field(default_factory=dict, compare=False)

    def refuse_changed(self) -> None:
        """Refuse weights that were modified since they were hashed.

        Raises:
            ModelFileError: they differ; rewriting the same bytes is allowed.
        """
        now = _stamps(self.directory) if self.stamps else {}
        others = [name for name, stamp in self.stamps.items() if now.get(name) != stamp]
        if others and hash_weights(self.directory) != self.weights_sha256:
            raise ModelFileError(
                "was modified while it was read",
                where=str(self.directory / others[0]),
                expected="weights that do not change while a run loads them",
                remedy="run it again",
            )


def resolve(model: ModelConfig, cache: Path) -> BaseModel:
    """Return the directory of a base model, creating it in the cache if necessary.

    A cached directory is written under a temporary name and renamed. Every file is read and hashed
    here; if one differs from what was written, the directory is created again. A run therefore
    records the hash of the bytes that it actually reads, not one stated in a file.

    Raises:
        MensError: the source is missing, damaged, or does not match the pinned hash.
    """
    if isinstance(model, HfModel):
        return _from_hub(model)
    assert isinstance(model, BundledModel | RandomModel)
    directory = place_of(model, cache)
    stamps = _stamps(directory)
    damaged = damaged_files(directory)
    if damaged:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(directory.parent / f".{directory.name}.lock"):
            damaged = damaged_files(directory)  # another process may have made it by now
            if damaged:
                existed = directory.is_dir()
                _make(model, directory)
                damaged = damaged if existed else []
            stamps = _stamps(directory)
    return BaseModel(
        directory=directory,
        name=model.name,
        source=model.source,
        weights_sha256=marked_weights(directory),
        license=model.license if isinstance(model, BundledModel) else None,
        made_again=tuple(damaged),
        stamps=stamps,
    )


def _make(model: BundledModel | RandomModel, directory: Path) -> None:
    with atomic.directory(directory) as temporary:
        _writer(model)(temporary)
        record_files(temporary)


def _stamps(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return, by shard name, values that change when a shard is written to."""
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        state = shard.stat()
        found[shard.name] = (state.st_size, state.st_mtime_ns, state.st_ino)
    return found


def _from_hub(model: HfModel) -> BaseModel:
    """Use a local directory as it is, or the files of one commit from huggingface_hub's cache."""
    directory = hub.local(model.id)
    if directory is not None:
        directory = directory.resolve()
        stamps = _stamps(directory)
        hashes = hash_shards(directory, refuse_changed_model(directory))
        return BaseModel(
            stamps=stamps,
            directory=directory,
            name=directory.name,
            source="directory",
            weights_sha256=digest(hashes),
            license=license_of(directory),
            trust_remote_code=model.trust_remote_code,
        )
    repaired = hub.repaired_files(model)
    directory = hub.download(model)
    stamps = _stamps(directory)
    hashes = hash_shards(directory)
    damaged = hub.damaged_files(directory, hashes, hashes)
    if damaged:
        hub.download_again(model, damaged)
        stamps = _stamps(directory)
        hashes = hash_shards(directory)
        hub.refuse_damaged(directory, hub.damaged_files(directory, hashes, hashes))
    return BaseModel(
        directory=directory,
        name=model.id,
        source="hub",
        stamps=stamps,
        weights_sha256=digest(hashes),
        made_again=(*repaired, *damaged),
        license=license_of(directory),
        revision=hub.commit_of(model.id, model.revision),
        trust_remote_code=model.trust_remote_code,
    )


def _writer(model: BundledModel | RandomModel) -> Callable[[Path], None]:
    if isinstance(model, BundledModel):
        return lambda directory: write_bundled(model, directory)
    return lambda directory: write_random(model, directory)


_SHARD_BYTES = (
    1_000_000_000  # bytes in memory at once; huggingface_hub's shards are up to five times larger
)
_PIECE = 1 << 22  # elements drawn at once, 16 MB of f32; measured: 43 million a second on a core


def write_random(model: RandomModel, directory: Path) -> None:
    """Draw weights from ``model.init_seed`` and write them in ``model.dtype``, shard by shard."""
    import torch
    from safetensors.torch import save_file

    config = random_config(model)
    skeleton = _skeleton(config)
    dtype = getattr(torch, config["dtype"])
    std = skeleton.config.initializer_range
    plan = list(_shards(skeleton, dtype.itemsize))
    places: dict[str, str] = {}
    for number, names in enumerate(plan, start=1):
        file = SINGLE if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        tensors = {
            name: _draw(
                name, shape, dtype, seed=model.init_seed, std=std, around=_centre(name, config)
            )
            for name, shape in names.items()
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    if len(plan) > 1:
        index = {"metadata": {}, "weight_map": places}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), "utf-8")
    skeleton.config.save_pretrained(directory)
    write_byte_level_tokenizer(directory)


def _skeleton(config: dict[str, Any]) -> Any:
    """Return the model on the meta device: names and shapes without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )


def _shards(skeleton: Any, itemsize: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Divide the parameters, name to shape, into files; a tensor is never split."""
    tied = set(skeleton.all_tied_weights_keys) if skeleton.config.tie_word_embeddings else set()
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, parameter in skeleton.named_parameters():
        if name in tied:
            continue
        own = parameter.numel() * itemsize
        if shard and size + own > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tuple(parameter.shape)
        size += own
    yield shard


def _centre(name: str, config: dict[str, Any]) -> float:
    """Return the mean of a tensor: about one for norm scales, zero for Gemma's, which add one."""
    parent = name.rsplit(".", 2)[-2]
    is_norm = name.endswith("weight") and ("norm" in parent or parent.startswith("ln_"))
    return 1.0 if is_norm and not config["model_type"].startswith("gemma") else 0.0


def _draw(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int, std: float, around: float
) -> torch.Tensor:
    """Draw one tensor piece by piece, normally distributed around its mean."""
    import torch

    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    generator = np.random.Generator(np.random.SFC64(key))
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = generator.standard_normal(min(_PIECE, flat.numel() - start), dtype=np.float32)
        piece *= std
        piece += around
        flat[start : start + len(piece)] = torch.from_numpy(piece)
    return tensor


def write_bundled(model: BundledModel, directory: Path) -> None:
    """Write weights, tokenizer and chat template of a bundled model.

    The weights are the dequantized 4-bit blocks of the GGUF, rounded to bf16, the format in which
    the model was published.

    Raises:
        MissingExtra: the wheel that contains the weights, or gguf, is not installed.
        ModelFileError: the file does not match the pinned hash, or its tokenizer is unknown.
    """
    path = verified_bundled(model)
    try:
        import gguf  # noqa: F401  # needed by transformers; fail early with its name
    except ImportError as error:
        raise MissingExtra(
            "gguf is needed to read the bundled weights",
            where="model",
            remedy="run: pip install 'mens-exp[gguf]'",
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet(), gguf_parsed_once():
        weights = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        weights.save_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        core = tokenizer.backend_tokenizer
        core.pre_tokenizer = _splitting(path)  # transformers takes GPT-2's for every BPE
        tokenizer.save_pretrained(directory)


@contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """Parse each GGUF file once in this context, in which no file may change.

    Transformers parses it for the configuration, the tokenizer and the weights each, which is slow
    if the vocabulary is large.
    """
    import gguf

    parse, parsed = gguf.GGUFReader, {}

    def known(path: Any) -> Any:
        place = os.path.realpath(path)
        if place not in parsed:
            parsed[place] = parse(path)
        return parsed[place]

    gguf.GGUFReader = known
    try:
        yield
    finally:
        gguf.GGUFReader = parse


def _splitting(path: Path) -> pre_tokenizers.PreTokenizer:
    """Return how the tokenizer of a GGUF file splits texts before it merges bytes.

    Raises:
        ModelFileError: the file names a splitting other than that of GPT-2 and of SmolLM.
    """
    import gguf

    field = gguf.GGUFReader(path).fields.get(gguf.Keys.Tokenizer.PRE)
    name = None if field is None else field.contents()
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    raise ModelFileError(
        "its tokenizer splits texts in an unknown way",
        where=str(path),
        found=f"{gguf.Keys.Tokenizer.PRE}={name}",
        expected="gpt-2 or smollm",
        remedy="use a directory with a tokenizer.json: model=hf model.id=<directory>",
    )


_BYTE_LEVEL_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_LEVEL_VOCAB_SIZE = (
    320  # 3 control tokens and 256 bytes, filled up to a multiple of the 4-bit block
)


def write_byte_level_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into a model directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*_BYTE_LEVEL_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _BYTE_LEVEL_SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
