"""Judge one override of a value against composed configurations: its key, then its type."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import (
    BooleanNode,
    DictConfig,
    EnumNode,
    FloatNode,
    IntegerNode,
    ListConfig,
    OmegaConf,
    StringNode,
)
from omegaconf.errors import OmegaConfBaseException

from mens_exp.artifacts.nearest import expected_name, nearest
from mens_exp.config.compose import compose, group_options
from mens_exp.config.fields import shown
from mens_exp.config.peers import peer_of
from mens_exp.config.root import RunConfig
from mens_exp.config.store import SCHEMAS, SET_BY_OPTION, is_open
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.override_parser.types import Override

__all__ = ["NO_KEY", "exists", "override_of", "value_problems"]

NO_KEY = "is no key of the chosen"

_INSTEAD = {"model.default_lr": "set optim.lr, whose default it is"}
_NO_TEXTS = frozenset({"null", "true", "false", "nan", "inf"})  # what Hydra reads them as
_WORDS = {
    IntegerNode: "a whole number",
    FloatNode: "a number",
    BooleanNode: "true or false",
    StringNode: "text",
}
_ELEMENTS = {
    int: "whole numbers, such as [1,2]",
    float: "numbers, such as [0.9,0.99]",
    str: "texts, such as [a,b]",
}


def override_of(key: str, text: str) -> str:
    """Return an override that sets a key to a text, quoted where Hydra would read it otherwise."""
    plain = re.fullmatch(r"[A-Za-z./][A-Za-z0-9_./:-]*", text) and text.lower() not in _NO_TEXTS
    return f"{key}={text if plain else QuotedString(text=text, quote=Quote.single).with_quotes()}"


def value_problems(
    override: Override, references: Sequence[DictConfig], unsure: set[str]
) -> list[ConfigError]:
    """List what is wrong with one override of a value.

    Args:
        override: the override.
        references: a composed configuration for each combination of options of the command.
        unsure: groups whose option was refused; a key that some option of them has is let be.
    """
    problems: dict[str, ConfigError] = {}
    for reference in references:
        for problem in _problems(override, reference, unsure):
            problems.setdefault(str(problem), problem)
    return list(problems.values())


def _problems(override: Override, reference: DictConfig, unsure: set[str]) -> Iterator[ConfigError]:
    key, line = override.key_or_group, str(override.input_line)
    if not exists(reference, key):
        group, _, field = key.partition(".")
        if group not in unsure or not _options_with(group, field):
            yield _unknown_key(key, line, reference)
    elif override.is_delete():
        yield from _deletion_problems(key)
    elif override.is_add():
        yield ConfigError("is there already", where=key, found=line, remedy=f"write {key}=…")
    else:
        for value in _values(override):
            yield from _assignment_problems(key, value, reference)


def exists(config: DictConfig, key: str) -> bool:
    """Tell whether a key is there to be set, as a value or as a mapping of values."""
    node: Any = config
    for part in key.split("."):
        if not _is_closed(node) or part not in node.keys():  # noqa: SIM118  # as in _leaves
            return False
        node = node._get_node(part)  # noqa: SLF001  # a missing value must not raise here
    return bool(_leaves(node)) if _is_closed(node) else True


def _is_closed(node: Any) -> bool:
    """Tell whether a node is a mapping whose keys are given."""
    return isinstance(node, DictConfig) and not is_open(node)


def _leaves(config: Any, prefix: str = "") -> list[str]:
    leaves: list[str] = []
    for name in config.keys():  # noqa: SIM118  # iterating a DictConfig skips missing values
        node = config._get_node(name)  # noqa: SLF001  # a missing value must not raise here
        path = f"{prefix}{name}"
        leaves += _leaves(node, f"{path}.") if _is_closed(node) else [path]
    return leaves


def _deletion_problems(key: str) -> Iterator[ConfigError]:
    parts = key.split(".")
    if parts[0] != "callbacks" or len(parts) != 2:  # noqa: PLR2004  # callbacks.<name>
        yield ConfigError("cannot be removed", where=key, found=f"~{key}", expected="a value")


def _values(override: Override) -> list[Any]:
    """Return each value that the override gives its key."""
    if not override.is_sweep_override():
        return [override.value()]
    if not override.is_discrete_sweep():
        return []
    parser = OverridesParser.create()
    texts = override.sweep_string_iterator()
    return [parser.parse_override(f"value={text}").value() for text in texts]


def _assignment_problems(key: str, value: Any, reference: DictConfig) -> Iterator[ConfigError]:
    if not exists(reference, key):
        yield _unknown_key(key, f"{key}={shown(value)}", reference)
        return
    if key in SET_BY_OPTION or key.endswith("._target_"):
        group = key.partition(".")[0]
        yield ConfigError(
            "is set by the option",
            where=key,
            found=shown(value),
            expected=f"{group}=<{'|'.join(group_options()[group])}>",
            remedy=_INSTEAD.get(key),
        )
        return
    node = _node_at(reference, key)
    if isinstance(value, dict) and _is_closed(node):
        for name, entry in value.items():
            yield from _assignment_problems(f"{key}.{name}", entry, reference)
    elif value == {} and is_open(node) and len(node):
        yield ConfigError(
            "an empty mapping changes nothing",
            where=key,
            found=f"{key}={{}}",
            expected=f"values for some of {', '.join(map(str, node.keys()))}",
            remedy=f"write {key}={{{next(iter(node.keys()))}:…}}; entries are merged, not replaced",
        )
    elif not _fits(key, value, node, reference):
        yield ConfigError(
            "wrong type", where=key, found=shown(value), expected=_accepted(node, value)
        )


def _fits(key: str, value: Any, node: Any, reference: DictConfig) -> bool:
    if isinstance(value, str) and "${" in value:
        return True  # an interpolation; composing resolves and judges it
    if isinstance(node, DictConfig) and not (is_open(node) and isinstance(value, dict)):
        return False
    group, _, rest = key.partition(".")
    try:
        if rest:  # a copy of the group is enough, and the whole is large
            OmegaConf.update(copy.deepcopy(_node_at(reference, group)), rest, value, merge=True)
        else:
            OmegaConf.update(reference.copy(), key, value, merge=True)
    except OmegaConfBaseException:
        return False
    return True


def _node_at(config: DictConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node._get_node(part)  # noqa: SLF001  # select() would resolve a missing value
    return node


def _accepted(node: Any, value: Any) -> str:
    """Say in words what a node of the configuration accepts."""
    if isinstance(node, EnumNode):
        names = list(node.enum_type.__members__)
        close = nearest(shown(value), names)
        return f"one of {', '.join(names)}{f'; the nearest is {close}' if close else ''}"
    if is_open(node):
        element = node._metadata.element_type  # noqa: SLF001  # the schema's annotation
        return f"a mapping of names to {_ELEMENTS[element].partition(',')[0]}"
    if isinstance(node, DictConfig):
        return f"a mapping with {', '.join(map(str, node.keys()))}"
    if isinstance(node, ListConfig):
        element = node._metadata.element_type  # noqa: SLF001  # the schema's annotation
        return f"a list of {_ELEMENTS.get(element, 'values')}"
    word = _WORDS.get(type(node), "another value")
    return f"{word}, or null" if node._is_optional() else word  # noqa: SLF001


def _unknown_key(key: str, found: str, reference: DictConfig) -> ConfigError:
    group, _, field = key.partition(".")
    owners = _options_with(group, field)
    if owners:
        return ConfigError(
            f"{NO_KEY} {group}",
            where=key,
            found=found,
            expected=f"{group}={' or '.join(owners)}, which has it",
            remedy=f"add {group}={owners[0]}, or drop {key}",
        )
    peer = _peer(key, found)
    return peer or ConfigError(
        "unknown key", where=key, found=found, expected=_expected_key(key, reference)
    )


def _peer(key: str, found: str) -> ConfigError | None:
    """Say what a setting of another fine-tuner is called here, where the key is one."""
    peer = peer_of(key)
    if peer is None:
        return None
    what = f"is what {peer.used_by} call{'' if ' and ' in peer.used_by else 's'} it"
    if peer.ours is None:
        return ConfigError(f"{what}; it is not offered here", where=key, found=found)
    value = found.partition("=")[2] or "…"
    is_group = peer.ours in group_options()
    remedy = f"write {peer.how or f'{peer.ours}={value}'}"
    kind = "the group " if is_group else ""
    return ConfigError(
        what,
        where=key,
        found=found,
        expected=f"{kind}{peer.ours}, as it is called here",
        remedy=remedy,
    )


def _expected_key(key: str, reference: DictConfig) -> str:
    """Name the keys that could have been meant: those beside it, else of the same last name."""
    leaves = _leaves(reference)
    beside: list[str] = []
    parent = key
    while "." in parent and not beside:
        parent = parent.rpartition(".")[0]
        beside = [leaf for leaf in leaves if leaf.startswith(f"{parent}.")]
    if beside:
        close = nearest(key, beside)
        return f"one of {', '.join(beside)}{f'; the nearest is {close}' if close else ''}"
    namesakes = [leaf for leaf in leaves if leaf.rpartition(".")[2] == key]
    if namesakes:
        return f"the whole path, {' or '.join(namesakes)}"
    return expected_name(key, leaves if "." in key else [*RunConfig.__dataclass_fields__, *leaves])


def _options_with(group: str, field: str) -> list[str]:
    """Return the group's options whose schema has the field, where the group has several."""
    schemas = SCHEMAS.get(group, {})
    if len(schemas) < 2 or group == "callbacks":  # noqa: PLR2004
        return []
    if not any(field in schema.__dataclass_fields__ for schema in schemas.values()):  # type: ignore[attr-defined]
        return []
    cells = compose([[f"{group}={option}"] for option in group_options()[group]])
    owners = [c for c in cells if field in c.values[group].keys()]  # noqa: SIM118
    # First the options that leave the key to the user, then those that are a choice of it.
    owners.sort(key=lambda cell: not OmegaConf.is_missing(cell.values[group], field))
    return [owner.choices[group] or "" for owner in owners]
