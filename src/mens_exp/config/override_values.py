"""Check a single override: its key, type, place in a sweep, and the names used by other tools.

Aliases are the names that other fine-tuners document for settings that exist here, so that an
error message can suggest ours. A name used by several tools covers all of them.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

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
)
from omegaconf.errors import OmegaConfBaseException

from mens_exp.config.compose import compose
from mens_exp.config.fields import shown
from mens_exp.config.loader import SCHEMAS, SET_BY_OPTION, declarations, is_open
from mens_exp.config.root import MOVED, RunConfig, moved_to
from mens_exp.config.sweep import EARLIER, LAUNCHERS, LOCAL_LAUNCHER, OPTUNA, LocalLauncher
from mens_exp.config.trainer import REFUSED
from mens_exp.config.user_config import group_options
from mens_exp.errors import ConfigError, MensError, NoEffectError, expected_name, nearest

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
    """Return whether a key can be set, as a value or as a mapping of values."""
    node: Any = config
    for part in key.split("."):
        if not _is_closed(node) or part not in node.keys():  # noqa: SIM118  # as in _leaves
            return False
        node = node._get_node(part)  # noqa: SLF001  # a missing value must not raise here
    return bool(_leaves(node)) if _is_closed(node) else True


def _is_closed(node: Any) -> bool:
    """Return whether a node is a mapping with a fixed set of keys."""
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
        yield _unknown_key(key, f"{key}={shown(value)}", reference)
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
    """Describe in words the values that a configuration node accepts."""
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
    if group == "trainer" and field in REFUSED:
        return REFUSED[field].error(key, found)
    if (inside := _of_one_logger(group, field, reference)) is not None:
        return ConfigError(
            "several loggers are chosen, and this is a key of one",
            where=key,
            found=found,
            remedy=f"write {inside}={found.partition('=')[2]}",
        )
    owners = _options_with(group, field)
    if owners:
        return ConfigError(
            f"{NO_KEY} {group}",
            where=key,
            found=found,
            expected=f"{group}={' or '.join(owners)}, which has it",
            remedy=f"add {group}={owners[0]}, or drop {key}",
        )
    peer = _alias(key, found)
    return peer or ConfigError(
        "unknown key", where=key, found=found, expected=_expected_key(key, reference)
    )


def _of_one_logger(group: str, field: str, reference: DictConfig) -> str | None:
    """Return the key of the logger that has the field, if there are several loggers."""
    if group != "logger" or "sink" in (chosen := _node_at(reference, group)):
        return None
    return next((f"logger.{name}.{field}" for name in chosen if field in chosen[name]), None)


def _alias(key: str, found: str) -> ConfigError | None:
    """Return an error that names our equivalent if the key is another fine-tuner's setting."""
    peer = alias_of(key)
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
    """Suggest the keys that could have been meant: siblings, else keys with the same last name."""
    leaves = _leaves(reference)
    beside: list[str] = []
    parent = key
    while "." in parent and not beside:
        parent = parent.rpartition(".")[0]
        beside = [leaf for leaf in leaves if leaf.startswith(f"{parent}.")]
    if beside:
        # The shared beginning says nothing: `precision` is not like `devices`.
        ends = {leaf[len(parent) + 1 :]: leaf for leaf in beside}
        close = ends.get(nearest(key[len(parent) + 1 :], ends) or "")
        return f"one of {', '.join(beside)}{f'; the nearest is {close}' if close else ''}"
    namesakes = [leaf for leaf in leaves if leaf.rpartition(".")[2] == key]
    if namesakes:
        return f"the whole path, {' or '.join(namesakes)}"
    return expected_name(key, leaves if "." in key else [*RunConfig.__dataclass_fields__, *leaves])


