"""Check a single override: its key, its type, and its place in a sweep."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import EnumMeta
from pathlib import Path
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import (
    BooleanNode,
    DictConfig,
    EnumNode,
    FloatNode,
    IntegerNode,
    ListConfig,
    OmegaConf,
    StringNode,
    ValueNode,
)
from omegaconf.errors import OmegaConfBaseException

from mens_exp.artifacts.record import parse_json, read_bytes
from mens_exp.config.fields import shown
from mens_exp.config.loader import is_open
from mens_exp.config.option_files import group_options, hydra_options
from mens_exp.config.root import MOVED, moved_to
from mens_exp.config.schemas import SET_BY_OPTION
from mens_exp.config.suggestions import options_with, unknown_key
from mens_exp.config.sweep import (
    EARLIER,
    IN_ORDER,
    LAUNCHERS,
    LOCAL_LAUNCHER,
    OPTUNA,
    SLURM,
    LocalLauncher,
)
from mens_exp.config.trainer import BY_CLASS
from mens_exp.errors import ConfigError, DataError, MensError, NoEffectError, listed, nearest

MAY_BE_UNSET = frozenset({"preset", "experiment", "policy", "study"})
_INSTEAD = {"model.default_lr": "set optim.lr, whose default it is"}
# Settings for which Lightning's Trainer accepts more types.
_ONE_FORM = {
    "lora.config": "name an adapter_config.json that can be read, or write {peft_type:…}",
    "trainer.devices": "write the number of processes; CUDA_VISIBLE_DEVICES chooses the GPUs",
    "trainer.max_time": "write trainer.max_time=DD:HH:MM:SS",
    "trainer.val_check_interval": "write the number of micro-batches between two validations",
}
_NO_TEXTS = frozenset({"null", "true", "false", "nan", "inf"})  # not strings for Hydra
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


def spelled_out(texts: Sequence[str], *, multirun: bool = False) -> list[str]:
    """Expand short forms of overrides.

    ``adapter=<file>`` becomes ``adapter.file=<file>``; ``path=[a,b]`` becomes the string ``a,b``,
    as does ``path=a,b`` in a task that reads several paths (unless ``multirun``, where each is a
    cell); ``experiment=null`` becomes ``~experiment``. Prompts are quoted for Hydra.
    ``trainer.strategy._target_=`` and its arguments become one mapping.
    ``lora.config=<adapter_config.json>`` becomes the fields of the file, except that PEFT's
    ``target_modules`` becomes ``lora.targets``.
    """
    if not multirun and _OF_SEVERAL & set(texts):
        texts = [f"path=[{text[5:]}]" if _PATHS.fullmatch(text) else text for text in texts]
    texts = [one for text in texts for one in _peft_config(text)]
    return _by_class([_question(_unset(_listed(_of_adapter(text)))) for text in texts])


_OF_SEVERAL = {f"task={name}" for name in ("compare", "sync", "promote")}
_PATHS = re.compile(r"path=[^'\"\[]*,[^'\"]*")


_INSIDE = re.compile(rf"\+{{0,2}}(trainer\.(?:{'|'.join(BY_CLASS)}))\.(\w+)=([^,]*)")


_CONFIG = "lora.config"
_OF_A_FILE = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version"}
_OF_A_FILE |= {"revision", "task_type", "target_modules"}


def _peft_config(text: str) -> Iterator[str]:
    """Expand a PEFT configuration file to the fields that a run does not set itself."""
    key, _, value = text.partition("=")
    if key == f"{_CONFIG}.target_modules":
        yield f"lora.targets={value}"
        return
    fields = _fields_of(value) if key == _CONFIG and value[:1] not in {"", "{"} else None
    if fields is None:
        yield text  # an unreadable file is reported as a value of the wrong type
        return
    if isinstance(fields.get("target_modules"), list):
        yield f"lora.targets={_written(fields['target_modules'])}"
    kept = {name: value for name, value in fields.items() if name not in _OF_A_FILE}
    yield f"{_CONFIG}={_written(kept)}"


def _fields_of(file: str) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if it is not one."""
    path = Path(file.strip("'\"")).expanduser()
    try:
        fields = parse_json(read_bytes(path), str(path))
    except DataError:
        return None
    return fields if isinstance(fields, dict) else None


