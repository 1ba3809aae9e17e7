"""Embedding and heads in a directory's headers, in addition to the projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.model import HfModel
from mens_exp.layout import hub
from mens_exp.layout.shape import shape_of
from mens_exp.plan import file_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.layout.directory import ModelDirectory
    from mens_exp.layout.shape import Shape

__all__ = ["check", "problems"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the embedding and the heads of a directory's or a hub's model."""
    if isinstance(config.model, HfModel):
        directory = hub.describe(config.model)
        if directory.shards:  # else its dimensions alone are known
            yield from problems(directory, shape_of(config.model))


def problems(directory: ModelDirectory, shape: Shape) -> Iterator[MensError]:
    """Yield what contradicts config.json; shapes come from the headers alone."""
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if groups < 1 or heads % groups:
        where = f"{directory.path / 'config.json'}: num_key_value_heads"
        yield file_messages.heads_do_not_divide(where, heads, groups)
    embedding = shape.family.embedding
    tried = [f"{embedding}.weight", f"{embedding.partition('.')[2]}.weight"]
    key = next((key for key in tried if key in directory.tensors), None)
    if key is None:
        yield file_messages.embedding_absent(str(directory.path), tried)
        return
    found, expected = directory.tensors[key].shape, (shape.vocab_size, shape.hidden_size)
    if found != expected:
        yield file_messages.embedding_of_wrong_shape(f"{directory.path}: {key}", found, expected)
