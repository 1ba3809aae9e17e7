"""Settings that turn text into ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from mens_exp.config.fields import Effect, setting, unless, when

__all__ = ["TokenizerConfig", "if_random"]


@dataclass(kw_only=True, slots=True)
class TokenizerConfig:
    """The tokenizer; `hf` reads the base model's tokenizer.json and chat template."""

    name: str = setting(
        MISSING, "Its name in records; set by the option.", contract=("data.tokenizer_mode",)
    )
    chat_template: str | None = setting(
        None,
        "The chat template to use: a file with Jinja source, `chatml`, or `plain` (the texts, a "
        "newline between them, and one before a row without a system prompt); null is the "
        "tokenizer's own, or ChatML where it has none.",
        aliases={"chat_template": "Axolotl and TRL"},
    )
    date: str = setting(
        "2024-07-26",  # what Llama 3's template falls back to
        "The day, YYYY-MM-DD, that a chat template gets where it asks for today's date; fixed, so "
        "that the same rows are the same tokens tomorrow.",
    )
    allow_control_text: bool = setting(
        False,  # the value of the setting, named by its position in the schema
        "Read text of a row that spells a control token (<|im_end|>) as that token; false encodes "
        "it as the text that it is.",
    )
    allow_unrelated_rows: bool = setting(
        False,  # as above
        "Accept ids that select unrelated rows of a pretrained model's embedding, as those of "
        "tokenizer=vox do; false refuses them.",
        changes=Effect.NOTHING,
        only_if=(
            when("tokenizer.name", "vox"),
            unless("model.source", "random", why="whose embedding has learned nothing yet"),
        ),
    )


def if_random(source: str, then: Any, otherwise: Any) -> Any:
    """Return the first value for a model with random weights, the second for a pretrained one."""
    return then if source == "random" else otherwise
