"""A model with random weights, as a Hugging Face directory, written without holding it whole.

Every tensor is drawn from a generator of its own, keyed by the seed and the tensor's name, so that
neither the order nor the sharding changes a weight. Biases and the scales of norms are drawn too:
a projection whose bias is left out somewhere gives other logits, where zeros would hide it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.layout.directory import INDEX, SINGLE
from mens_exp.layout.random_config import config_of
from mens_exp.model.quiet import quiet
from mens_exp.tokenizer import byte_level

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from mens_exp.config.model import RandomModel

__all__ = ["write_random"]

_SHARD_BYTES = (
    1_000_000_000  # what is held at once; huggingface_hub's shards are up to five times that
)
_PIECE = 1 << 22  # elements drawn at once, 16 MB of f32; measured: 43 million a second on a core


def write_random(model: RandomModel, directory: Path) -> None:
    """Draw weights from ``model.init_seed`` and write them in ``model.dtype``, shard by shard."""
    import torch
    from safetensors.torch import save_file

    config = config_of(model)
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
    byte_level.write_files(directory)


def _skeleton(config: dict[str, Any]) -> Any:
    """Return the model on the meta device: names and shapes, and not one weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )


def _shards(skeleton: Any, itemsize: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Divide the parameters, shape by name, into files; one tensor is never divided."""
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
    """Return the mean of a tensor: norms scale by about one, and Gemma's by one plus theirs."""
    parent = name.rsplit(".", 2)[-2]
    is_norm = name.endswith("weight") and ("norm" in parent or parent.startswith("ln_"))
    return 1.0 if is_norm and not config["model_type"].startswith("gemma") else 0.0


def _draw(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int, std: float, around: float
) -> torch.Tensor:
    """Draw one tensor, normal around its mean, piece by piece."""
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
