"""Sources of a chat template: a file that the configuration names, the model, or ChatML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mens_exp.artifacts.nearest import nearest_file
from mens_exp.errors import ConfigError, DataError, ModelFileError
from mens_exp.tokenizer.templates import CHATML, SHIPPED, check_syntax

__all__ = ["OWN", "read_template", "template_in_force", "template_named"]

OWN = "the tokenizer's own"  # what records call the source of a template that came with it


def template_in_force(
    directory: Path, config: dict[str, Any], named: str | None
) -> tuple[str, str]:
    """Return the chat template of a tokenizer, and what a record calls its source.

    Args:
        directory: the model directory.
        config: its tokenizer_config.json.
        named: what `tokenizer.chat_template` names, if anything.

    Raises:
        ConfigError: that file is absent or holds no template.
        ModelFileError: the directory has several templates and none called default.
    """
    if named is not None:
        return template_named(named)
    own = _own_template(directory, config)
    return (CHATML, "ChatML") if own is None else (own, OWN)


def template_named(name: str) -> tuple[str, str]:
    """Return the chat template that `tokenizer.chat_template` names, and its source for records.

    Raises:
        ConfigError: there is no such file, or it holds no template.
    """
    return read_template(name), name if name in SHIPPED else "a file"


def read_template(name: str) -> str:
    """Read the chat template that `tokenizer.chat_template` names.

    Raises:
        ConfigError: there is no such file, or it holds no template.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    path = Path(name).expanduser()
    where = "tokenizer.chat_template"
    try:
        text = path.read_text(encoding="utf-8")
        check_syntax(text)
    except (OSError, UnicodeDecodeError) as error:
        near = nearest_file(path.parent, path.name, (".jinja", ".jinja2", ".j2"))
        raise ConfigError(
            f"the file cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}",
            where=where,
            found=str(path),
            expected=f"a file with a Jinja chat template{near}",
        ) from error
    except DataError as error:
        raise ConfigError(
            "the file is no chat template", where=where, found=f"{path}: {error.found}"
        ) from error
    return text


def _own_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = (one for one in template if isinstance(one, dict) and one.get("name") == "default")
        template = next(named, {}).get("template")
        if template is None:
            raise ModelFileError(
                "has chat templates, but none called default",
                where=str(directory / "tokenizer_config.json"),
                remedy="write the one to use into chat_template.jinja",
            )
    return template if isinstance(template, str) else None