def _written(value: Any) -> str:
    """Format a JSON value in Hydra's override syntax."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_written(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, str):
        return QuotedString(text=value, quote=Quote.single).with_quotes()
    return json.dumps(value)


def _by_class(texts: list[str]) -> list[str]:
    """Join the keys of a Trainer setting that names a class to one mapping."""
    inside = [match for text in texts if (match := _INSIDE.fullmatch(text))]
    classes = {match[1] for match in inside if match[2] == "_target_"}
    joined = {
        key: f"{key}={{{','.join(f'{one[2]}:{one[3]}' for one in inside if one[1] == key)}}}"
        for key in sorted(classes)
    }
    parts = {match[0] for match in inside if match[1] in classes}
    return [*(text for text in texts if text not in parts), *joined.values()]


def _unset(text: str) -> str:
    group, _, value = text.partition("=")
    return f"~{group}" if group in MAY_BE_UNSET and value == "null" else text


def _of_adapter(text: str) -> str:
    short = "adapter="
    is_file = text.startswith(short) and not text.startswith(f"{short}{{")  # a mapping
    return f"adapter.file={text.removeprefix(short)}" if is_file else text


def _listed(text: str) -> str:
    return f"path='{text[6:-1]}'" if text.startswith("path=[") and text.endswith("]") else text


def _question(text: str) -> str:
    key, _, question = text.partition("=")
    is_quoted = len(question) > 1 and question[0] == question[-1] and question[0] in "'\""
    if key not in {"chat.prompt", "prompt"} or question in {"", "null"} or is_quoted:
        return text
    return override_of(key, question)


def override_of(key: str, text: str) -> str:
    """Return an override that sets a key to a string, quoted where Hydra would misread it."""
    plain = re.fullmatch(r"[A-Za-z./][A-Za-z0-9_./:-]*", text) and text.lower() not in _NO_TEXTS
    return f"{key}={text if plain else QuotedString(text=text, quote=Quote.single).with_quotes()}"


def value_problems(
    override: Override, references: Sequence[DictConfig], unsure: set[str]
) -> list[ConfigError]:
    """List the problems of one override that sets a value.

    Args:
        override: the override to check.
        references: one composed configuration per combination of the command's options.
        unsure: groups whose option was refused; a key that any of their options has is accepted.
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
        if group in MAY_BE_UNSET and not field:
            expected = f"{group}=<name of an option>"
            yield ConfigError("no option is chosen", where=group, found=line, expected=expected)
        elif group not in unsure or not options_with(group, field):
            yield unknown_key(key, line, _leaves(reference))
    elif override.is_delete():
        yield from _deletion_problems(key)
    elif override.is_add():
        yield ConfigError("already exists", where=key, found=line, remedy=f"write {key}=…")
    else:
        for value in values_of(override):
            yield from _assignment_problems(key, value, reference)


def exists(config: DictConfig, key: str) -> bool:
    """Return whether a key can be set, as a value or as a mapping of values."""
    node: Any = config
    for part in key.split("."):
        if _takes_any(node):
            return True
        if not _is_closed(node) or part not in node.keys():  # noqa: SIM118  # as in _leaves
            return False
        node = node._get_node(part)  # noqa: SLF001  # a missing value must not raise here
    return bool(_leaves(node)) if _is_closed(node) else True


def _is_closed(node: Any) -> bool:
    """Return whether a node is a mapping with a fixed set of keys."""
    return isinstance(node, DictConfig) and not is_open(node)


def _takes_any(node: Any) -> bool:
    """Return whether a node holds another library's settings, such as lora.config."""
    return is_open(node) and node._metadata.element_type is Any  # noqa: SLF001  # of the schema


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
        yield ConfigError(
            "cannot be removed",
            where=key,
            found=f"~{key}",
            expected="a value",
            remedy=f"drop ~{key}, which leaves the default",
        )


