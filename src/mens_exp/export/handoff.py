"""Hand an export to another program: external_serving_handoff_v1.json, vLLM, a model directory.

The record's keys are those of the systems that read it, so it has `schema` and `schema_version`
instead of our own records' `format` and `version`. Its paths are relative to its directory.

The vLLM restrictions follow its ``lora/peft_helper.py`` and ``config/lora.py``: it uses the
top-level r and alpha of adapter_config.json for every layer, and does not support patterns, DoRA,
biases or fully saved modules.

Ollama applies an adapter with llama.cpp, which multiplies ``B A`` by one alpha over the rank of the
pair. It gets a GGUF file, because Ollama's own conversion of a PEFT directory of Llama
(``convert_llama_adapter.go``) reorders A of q and k, where the rows of B would have to be.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, get_type_hints

from mens_exp.artifacts import atomic
from mens_exp.artifacts.record import check_keys, parse_json, read_bytes
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.errors import DataError, MensError, Problems, RequestError
from mens_exp.export.adapter import is_free
from mens_exp.layout.checkpoint_files import read_directory, read_header
from mens_exp.layout.shape import HEAD, check_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np

    from mens_exp.artifacts.adapter_v3 import AdapterManifest
    from mens_exp.layout.adapter_base import AdapterBase

HANDOFF_FILE = "external_serving_handoff_v1.json"
_SCHEMA = "vox_external_serving_handoff_v1"
_OLDER_SCHEMAS = ("external_serving_handoff",)  # of our earlier exports
_VERSION = 1
_OPTIONAL = frozenset({"adapter_path", "openai_base_url", "notes"})


class BackendFamily(StrEnum):
    """The serving program."""

    VLLM = "vllm"
    OLLAMA = "ollama"
    TRANSFORMERS = "hf-transformers"
    OPENAI = "openai-compatible"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """The record.

    Attributes:
        backend_family: the serving program.
        base_model: id or name of the model.
        artifact_dir: directory of the served artifact.
        tokenizer_source: directory or file of the tokenizer, or the id of a model.
        prompt_format: format of prompts, such as ``chatml``.
        adapter_path: directory of the adapter, if one is served with the base.
        openai_base_url: address of a server that is already running.
        notes: notes for the reader.
        schema: always ``vox_external_serving_handoff_v1``.
        schema_version: version of this layout.
    """

    backend_family: BackendFamily
    base_model: str
    artifact_dir: str
    tokenizer_source: str
    prompt_format: str
    adapter_path: str | None = None
    openai_base_url: str | None = None
    notes: str | None = None
    schema: str = _SCHEMA
    schema_version: int = _VERSION


def write_handoff(record: Handoff, directory: Path) -> None:
    """Write the record into an export's directory, atomically; null values are omitted.

    Raises:
        MensError: it could not be read back; nothing is written.
    """
    path = directory / HANDOFF_FILE
    value = {name: item for name, item in asdict(record).items() if item is not None}
    found = _problems(value, str(path))
    if found:
        raise MensError(
            "a record could not be read back, so it is not written",
            found="; ".join(str(problem) for problem in found),
        )
    atomic.write_json(path, value)


def read_handoff(path: Path) -> Handoff:
    """Read a record.

    Args:
        path: the file, or its directory.

    Raises:
        DataError: it is missing, is not JSON, or violates one rule.
        Problems: it violates several.
    """
    file = path / HANDOFF_FILE if path.is_dir() else path
    value = parse_json(read_bytes(file), str(file))
    if isinstance(value, dict) and value.get("schema") in _OLDER_SCHEMAS:
        value = {**value, "schema": _SCHEMA}
    Problems.raise_if(_problems(value, str(file)))
    return Handoff(**{**value, "backend_family": BackendFamily(value["backend_family"])})


def _problems(value: Any, where: str) -> list[DataError]:
    if not isinstance(value, dict):
        return check_keys(value, {}, (), where)
    if value.get("schema") != _SCHEMA:
        found = value.get("schema", "no such key")
        return [
            DataError("not this format", where=f"{where}: schema", found=found, expected=_SCHEMA)
        ]
    version = value.get("schema_version")
    if version != _VERSION or isinstance(version, bool):
        return [
            DataError(
                "of an unsupported version",
                where=f"{where}: schema_version",
                found=version,
                expected=str(_VERSION),
                remedy="upgrade mens-exp if it is newer",
            )
        ]
    hints = get_type_hints(Handoff)
    required = {field.name for field in fields(Handoff)} - _OPTIONAL
    return check_keys(value, hints, required, where) or [
        *_empty(value, where),
        *_leading_out(value, where),
    ]


def _empty(value: dict[str, Any], where: str) -> list[DataError]:
    return [
        DataError("is empty", where=f"{where}: {name}", expected="a string")
        for name, item in sorted(value.items())
        if isinstance(item, str) and not item.strip()
    ]


def _leading_out(value: dict[str, Any], where: str) -> list[DataError]:
    """List paths that are only valid on this machine."""
    found = []
    for name in ("artifact_dir", "adapter_path"):
        path = PurePosixPath(value.get(name) or ".")
        if path.is_absolute() or ".." in path.parts:
            found.append(
                DataError(
                    "points outside the export",
                    where=f"{where}: {name}",
                    found=str(path),
                    expected="a path relative to the record's directory",
                )
            )
    return found


MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of --max-lora-rank
_PEFT_CONFIG, _PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that are saved whole",
    "target_parameters": "adapters on experts that are one tensor",
    "rank_pattern": "a different rank for some layers",
    "alpha_pattern": "a different alpha for some layers",
    "trainable_token_indices": "trained tokens",
}
_EMBEDDINGS = ("lm_head", "embed_tokens", "wte", "wpe")
_MERGE = "merge it: task=merge path=<adapter> out=<directory>, and serve the directory"


def serve_command(base: str, name: str, adapter: str, rank: int) -> str:
    """Return the command that serves a base model with an adapter.

    Args:
        base: id or directory of the base model.
        name: name of the adapter in requests.
        adapter: its directory.
        rank: rank of the adapter; the command rounds it up to a value that vLLM supports.
    """
    return (
        f"vllm serve {shlex.quote(base)} --enable-lora "
        f"--lora-modules {shlex.quote(f'{name}={adapter}')} --max-lora-rank {room_for(rank)}"
    )


def room_for(rank: int) -> int:
    """Return the ``max_lora_rank`` that an adapter of this rank requires."""
    return next(value for value in MAX_RANKS if value >= rank)


def rank_of(adapter: Path) -> int:
    """Return the rank in a PEFT directory's configuration.

    Raises:
        DataError: it is not a rank.
    """
    return int(_config_of(adapter)["r"])


def vllm_problems(adapter: Path) -> list[MensError]:
    """List problems that prevent vLLM from serving a PEFT directory exactly as trained."""
    try:
        config = _config_of(adapter)
        shapes = {name: info.shape for name, info in read_header(adapter / _PEFT_WEIGHTS).items()}
    except RequestError as error:
        return [error]
    return list(_found(config, shapes, str(adapter)))


def write_vllm(adapter: Path, target: Path, *, base: str, name: str) -> None:
    """Write a directory for vLLM, atomically, with the command in its README.

    Args:
        adapter: a PEFT directory.
        target: the directory to write.
        base: id or directory of the base model.
        name: name of the adapter in requests.

    Raises:
        RequestError: vLLM would not serve the adapter as trained.
        ModelFileError: its weights cannot be read.
        Problems: several of these.
    """
    Problems.raise_if(vllm_problems(adapter))
    command = serve_command(base, name, ".", _config_of(adapter)["r"])
    with atomic.directory(target) as directory:
        for file in (_PEFT_CONFIG, _PEFT_WEIGHTS):
            shutil.copyfile(adapter / file, directory / file)
        (directory / "README.md").write_text(_README.format(name=name, command=command), "utf-8")
        write_handoff(
            Handoff(
                backend_family=BackendFamily.VLLM,
                base_model=base,
                adapter_path=".",
                artifact_dir=".",
                tokenizer_source=base,
                prompt_format="the tokenizer's chat template",
                notes=command,
            ),
            directory,
        )


_README = """# {name}

