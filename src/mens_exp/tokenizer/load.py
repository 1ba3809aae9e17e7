"""The tokenizer that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.tokenizer.hf import HfTokenizer
from mens_exp.tokenizer.template_files import template_named
from mens_exp.tokenizer.vox import VoxTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.tokenizer import TokenizerConfig
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["load_tokenizer"]


def load_tokenizer(config: TokenizerConfig, directory: Path) -> Tokenizer:
    """Return the tokenizer, under the chat template in force.

    Args:
        config: the `tokenizer` group.
        directory: of the base model, where tokenizer=hf finds its files.

    Raises:
        ModelFileError: tokenizer.json is absent or no tokenizer.
        ConfigError: the file of a chat template is absent or cannot be read.
    """
    if config.name != "vox":
        return HfTokenizer.from_directory(directory, config)
    if config.chat_template is None:
        return VoxTokenizer()
    template, source = template_named(config.chat_template)
    return VoxTokenizer(chat_template=template, template_source=source)