def values_of(override: Override) -> list[Any]:
    """Return every value that the override assigns to its key."""
    if not override.is_sweep_override():
        return [override.value()]
    if not override.is_discrete_sweep():
        return []
    parser = OverridesParser.create()
    texts = override.sweep_string_iterator()
    return [parser.parse_override(f"value={text}").value() for text in texts]


def _assignment_problems(key: str, value: Any, reference: DictConfig) -> Iterator[ConfigError]:
    if not exists(reference, key):
        yield unknown_key(key, f"{key}={shown(value)}", _leaves(reference))
        return
    is_sink = key.startswith("logger.") and key.endswith(".sink")  # of one of several
    if key in SET_BY_OPTION or key.endswith("._target_") or is_sink:
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
        yield from _misfits(key, value, node)


def _misfits(key: str, value: Any, node: Any) -> Iterator[ConfigError]:
    """Yield the problems of a value that its setting does not accept."""
    element = node._metadata.element_type if is_open(node) else None  # noqa: SLF001  # of the schema
    if isinstance(node, EnumNode):
        yield _no_such_value(key, value, node.enum_type.__members__)
    elif isinstance(value, dict) and isinstance(element, EnumMeta):
        for name, entry in value.items():
            if str(entry) not in list(element.__members__):
                yield _no_such_value(f"{key}.{name}", entry, element.__members__)
    else:
        yield ConfigError(
            "wrong type",
            where=key,
            found=shown(value),
            expected=_accepted(node),
            remedy=_ONE_FORM.get(key),
        )


def _no_such_value(key: str, value: Any, choices: Mapping[str, Any]) -> ConfigError:
    near = nearest(shown(value), choices)
    return ConfigError(
        "unknown value",
        where=key,
        found=shown(value),
        expected=listed([*choices]),
        remedy=f"write {key}={near}" if near else None,
    )


def _fits(key: str, value: Any, node: Any, reference: DictConfig) -> bool:
    if isinstance(value, str) and "${" in value:
        if isinstance(node, ValueNode) or node is None:
            return True  # an interpolation, checked when composed
        value = _resolved(key, value, reference)  # not inside mappings and lists
    if isinstance(node, DictConfig) and not (is_open(node) and isinstance(value, dict)):
        return False
    if node is None:
        return True  # a field of another library, which checks it
    if _nests(value, node):
        return False
    group, _, rest = key.partition(".")
    try:
        if isinstance(node, ValueNode) and not isinstance(value, dict | list):
            copy.deepcopy(node)._set_value(value)  # noqa: SLF001  # checks the type
        elif rest:  # copy only the group: the whole configuration is large
            OmegaConf.update(copy.deepcopy(_node_at(reference, group)), rest, value, merge=True)
        else:
            OmegaConf.update(reference.copy(), key, value, merge=True)
    except (OmegaConfBaseException, OverflowError):  # an int beyond f64
        return False
    return True


def _resolved(key: str, text: str, reference: DictConfig) -> Any:
    """Return the value of an interpolation at its key; the text if it has none."""
    config = reference.copy()
    try:
        OmegaConf.update(config, key, text, merge=True, force_add=True)
        value = OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return text
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


_PLAIN = (str, int, float, bool)


def _nests(value: Any, node: Any) -> bool:
    """Return whether a list or mapping of plain values contains a list or a mapping.

    OmegaConf accepts nested values regardless of the element type.
    """
    if not (isinstance(node, ListConfig) or is_open(node)):
        return False
    element = node._metadata.element_type  # noqa: SLF001  # the schema's annotation
    if element not in _PLAIN and not isinstance(element, EnumMeta):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return isinstance(entries, Iterable) and any(isinstance(one, dict | list) for one in entries)


