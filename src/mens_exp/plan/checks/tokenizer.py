"""Checks of the chat template: its file, and the date that it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.model import RandomModel
from mens_exp.layout.cached import ready
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.hf import chat_template_of
from mens_exp.tokenizer.load import check_date
from mens_exp.tokenizer.template_files import read_template
from mens_exp.tokenizer.templates import CHATML, is_dated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check", "date_in_prompts"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the chat template, as far as it can be read yet."""
    check_date(config.tokenizer, _template(config))
    yield from ()


def date_in_prompts(config: RunConfig) -> str | None:
    """Return the date that the chat template gets, None where it asks for none or is not here."""
    template = _template(config)
    return config.tokenizer.date if template is not None and is_dated(template) else None


def _template(config: RunConfig) -> str | None:
    """Read the chat template in force; None while the model is still to be made or downloaded."""
    if config.tokenizer.chat_template is not None:
        return read_template(config.tokenizer.chat_template)
    if config.tokenizer.name == "vox" or isinstance(config.model, RandomModel):
        return CHATML
    directory = ready(config.model, cache_root())
    return None if directory is None else chat_template_of(directory, config.tokenizer)[0]