A LoRA adapter as vLLM loads it. In this directory:

    {command}

Requests name it as their model: `"model": "{name}"`.
"""


def _config_of(adapter: Path) -> dict[str, Any]:
    path = adapter / _PEFT_CONFIG
    config = parse_json(read_bytes(path), str(path))
    if not isinstance(config, dict) or not isinstance(config.get("r"), int):
        raise DataError(
            "is not a configuration of a LoRA adapter",
            where=str(path),
            found=config.get("peft_type") if isinstance(config, dict) else None,
            expected="LORA, the only type that vLLM serves as an adapter",
            remedy=_MERGE,
        )
    return config


def _found(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], where: str
) -> Iterator[MensError]:
    def refused(what: str, found: object, expected: str | None = None) -> RequestError:
        return RequestError(
            f"vLLM does not serve {what}",
            where=where,
            found=found,
            expected=expected,
            remedy=_MERGE,
        )

    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            yield refused(what, f"{key}: {config[key]}")
    if config.get("bias", "none") != "none":
        yield refused("an adapter with biases", f"bias: {config['bias']}")
    rank = config["r"]
    if not 1 <= rank <= MAX_RANKS[-1]:
        yield refused("an adapter of this rank", rank, f"1 to {MAX_RANKS[-1]}")
    for name, shape in sorted(shapes.items()):
        if any(part in name.split(".") for part in _EMBEDDINGS):
            yield refused("an adapter on the head or the embedding", name)
        elif name.endswith("lora_A.weight") and shape[0] != rank:
            yield refused("layers of different ranks", f"{name}: {shape[0]}", f"{rank}, as r says")


# llama.cpp, on which Ollama runs, applies a GGUF adapter to any model of the same architecture.
_OLLAMA_FAMILIES = ("gemma2", "llama", "mistral", "qwen2", "qwen3")


def ollama_problems(manifest: AdapterManifest, base: AdapterBase) -> Iterator[RequestError]:
    """Yield problems that prevent Ollama from applying an adapter as trained.

    Args:
        manifest: the adapter's manifest, of a method with matrices A and B.
        base: its base model.
    """
    family = base.shape.family.model_type
    stacked = [one for one in manifest.layer_order if base.modules[one].stack is not None]
    found = {
        f"adapters of {family} models": family if family not in _OLLAMA_FAMILIES else None,
        "DoRA": manifest.variant if manifest.form.no_delta else None,
        "adapters of the head": HEAD if HEAD in manifest.layer_order else None,
        "adapters of experts": ", ".join(stacked[:3]),
    }
    for what, where in found.items():
        if where:
            yield RequestError(
                f"Ollama does not load {what}",
                where="ollama.form",
                found=where,
                expected="LoRA or rsLoRA on the decoder layers of " + " or ".join(_OLLAMA_FAMILIES),
                remedy="write the merged model: export.format=ollama without ollama.form=adapter",
            )


def for_ollama(
    manifest: AdapterManifest, tensors: Mapping[str, np.ndarray]
) -> tuple[AdapterManifest, dict[str, np.ndarray]]:
    """Rescale each B so that the layer's scale is the header's alpha over the layer's own rank.

    Plain LoRA has this scale, and its bytes do not change.

    Args:
        manifest: the adapter's manifest, without :func:`ollama_problems`.
        tensors: its tensors by logical name.
    """
    folded = dict(tensors)
    for layer in manifest.layer_order:
        factor = manifest.scale_of(layer) / (manifest.alpha / manifest.rank_of(layer))
        if factor != 1:
            B_OR = tensors[f"{layer}.lora_b"].astype("float64") * factor
            folded[f"{layer}.lora_b"] = B_OR.astype("float32")
    return as_plain_lora(manifest, manifest.alpha), folded


def as_plain_lora(
    manifest: AdapterManifest, alpha: int, ranks: Mapping[str, int] | None = None
) -> AdapterManifest:
    """Return a manifest of plain LoRA, whose layers have one alpha."""
    left_out = ("alpha_pattern", "scale")
    ours = {key: one for key, one in (manifest.mens_exp or {}).items() if key not in left_out}
    ours["variant"] = "lora"
    if ranks is not None:
        ours["rank_pattern"] = dict(ranks)
    return replace(manifest, alpha=alpha, mens_exp=ours)


_MODEL_CONFIG = "config.json"
_ADAPTERS = ("adapter_config.json", "adapter_manifest.json", "candle_qlora_adapter_meta.json")


def model_directory(text: str) -> Path:
    """Return the model directory that a path names.

    Args:
        text: a Hugging Face directory, an export that contains or names one, a run that trained
            every weight, or ``latest``.

    Raises:
        RequestError: it is an adapter, a run with one, or not a model.
        ModelFileError: the model's files are missing or contradictory.
        DataError: its hand-off record violates a rule.
    """
    path = Path(text).expanduser()
    if text == "latest" or (path / "manifest.json").is_file():
        return _of_run(resolve(text))
    if (path / HANDOFF_FILE).is_file() and not (path / _MODEL_CONFIG).is_file():
        path /= read_handoff(path).artifact_dir
    if not (path / _MODEL_CONFIG).is_file():
        raise _no_model(path)
    check_weights(read_directory(path))
    return path


def occupied(out: str | None) -> list[MensError]:
    """Report an output directory that exists and is not an export."""
    path = Path(out or "").expanduser()
    if out is None or ((path / HANDOFF_FILE).is_file() and not path.samefile(Path())):
        return []
    if is_free(path):
        return []
    return [
        RequestError(
            "already exists and is not an earlier export",
            where="out",
            found=out,
            expected="a new directory, or one that an export wrote",
        )
    ]


def _of_run(run: RunDir) -> Path:
    if (run.weights / _MODEL_CONFIG).is_file():
        return run.weights
    if run.adapter.is_dir():
        raise _is_adapter(run.path)
    raise _no_model(run.path)


def _is_adapter(path: Path) -> RequestError:
    return RequestError(
        "is an adapter, not a complete model",
        where="path",
        found=str(path),
        expected="a model directory",
        remedy=f"merge it first: task=merge path={path} out=<directory>, then path=<directory>",
    )


def _no_model(path: Path) -> RequestError:
    if any((path / name).is_file() for name in _ADAPTERS):
        return _is_adapter(path)
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else []
    remedy = None
    if ggufs:
        remedy = f"run the GGUF file with llama.cpp: llama-server -m {ggufs[0]}"
    return RequestError(
        "is not a complete model directory",
        where="path",
        found=str(path) if path.exists() else f"{path}, which does not exist",
        expected="config.json, safetensors and tokenizer.json",
        remedy=remedy or "name a merged directory, such as task=merge writes",
    )
