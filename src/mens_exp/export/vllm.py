"""An adapter as vLLM serves it: a PEFT directory that it loads, and the command.

What vLLM accepts is read off its ``lora/peft_helper.py`` and ``config/lora.py``: it takes r and
alpha from the head of adapter_config.json for every layer, and knows neither patterns, DoRA, biases
nor modules that were saved whole.
"""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.typed_json import parse_json
from mens_exp.errors import DataError, Problems, RequestError
from mens_exp.export.handoff import BackendFamily, Handoff, write_handoff
from mens_exp.layout.safetensors_header import read_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.errors import MensError

__all__ = [
    "MAX_RANKS",
    "rank_of",
    "room_for",
    "serve_command",
    "vllm_problems",
    "write_vllm",
]

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of --max-lora-rank
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that are saved whole",
    "target_parameters": "adapters on experts that are one tensor",
    "rank_pattern": "a rank of its own for some layers",
    "alpha_pattern": "an alpha of its own for some layers",
    "trainable_token_indices": "trained tokens",
}
_EMBEDDINGS = ("lm_head", "embed_tokens", "wte", "wpe")
_MERGE = "merge it: task=merge path=<adapter> out=<directory>, and serve the directory"


def serve_command(base: str, name: str, adapter: str, rank: int) -> str:
    """Return the command that serves a base model with an adapter.

    Args:
        base: id or directory of the base model.
        name: what requests call the adapter.
        adapter: its directory.
        rank: of the adapter; vLLM makes room for the next of its own values.
    """
    return (
        f"vllm serve {shlex.quote(base)} --enable-lora "
        f"--lora-modules {shlex.quote(f'{name}={adapter}')} --max-lora-rank {room_for(rank)}"
    )


def room_for(rank: int) -> int:
    """Return the value of ``max_lora_rank`` that an adapter of a rank needs."""
    return next(value for value in MAX_RANKS if value >= rank)


def rank_of(adapter: Path) -> int:
    """Return the rank that a PEFT directory's configuration tells.

    Raises:
        DataError: it is none.
    """
    return int(_config_of(adapter)["r"])


def vllm_problems(adapter: Path) -> list[MensError]:
    """List what keeps vLLM from serving a PEFT directory as it was trained."""
    try:
        config = _config_of(adapter)
        shapes = {name: info.shape for name, info in read_header(adapter / _WEIGHTS).items()}
    except RequestError as error:
        return [error]
    return list(_found(config, shapes, str(adapter)))


def write_vllm(adapter: Path, target: Path, *, base: str, name: str) -> None:
    """Write a directory that vLLM loads, with the command in its README.

    Args:
        adapter: a PEFT directory.
        target: the directory; it appears whole or not at all.
        base: id or directory of the base model.
        name: what requests are to call the adapter.

    Raises:
        RequestError: vLLM would not serve it as it was trained.
        ModelFileError: its weights cannot be read.
        Problems: several of these.
    """
    Problems.raise_if(vllm_problems(adapter))
    command = serve_command(base, name, ".", _config_of(adapter)["r"])
    with atomic.directory(target) as directory:
        for file in (_CONFIG, _WEIGHTS):
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
    path = adapter / _CONFIG
    config = parse_json(read_bytes(path), str(path))
    if not isinstance(config, dict) or not isinstance(config.get("r"), int):
        raise DataError("is no configuration of a LoRA adapter", where=str(path))
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
