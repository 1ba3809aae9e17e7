"""Generator of docs/config.md, from the schemas and the files of the config groups.

``python -m mens_exp.config.reference_page`` prints it; ``make docs`` writes it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING
from yaml import safe_load

from mens_exp.config.fields import Effect, declared, range_of
from mens_exp.config.loader import SCHEMAS, effect_of
from mens_exp.config.root import RunConfig
from mens_exp.config.sweep import LAUNCHERS
from mens_exp.config.trainer import EarlyStoppingConfig
from mens_exp.config.user_config import config_directory, our_options
from mens_exp.config.validate import TASK_READS

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = """# Configuration

Every group with its options, and every key with its type, default, range and meaning.
`--help` is the short form; `--cfg job` shows what a command composes to. Made by `make docs`
from the schemas in `src/mens_exp/config/` and the files in `conf/`; do not edit it.

"yes" under contract says that a key changes what is learned: two runs are then different arms.
"Needs" says what else has to be set for a key to have an effect; to set it without is an error.

A group takes an option, `group=option`; a key takes a value, `group.key=value`. A `./conf` of
your own adds options: see [extending.md](extending.md).
"""
_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "any"}


def page() -> str:
    """Return the whole page; the output is deterministic for given schemas and files."""
    parts = [_HEAD, *_root(), *_sections(), *_tasks()]
    return "\n".join(parts).rstrip() + "\n"


def _root() -> Iterator[str]:
    yield "## Keys of the whole command\n"
    sections = {name: schema for name, schema, _ in _nodes()}
    rows = [
        field
        for field in dataclasses.fields(RunConfig)
        if field.name not in sections and field.name not in our_options()
    ]
    yield from _table(RunConfig, rows, "")
    for name, schema, _ in _nodes():
        needs = " ".join(["", *_needs(RunConfig, name)])
        yield f"\n## `{name}`\n\n{_first_line(schema)}{needs}\n"
        yield from _table(schema, dataclasses.fields(schema), f"{name}.")
    for option, launcher in LAUNCHERS.items():
        rows = [field for field in dataclasses.fields(launcher) if field.name != "_target_"]
        yield f"\n## `hydra/launcher={option}`\n\n{_first_line(launcher)}\n"
        yield from _table(launcher, rows, "hydra.launcher.")


def _nodes() -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Yield the nodes of the root that are not config groups."""
    hints = get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        if field.name not in our_options() and dataclasses.is_dataclass(hints[field.name]):
            yield field.name, hints[field.name], field


def _sections() -> Iterator[str]:
    for group in [name for name in our_options() if name != "task"]:
        yield f"\n## Group `{group}`\n"
        yield from _options(group)
        if group in RunConfig.__dataclass_fields__ and (
            needs := " ".join(_needs(RunConfig, group))
        ):
            yield f"\n{needs}"
        schemas = SCHEMAS.get(group, {})
        for name, schema in schemas.items():
            if own := _settable(schema):
                yield f"\n{_introduced(group, name, schema, schemas)}\n"
                yield from _table(schema, own, _prefix(group, name), group)


def _options(group: str) -> Iterator[str]:
    default = _defaults().get(group)
    yield "| option | what it is for |\n|---|---|"
    for option in our_options()[group]:
        mark = f"**`{option}`** (default)" if option == default else f"`{option}`"
        yield f"| {mark} | {_cell(_opening(group, option))} |"


def _opening(group: str, option: str) -> str:
    """Return the first line of an option's file."""
    text = (config_directory() / group / f"{option}.yaml").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    return lines[0].removeprefix("# ")


def _defaults() -> dict[str, str]:
    values = safe_load((config_directory() / "config.yaml").read_text("utf-8"))
    entries = [entry for entry in values["defaults"] if isinstance(entry, dict)]
    return {str(k): str(v) for entry in entries for k, v in entry.items() if v is not None}


def _prefix(group: str, name: str) -> str:
    return f"callbacks.{name}." if group == "callbacks" else f"{group}."


def _introduced(group: str, name: str, schema: Any, schemas: dict[str, type]) -> str:
    if len(schemas) == 1:
        return _first_line(schema)
    listed = ", ".join(f"`{group}={option}`" for option in _options_of(group, name))
    return f"{listed}: {_first_line(schema)}" if listed else _first_line(schema)


def _options_of(group: str, name: str) -> list[str]:
    """Return the options whose files use a schema."""
    entry = f"/schema/{group}/{name}@_here_"
    return [o for o in our_options()[group] if entry in _file(group, o).get("defaults", [])]


