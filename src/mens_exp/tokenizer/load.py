"""The tokenizer that a configuration names."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

from mens_exp.errors import ConfigError
from mens_exp.tokenizer.hf import HfTokenizer
from mens_exp.tokenizer.template_files import template_named
from mens_exp.tokenizer.templates import DATE, is_dated
from mens_exp.tokenizer.vox import VoxTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.tokenizer import TokenizerConfig
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["check_date", "load_tokenizer"]


def load_tokenizer(config: TokenizerConfig, directory: Path) -> Tokenizer:
    """Return the tokenizer, under the chat template in force.

    Args:
        config: the `tokenizer` group.
        directory: of the base model, where tokenizer=hf finds its files.

    Raises:
        ModelFileError: tokenizer.json is absent or no tokenizer.
        ConfigError: the file of a chat template is absent or cannot be read, or `tokenizer.date`
            is set for a template that asks for no date.
    """
    tokenizer = (
        _vox(config) if config.name == "vox" else HfTokenizer.from_directory(directory, config)
    )
    check_date(config, tokenizer.chat_template)
    return tokenizer


def check_date(config: TokenizerConfig, template: str | None) -> None:
    """Refuse a date that is none, or that nothing would read.

    Args:
        config: the `tokenizer` group.
        template: the chat template in force; None where it is not known yet.

    Raises:
        ConfigError: `tokenizer.date` is no date, or is set for a template that asks for none.
    """
    try:
        date.fromisoformat(config.date)
    except ValueError as error:
        raise ConfigError(
            "is no date",
            where="tokenizer.date",
            found=config.date,
            expected="a day as YYYY-MM-DD",
        ) from error
    if config.date != DATE and template is not None and not is_dated(template):
        raise ConfigError(
            "the chat template asks for no date",
            where="tokenizer.date",
            found=config.date,
            expected="a template that uses strftime_now or date_string",
            remedy="leave tokenizer.date out",
        )


def _vox(config: TokenizerConfig) -> VoxTokenizer:
    if config.chat_template is None:
        return VoxTokenizer()
    template, source = template_named(config.chat_template)
    return VoxTokenizer(chat_template=template, template_source=source, date=config.date)
