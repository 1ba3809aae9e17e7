"""A Modelfile for Ollama: of a merged directory, of a GGUF file, or of a base with an adapter.

Syntax: https://github.com/ollama/ollama/blob/main/docs/modelfile.md. Ollama's templates are Go's,
a model's are Jinja's. Only ChatML is said in both; anything else is left to what Ollama finds in
the model itself, with a comment that says so.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mens_exp.errors import DataError, RequestError

if TYPE_CHECKING:
    from mens_exp.tokenizer.hf import HfTokenizer
    from mens_exp.tokenizer.protocol import Tokenizer
    from mens_exp.tokenizer.templates import Message

__all__ = ["FILE", "default_system", "is_chatml", "modelfile"]

FILE = "Modelfile"
_CHATML = (
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n"
)
_SYSTEM = re.compile(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n", re.DOTALL)
# Conversations that tell ChatML from what only looks like it: spaces kept, every role, every turn.
_PROBES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "one"),),
    (("user", " spaced \n"), ("assistant", " answer \n"), ("user", "two")),
    (("system", "rules"), ("user", "one")),
    (("system", " rules \n"), ("user", "one"), ("assistant", "two"), ("user", "three")),
)


def modelfile(tokenizer: HfTokenizer, *, base: str, adapter: str | None = None) -> str:
    """Return the Modelfile; the same arguments give the same text.

    Args:
        tokenizer: of the model, with its chat template.
        base: what FROM names: ``.`` for the directory that the Modelfile lies in, ``./name.gguf``,
            or the name of a base model for an adapter.
        adapter: what ADAPTER names: a PEFT directory, relative to the Modelfile.

    Raises:
        RequestError: a name has a line break.
    """
    for name in (base, adapter or ""):
        if "\n" in name:
            raise RequestError("a name in a Modelfile has no line break", found=name)
    lines = [f"FROM {base}"]
    if adapter is not None:
        lines.append(f"ADAPTER {adapter}")
    if is_chatml(tokenizer):
        lines.append(f'TEMPLATE """{_CHATML}"""')
        system = default_system(tokenizer)
        if system:
            lines.append(f'SYSTEM """{system}"""')
    else:
        lines += [
            "# No TEMPLATE: this chat template is not ChatML, and is not translated by guessing.",
            "# Send prompts that are rendered already, or write a TEMPLATE and compare its text.",
        ]
    ends = sorted(tokenizer.spell([end]) for end in tokenizer.end_ids)
    lines += [f'PARAMETER stop "{end}"' for end in ends]
    return "\n".join(lines) + "\n"


def is_chatml(tokenizer: Tokenizer) -> bool:
    """Tell whether the chat template is ChatML, a default system turn aside."""
    system = default_system(tokenizer)
    if system is None:
        return False
    try:
        return all(
            _rendered(tokenizer, probe) == _chatml(_with_system(probe, system)) for probe in _PROBES
        )
    except DataError:  # it refuses one of the conversations
        return False


def default_system(tokenizer: Tokenizer) -> str | None:
    """Return the system turn that the template adds by itself, or "" where it adds none.

    None says that the template begins otherwise, or with what a Modelfile cannot quote.
    """
    try:
        text = _rendered(tokenizer, _PROBES[0])
    except DataError:
        return None
    if text.startswith("<|im_start|>user\n"):
        return ""
    found = _SYSTEM.match(text)
    return found[1] if found and '"""' not in found[1] else None


def _rendered(tokenizer: Tokenizer, turns: tuple[tuple[str, str], ...]) -> str:
    messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.unguard(tokenizer.render(messages, add_generation_prompt=True))


def _with_system(turns: tuple[tuple[str, str], ...], system: str) -> tuple[tuple[str, str], ...]:
    has_one = turns[0][0] == "system"
    return turns if has_one or not system else (("system", system), *turns)


def _chatml(turns: tuple[tuple[str, str], ...]) -> str:
    said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{said}<|im_start|>assistant\n"