def _file(group: str, option: str) -> dict[str, Any]:
    text = (config_directory() / group / f"{option}.yaml").read_text("utf-8")
    return safe_load(text) or {}


def _settable(schema: Any) -> list[dataclasses.Field[Any]]:
    """Return the keys of a schema except those that Hydra reads."""
    return [field for field in dataclasses.fields(schema) if not field.name.startswith("_")]


def _table(schema: Any, fields: Any, prefix: str, group: str | None = None) -> Iterator[str]:
    yield "| key | type | default | range | contract | meaning |\n|---|---|---|---|---|---|"
    yield from _rows(schema, fields, prefix, group)


def _rows(schema: Any, fields: Any, prefix: str, group: str | None) -> Iterator[str]:
    hints = get_type_hints(schema)
    for field in fields:
        node = hints[field.name]
        if dataclasses.is_dataclass(node):
            doc = _cell(" ".join([_doc(schema, field.name), *_needs(schema, field.name)]))
            yield f"| `{prefix}{field.name}` | the keys below |  |  |  | {doc} |"
            yield from _rows(node, _settable(node), f"{prefix}{field.name}.", None)
            continue
        bounds = range_of(field)
        key = f"{prefix}{field.name}"
        setters = [] if group in {None, "callbacks"} else _setters(str(group), field.name)
        doc = _doc(schema, field.name)
        cells = [
            f"`{key}`",
            _type(hints[field.name]),
            "the option's" if setters and field.default == MISSING else _default(field, doc),
            f"`{bounds}`" if bounds else "",
            "yes" if _is_learned(schema, key) else "",
            " ".join(_said(schema, field.name, setters)),
        ]
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _is_learned(schema: Any, key: str) -> bool:
    """Return whether a key changes what is learned; only one built-in callback does."""
    if key.startswith("callbacks."):
        return schema is EarlyStoppingConfig
    return effect_of(key) is Effect.TRAINING


def _said(schema: Any, name: str, setters: list[str]) -> Iterator[str]:
    """Yield the description of a key: its meaning, what sets it, what it needs, and its aliases."""
    yield _doc(schema, name)
    if setters:
        yield f"Set by {', '.join(f'`{one}`' for one in setters)}."
    yield from _needs(schema, name)
    for alias, used_by in (declared(schema, name).aliases or {}).items():
        yield f"`{alias}` in {used_by}."


def _needs(schema: Any, name: str) -> Iterator[str]:
    """Yield the conditions under which a key, or every key of a section, has an effect."""
    for one in declared(schema, name).only_if:
        tasks = f" (task={', '.join(sorted(one.tasks))})" if one.tasks else ""
        yield f"Needs {one.needs}{tasks}."


def _setters(group: str, key: str) -> list[str]:
    """Return the options of a group whose files set a key."""
    return [option for option in our_options()[group] if key in _file(group, option)]


def _doc(schema: Any, name: str) -> str:
    """Return the doc of a key, from the class that first declares it if this one has none."""
    return declared(schema, name).doc


def _type(hint: Any) -> str:
    arguments = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is list:
        return f"list of {_type(arguments[0])}s"
    if get_origin(hint) is dict:
        return "mapping"
    if arguments:  # a union with None
        return f"{' or '.join(map(_type, arguments))}, or null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " \\| ".join(f"`{name}`" for name in hint.__members__)
    return _WORDS.get(hint, "text")


def _default(field: dataclasses.Field[Any], doc: str) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = field.default
    if isinstance(value, str) and value == MISSING:
        return "" if "set by the option" in doc else "required"
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if value is None:
        return "`null`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _first_line(schema: Any) -> str:
    return inspect.cleandoc(schema.__doc__ or "").splitlines()[0]


def _cell(text: str) -> str:
    one_line = re.sub(r"<(?=\w)", "&lt;", " ".join(text.split()))  # no tag of HTML
    return re.sub(r"(?<!\\)\|", r"\\|", one_line)


def _tasks() -> Iterator[str]:
    yield "\n## Tasks\n\n`task=<name>`; a key that the task does not read is an error.\n"
    yield "| task | what it does | reads |\n|---|---|---|"
    everything = TASK_READS["train"]
    for task in our_options()["task"]:
        reads = TASK_READS[task]
        left_out = sorted(everything - reads)
        listed = ", ".join(f"`{key}`" for key in sorted(reads))
        if reads <= everything and len(left_out) <= 1:
            listed = "all of train's" if left_out else "every group"
            listed += f" but `{left_out[0]}`" if left_out else ""
        yield f"| `{task}` | {_cell(_opening('task', task))} | {listed} |"


if __name__ == "__main__":
    sys.stdout.write(page())
