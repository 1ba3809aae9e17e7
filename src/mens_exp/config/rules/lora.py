"""Which modules learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `lora`."""
    targets = config.lora.targets
    if not targets:
        yield ConfigError(
            "no module gets an adapter",
            where="lora.targets",
            found=[],
            expected="at least one module name, such as q_proj",
        )
    if len(set(targets)) < len(targets):
        yield ConfigError(
            "a module is named twice",
            where="lora.targets",
            found=", ".join(targets),
            expected="each module once",
        )
