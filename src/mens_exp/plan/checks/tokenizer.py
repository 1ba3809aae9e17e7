"""The file of a chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.tokenizer.template_files import read_template

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the file that `tokenizer.chat_template` names."""
    if config.tokenizer.chat_template is not None:
        read_template(config.tokenizer.chat_template)
    yield from ()