def _options_with(group: str, field: str) -> list[str]:
    """Return the options whose schema has the field, for a group with several schemas."""
    schemas = SCHEMAS.get(group, {})
    if len(schemas) < 2 or group == "callbacks":  # noqa: PLR2004
        return []
    if not any(field in schema.__dataclass_fields__ for schema in schemas.values()):  # type: ignore[attr-defined]
        return []
    cells = compose([[f"{group}={option}"] for option in group_options()[group]])
    owners = [c for c in cells if field in c.values[group].keys()]  # noqa: SIM118
    # First the options that leave the key to the user, then those that set it themselves.
    owners.sort(key=lambda cell: not OmegaConf.is_missing(cell.values[group], field))
    return [owner.choices[group] or "" for owner in owners]


IN_PROCESS = "basic"
_JOBLIB = "joblib"  # a launcher of earlier releases
_PLUGINS = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")
_PREFIXES = ("sweep.", "hydra.launcher.", "hydra.sweeper.")
_OF_LOCAL = {field.name for field in fields(LocalLauncher)}


def launcher_of(texts: Sequence[str], *, multirun: bool) -> str | None:
    """Return the launcher that the overrides select; None for a single run."""
    if not multirun:
        return None
    chosen = [text.partition("=")[2] for text in texts if text.startswith("hydra/launcher=")]
    return EARLIER.get(chosen[-1], chosen[-1]) if chosen else LOCAL_LAUNCHER


def without_joblib(texts: Sequence[str], *, multirun: bool) -> tuple[list[str], list[MensError]]:
    """Refuse the launcher `joblib`, and rewrite the command for `local`, its equivalent.

    Returns:
        The overrides for `local`, so that the rest of the command is checked too, and the refusal.
    """
    if launcher_of(texts, multirun=multirun) != _JOBLIB:
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
        "there is no launcher joblib any more; local runs the same jobs without it",
        where="hydra/launcher",
        found=_JOBLIB,
        remedy=f"write {' '.join(ours)}" + (f", and drop {', '.join(gone)}" if gone else ""),
    )
    return [*rest, *ours], [refusal]