def _node_at(config: DictConfig, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node._get_node(part)  # noqa: SLF001  # select() would resolve a missing value
    return node


def _accepted(node: Any) -> str:
    """Describe in words the values that a configuration node accepts."""
    if is_open(node):
        element = node._metadata.element_type  # noqa: SLF001  # the schema's annotation
        usual = "lists" if get_origin(element) is list else "values"
        return f"a mapping of names to {_ELEMENTS.get(element, usual).partition(',')[0]}"
    if isinstance(node, DictConfig):
        return f"a mapping with {', '.join(map(str, node.keys()))}"
    if isinstance(node, ListConfig):
        element = node._metadata.element_type  # noqa: SLF001  # the schema's annotation
        return f"a list of {_ELEMENTS.get(element, 'values')}"
    word = _WORDS.get(type(node), "another value")
    return f"{word}, or null" if node._is_optional() else word  # noqa: SLF001


IN_PROCESS = "basic"
_JOBLIB = "joblib"  # a launcher of earlier releases
_PACKAGES = {  # Hydra's own plugins
    "ray": "hydra-ray-launcher",
    "ray_aws": "hydra-ray-launcher",
    "rq": "hydra-rq-launcher",
    "submitit_local": "hydra-submitit-launcher",
}
_PLUGINS = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")
_PREFIXES = ("sweep.", "hydra.launcher.", "hydra.sweeper.")
_OF_LOCAL = {field.name for field in fields(LocalLauncher)}


def launcher_of(texts: Sequence[str], *, multirun: bool) -> str | None:
    """Return the launcher that the overrides select; None for a single run."""
    if not multirun:
        return None
    chosen = [text.partition("=")[2] for text in texts if text.startswith("hydra/launcher=")]
    return EARLIER.get(chosen[-1], chosen[-1]) if chosen else LOCAL_LAUNCHER


def with_nodes(texts: Sequence[str], *, multirun: bool) -> list[str]:
    """Add `trainer.num_nodes` to a new sweep whose Slurm jobs have `hydra.launcher.nodes`."""
    given = dict(text.lstrip("+").partition("=")[::2] for text in texts)
    many = given.get("hydra.launcher.nodes")
    is_new = "sweep.resume" not in given and "trainer.num_nodes" not in given
    if many is None or not is_new or launcher_of(texts, multirun=multirun) != SLURM:
        return list(texts)
    return [*texts, f"trainer.num_nodes={many}"]


def without_joblib(texts: Sequence[str], *, multirun: bool) -> tuple[list[str], list[MensError]]:
    """Refuse the launcher `joblib`, and rewrite the command for `local`, its equivalent.

    With hydra-joblib-launcher installed, the command stays as it is.

    Returns:
        The overrides for `local`, so that the rest of the command is checked too, and the refusal.
    """
    if launcher_of(texts, multirun=multirun) != _JOBLIB or _JOBLIB in hydra_options("launcher"):
        return list(texts), []
    keys = {text: text.lstrip("+").partition("=")[0] for text in texts}
    settings = [text for text in texts if keys[text].startswith("hydra.launcher.")]
    kept = [text for text in settings if keys[text].rpartition(".")[2] in _OF_LOCAL]
    if not any(keys[text] == "hydra.launcher.n_jobs" for text in kept):
        kept.insert(0, "hydra.launcher.n_jobs=-1")  # joblib's default
    gone = [text for text in settings if text not in kept]
    ours = [f"hydra/launcher={LOCAL_LAUNCHER}", *kept]
    rest = [text for text in texts if keys[text] != "hydra/launcher" and text not in settings]
    refusal = ConfigError(
        "the launcher joblib was removed; local runs the same jobs without it",
        where="hydra/launcher",
        found=_JOBLIB,
        remedy=f"write {' '.join(ours)}" + (f", and drop {', '.join(gone)}" if gone else ""),
    )
    return [*rest, *ours], [refusal]


def with_moved_keys(texts: Sequence[str], *, multirun: bool) -> tuple[list[str], list[MensError]]:
    """Refuse root keys of earlier releases, and rewrite the command with the current keys.

    Returns:
        The rewritten overrides, so that the rest of the command is checked too, and the refusal.
    """
    tasks = [text.partition("=")[2] for text in texts if text.startswith("task=")]
    task = tasks[-1] if tasks else None
    moved: dict[str, str] = {}
    written = []
    for text in texts:
        key, equals, value = text.partition("=")
        old = key.lstrip("+~")
        if old in MOVED:
            moved[old] = moved_to(old, task)
            text = f"{'~' if key.startswith('~') else ''}{moved[old]}{equals}{value}"  # noqa: PLW2901
        written.append(text)
    if not moved:
        return written, []
    what = ", ".join(f"{old} is now {new}" for old, new in moved.items())
    deletions = tuple(f"~{new}" for new in moved.values())
    kept = [text for text in written if text.partition("=")[0] not in deletions]
    command = shlex.join(["python", "-m", "mens_exp", *(["-m"] if multirun else []), *kept])
    return written, [ConfigError(what, remedy=f"write {command}")]


def sweep_override_problems(
    override: Override, *, launcher: str | None, sweeper: str = IN_ORDER
) -> Iterator[ConfigError]:
    """Yield the problems of an override that applies to a whole sweep.

    Args:
        override: any override of the command.
        launcher: launcher of the sweep; None if there is none.
        sweeper: its sweeper.
    """
    key, line = override.key_or_group, str(override.input_line)
    if key == "hydra.mode":
        yield ConfigError("is determined by -m", where=key, found=line, remedy=f"drop {key}")
        return
    if not key.startswith(_PREFIXES) and key not in {"sweep", *_PLUGINS}:
        return
    if launcher is None:
        yield NoEffectError(
            "on a single run",
            where=key,
            found=line,
            expected="-m, which makes a sweep",
            remedy=f"add -m, or drop {key}",
        )
    elif override.is_sweep_override():
        yield ConfigError(
            "applies to the whole sweep and takes one value",
            where=key,
            found=line,
            remedy="start one sweep for each value",
        )
    elif key in {"hydra/launcher", "hydra/sweeper"} and (there := _unknown_plugin(key, override)):
        yield there
    elif key == "sweep.objectives" and sweeper in {IN_ORDER, OPTUNA}:
        yield NoEffectError(
            f"with hydra/sweeper={sweeper}",
            where=key,
            found=line,
            remedy="give hydra.sweeper.objectives" if sweeper == OPTUNA else f"drop {key}",
        )
    elif launcher == IN_PROCESS and key == "hydra/sweeper" and sweeper != IN_ORDER:
        yield NoEffectError(
            f"with hydra/launcher={IN_PROCESS}, which takes the cells as they stand",
            where=key,
            found=line,
            remedy=f"drop hydra/launcher={IN_PROCESS}: {', '.join(LAUNCHERS)} take trials as they "
            "come",
        )
    elif launcher == IN_PROCESS and key.startswith("sweep"):
        yield NoEffectError(
            f"with hydra/launcher={IN_PROCESS}, which keeps no record of a sweep",
            where=key,
            found=line,
            remedy=f"drop {key}, or hydra/launcher={IN_PROCESS}",
        )


def _unknown_plugin(group: str, override: Override) -> ConfigError | None:
    """Refuse a launcher or sweeper that is neither built in nor installed."""
    kind, chosen = group.partition("/")[2], str(override.value())
    ours = [*LAUNCHERS, IN_PROCESS] if kind == "launcher" else [IN_ORDER, OPTUNA]
    there = hydra_options(kind)
    if chosen in ours or chosen in there:
        return None
    others = sorted(there - {*ours, *EARLIER})
    package = _PACKAGES.get(chosen)
    return ConfigError(
        f"unknown {kind}",
        where=group,
        found=chosen,
        expected=", ".join([*ours, *others]),
        remedy=f"pip install {package}"
        if package
        else f"install the Hydra plugin that has {chosen}",
    )
