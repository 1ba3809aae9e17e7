"""Dimensions of a Llama-shaped model, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.config.model import DirectoryModel, ModelConfig, ShapedModel
from mens_exp.errors import ModelFileError
from mens_exp.layout.directory import ModelDirectory, read_directory
from mens_exp.layout.names import MLP, PROJECTIONS, check_family

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Shape", "check_weights", "shape_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Dimensions of a Llama-shaped model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tied: bool

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return ``[out, in]`` of each projection of one layer by module name."""
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes = [(q, d), (kv, d), (kv, d), (d, q), (f, d), (f, d), (d, f)]
        return dict(zip(PROJECTIONS, shapes, strict=True))

    @property
    def linear_parameters(self) -> int:
        """Weights of all projections of all layers."""
        return self.num_hidden_layers * sum(o * i for o, i in self.projections().values())

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding table and, where it is not tied, of the head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied else 2)

    def adapter_parameters(self, targets: Sequence[str], r: int) -> int:
        """Count LoRA parameters: ``r · (in + out)`` for each target of each layer."""
        shapes = self.projections()
        each = sum(r * sum(shapes[target]) for target in targets if target in shapes)
        return self.num_hidden_layers * each


def shape_of(model: ModelConfig) -> Shape:
    """Return a model's dimensions from the configuration or from its config.json.

    Raises:
        ModelFileError: a directory's files are missing, truncated, or of an unknown family.
    """
    if isinstance(model, DirectoryModel):
        directory = read_directory(Path(model.id).expanduser())
        return _from_config(directory.config, directory.path / "config.json")
    assert isinstance(model, ShapedModel)
    return Shape(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        tied=True,
    )


def _from_config(config: dict[str, Any], path: Path) -> Shape:
    check_family(config.get("model_type"))
    try:
        heads = int(config["num_attention_heads"])
        return Shape(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelFileError(f"has no {error.args[0]}", where=str(path)) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(
            "has an unusable dimension", where=str(path), found=str(error)
        ) from error


def check_weights(directory: ModelDirectory) -> None:
    """Compare the projections of every layer with the dimensions in config.json.

    Loading would fill a matrix that is absent with random numbers and say so in a log line.

    Raises:
        ModelFileError: naming the first projection that is absent or of another shape.
    """
    shape = _from_config(directory.config, directory.path / "config.json")
    # Saved without its head, a model's keys lack the leading `model.`.
    found = {name[name.find("layers.") :]: info.shape for name, info in directory.tensors.items()}
    for layer in range(shape.num_hidden_layers):
        for name, expected in shape.projections().items():
            block = "mlp" if name in MLP else "self_attn"
            key = f"layers.{layer}.{block}.{name}.weight"
            if found.get(key) != expected:
                raise ModelFileError(
                    "weights disagree with config.json",
                    where=f"{directory.path}: {key}",
                    found=str(list(found[key])) if key in found else "no such tensor",
                    expected=str(list(expected)),
                )
