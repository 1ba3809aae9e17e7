"""What the chosen backend needs of the base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.model import HfModel
from mens_exp.config.validate import range_problems
from mens_exp.errors import ModelFileError
from mens_exp.layout import hub
from mens_exp.layout.names import HEAD, base_key
from mens_exp.layout.proxy_stack import stack_of
from mens_exp.layout.shape import shape_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what keeps the backend from being built on the base model."""
    if not isinstance(config.backend, ProxyConfig):
        return
    if any(range_problems(config.model)) or any(range_problems(config.backend)):
        return  # told already
    shape = shape_of(config.model)
    if not isinstance(config.model, HfModel):
        stack_of(shape, config.backend)
        return
    directory = hub.describe(config.model)
    key = base_key(HEAD, shape.family, directory.tensors)
    found, expected = directory.tensors[key].shape, (shape.vocab_size, shape.hidden_size)
    if found != expected:
        yield ModelFileError(
            "the embedding disagrees with config.json",
            where=f"{directory.path}: {key}",
            found=str(list(found)),
            expected=str(list(expected)),
        )
    stack_of(shape, config.backend, directory.tensors)