def with_moved_keys(texts: Sequence[str], *, multirun: bool) -> tuple[list[str], list[MensError]]:
    """Refuse root keys of earlier releases, and write the command as it is spelled today.

    Returns:
        The overrides of that command, so that the rest of it is judged too, and the refusal.
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
    command = shlex.join(["python", "-m", "mens_exp", *(["-m"] if multirun else []), *written])
    return written, [ConfigError(what, remedy=f"write {command}")]


def sweep_override_problems(override: Override, *, launcher: str | None) -> Iterator[ConfigError]:
    """Yield the problems of an override that applies to a whole sweep.

    Args:
        override: any override of the command.
        launcher: launcher of the sweep; None if there is none.
    """
    key, line = override.key_or_group, str(override.input_line)
    if key == "hydra.mode":
        yield ConfigError("is told by -m", where=key, found=line, remedy=f"drop {key}")
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
            "holds for the whole sweep, and takes one value",
            where=key,
            found=line,
            remedy="start one sweep for each value",
        )
    elif key == "hydra/launcher" and launcher not in {*LAUNCHERS, IN_PROCESS}:
        yield ConfigError(
            "is no launcher that starts jobs here",
            where=key,
            found=launcher,
            expected=f"{', '.join(LAUNCHERS)}, a process for each job; or {IN_PROCESS}, which runs "
            "them one after the other in the launcher's own process",
        )
    elif launcher == IN_PROCESS and line == f"hydra/sweeper={OPTUNA}":
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


@dataclass(frozen=True, slots=True)
class Alias:
    """A name used by another tool.

    Attributes:
        ours: the equivalent key or group here; None if there is none.
        used_by: the tools that use the name.
        how: what to write instead, where a key alone would not suffice.
    """

    ours: str | None
    used_by: str
    how: str | None = None


_HF = "Transformers and TRL"
_AX = "Axolotl"
_LF = "LLaMA-Factory"
_PEFT = "PEFT"
_BNB = "bitsandbytes"
_UN = "Unsloth"

# Names that match no single setting here exactly; the rest are in the declarations.
_OTHERS: dict[str, Alias] = {
    "adam_beta1": Alias("optim.betas", _HF, "optim.betas=[<beta1>,<beta2>]"),
    "adam_beta2": Alias("optim.betas", f"{_HF} and {_AX}", "optim.betas=[<beta1>,<beta2>]"),
    "optimizer": Alias("optim", f"{_AX}, torchtune and LitGPT", "optim=adamw"),
    "global_batch_size": Alias(
        "trainer.accumulate_grad_batches",
        "LitGPT",
        "data.micro_batch_size=… and trainer.accumulate_grad_batches=…, whose product it is",
    ),
    "lora_target_linear": Alias("lora", _AX, "lora=all_linear"),
    "finetuning_type": Alias("backend", _LF, "backend=qlora"),
    "load_in_4bit": Alias("backend", f"Transformers, {_AX} and {_UN}", "backend=qlora"),
    "load_in_8bit": Alias("quant", f"Transformers, {_AX} and {_UN}", "quant=int8"),
    "quantization_bit": Alias("backend", _LF, "backend=qlora"),
    "lr_scheduler_type": Alias("schedule", f"{_HF} and {_LF}", "schedule=cosine"),
    "lr_scheduler": Alias("schedule", _AX, "schedule=cosine"),
    "base_model": Alias("model.id", _AX, "model=hf model.id=<hub id or directory>"),
    "model_name_or_path": Alias(
        "model.id", f"{_HF} and {_LF}", "model=hf model.id=<hub id or directory>"
    ),
    "model_name": Alias("model.id", _UN, "model=hf model.id=<hub id or directory>"),
    "checkpoint_dir": Alias(
        "model.id", "torchtune and LitGPT", "model=hf model.id=<hub id or directory>"
    ),
    "dataset_path": Alias("data.path", "TRL", "data=jsonl data.path=<file>"),
    "dataset_name": Alias(
        "data.id", "TRL", "data=hub data.id=<id>, or data=jsonl data.path=<file>"
    ),
    "dataset": Alias("data.path", _LF, "data=jsonl data.path=<file>"),
    "datasets": Alias("data.path", _AX, "data=jsonl data.path=<file>"),
    "train_on_inputs": Alias("objective", _AX, "objective=causal (true), objective=assistant"),
    "train_on_prompt": Alias("objective", _LF, "objective=causal (true), objective=assistant"),
    "assistant_only_loss": Alias("objective", "TRL", "objective=assistant (true)"),
    "mask_prompt": Alias("objective", "LitGPT", "objective=assistant (true)"),
    "output_dir": Alias("hydra.run.dir", f"{_HF}, {_AX} and {_LF}"),
    "out_dir": Alias("hydra.run.dir", "LitGPT"),
    "report_to": Alias("logger", _HF, "logger=wandb, logger=tensorboard or logger=csv"),
    "use_wandb": Alias("logger", _AX, "logger=wandb"),
    "load_best_model_at_end": Alias("adapter.select", _HF, "adapter.select=best"),
    "resume_from_checkpoint": Alias("resume", f"{_HF}, {_AX} and torchtune", "resume=<run>|latest"),
    "neftune_noise_alpha": Alias(None, f"TRL, {_AX} and {_LF}"),
    "use_flash_attention_2": Alias(None, "Transformers"),
    "flash_attention": Alias(None, _AX),
    "deepspeed": Alias(None, f"{_HF} and {_AX}"),
}


def _of_settings() -> Iterator[tuple[str, Alias]]:
    """Yield the aliases that are stated in the declarations of settings."""
    for path, several in declarations().items():
        for about in several:
            for name, used_by in (about.aliases or {}).items():
                yield name, Alias(path, used_by)


ALIASES: dict[str, Alias] = {**dict(_of_settings()), **_OTHERS}


def alias_of(key: str) -> Alias | None:
    """Return the alias for an unknown key, looked up by its last part."""
    return ALIASES.get(key.rpartition(".")[2])
