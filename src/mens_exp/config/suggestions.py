"""Suggest corrections for mistyped commands: our key for another tool's name, or the nearest key.

Aliases are names of equivalent settings in other fine-tuners, so that an error message can suggest
ours. One alias covers all tools that use the name.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from mens_exp.config.compose import compose
from mens_exp.config.option_files import group_options
from mens_exp.config.schemas import SCHEMAS, declarations
from mens_exp.config.task import TASKS
from mens_exp.config.trainer import BY_CLASS, REFUSED
from mens_exp.errors import ConfigError, MensError, listed, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.compose import Composed

NO_KEY = "is not a key of the chosen"
_ALL_KEYS = (
    "a key that python -m mens_exp --cfg job shows; docs/reference/configuration explains each"
)
_SURE = 0.75  # difflib ratio for suggesting a key of another group; unverified guess
_LIKE = 0.6  # difflib ratio above which a name is suggested as the correction (a rough choice)
_ROWS = (".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".csv", ".csv.gz")


def unknown_key(key: str, found: str, leaves: Sequence[str]) -> ConfigError:
    """Return the error for a key that does not exist, with the most likely key.

    Args:
        key: the key.
        found: the override, as typed.
        leaves: all keys of the chosen options.
    """
    if not key:
        return ConfigError("not an override", found=found, expected="key=value or group=option")
    group, _, field = key.partition(".")
    value = found.partition("=")[2] or "…"
    if group == "trainer" and (of_trainer := _of_the_trainer(key, found, value)) is not None:
        return of_trainer
    if (inside := _of_one_logger(group, field, leaves)) is not None:
        return ConfigError(
            "several loggers are chosen, and this is a key of one of them",
            where=key,
            found=found,
            remedy=f"write {inside}={value}",
        )
    owners = options_with(group, field)
    if owners:
        return ConfigError(
            f"{NO_KEY} {group}",
            where=key,
            found=found,
            expected=f"{group}={' or '.join(owners)}, which {'have' if owners[1:] else 'has'} it",
            remedy=f"add {group}={owners[0]}, or drop {key}",
        )
    known = (
        _class(key, found)
        or _alias(key, found)
        or _inside_class(key, found)
        or _callback(key, found)
    )
    if known is not None:
        return known
    expected, likely = _expected_key(key, leaves)
    remedy = f"write {' or '.join(f'{one}={value}' for one in likely)}" if likely else f"drop {key}"
    return ConfigError("unknown key", where=key, found=found, expected=expected, remedy=remedy)


def _of_the_trainer(key: str, found: str, value: str) -> ConfigError | None:
    """Return an error for a Trainer argument that is refused, or is a config group here."""
    field = key.partition(".")[2]
    if field in REFUSED:
        return REFUSED[field].error(key, found)
    options = group_options().get(field)
    if options is None:
        return None
    off = value in {"false", "null", "none", "[]"} and "none" in options
    return ConfigError(
        f"the Trainer gets it from the group {field}",
        where=key,
        found=found,
        expected=f"{field}=<{'|'.join(options)}>",
        remedy=f"write {field}={'none' if off else '<one or a list of them>'}",
    )


def _class(key: str, found: str) -> ConfigError | None:
    group, _, field = key.partition(".")
    if field != "_target_":
        return None
    return ConfigError(
        "a class is named in a file of your own",
        where=key,
        found=found,
        expected=f"{group}=<name>, and its class in ./conf/{group}/<name>.yaml, under _target_",
        remedy="see docs/how-to/extending.md",
    )


def _inside_class(key: str, found: str) -> ConfigError | None:
    """Return an error for an argument of a class in the Trainer's settings without a class."""
    group, name, *inside = [*key.split("."), ""][:3]
    if group != "trainer" or name not in BY_CLASS or inside == [""]:
        return None
    return ConfigError(
        f"trainer.{name} has no class with this argument",
        where=key,
        found=found,
        expected=f"trainer.{name}=<name>, or a class by its _target_ and its arguments",
        remedy=f"drop {key}, or name the class too: trainer.{name}._target_={BY_CLASS[name]}",
    )


def _callback(key: str, found: str) -> ConfigError | None:
    """Return an error for a callback added by class, the usual form in Hydra projects."""
    match = re.fullmatch(r"callbacks\.(\w+)\._target_", key)
    if match is None:
        return None
    name, value = match[1], found.partition("=")[2]
    return ConfigError(
        "a custom callback is an option of the group",
        where=key,
        found=found,
        expected=f"conf/callbacks/{name}.yaml in the working directory, with _target_: {value}",
        remedy=f"write that file, then callbacks=[default,{name}]",
    )


def _of_one_logger(group: str, field: str, leaves: Sequence[str]) -> str | None:
    """Return the key of the logger with the field, if there are several loggers."""
    if group != "logger" or "logger.sink" in leaves:
        return None
    inside = re.compile(rf"logger\.\w+\.{re.escape(field)}")
    return next((leaf for leaf in leaves if inside.fullmatch(leaf)), None)


def _alias(key: str, found: str) -> ConfigError | None:
    """Return an error that names our equivalent if the key is from another fine-tuner."""
    peer = alias_of(key)
    if peer is None:
        return None
    what = f"is a name used in {peer.used_by}"
    if peer.ours is None:
        what, remedy = f"{what}; it is not offered here", f"drop {key}"
        return ConfigError(what, where=key, found=found, remedy=remedy)
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


def _expected_key(key: str, leaves: Sequence[str]) -> tuple[str, list[str]]:
    """Suggest keys for an unknown one: siblings, or else keys with the same last part.

    Returns:
        The clause for the message, and the most likely keys.
    """
    beside: list[str] = []
    parent = key
    while "." in parent and not beside:
        parent = parent.rpartition(".")[0]
        beside = [leaf for leaf in leaves if leaf.startswith(f"{parent}.")]
    if beside:
        # Compare last parts only, because the shared prefix makes all siblings similar.
        ends = {leaf[len(parent) + 1 :]: leaf for leaf in beside}
        peer = alias_of(key.replace(".", "_"))  # lora.rank is lora_rank in other tools
        close = ends.get(nearest(key[len(parent) + 1 :], ends) or "")
        if peer is not None and peer.ours in beside:
            close = peer.ours
        told = f"{listed(beside)}{f'; the nearest is {close}' if close else ''}"
        is_sure = close is not None and (peer is not None or _is_like(key, close))
        return told, [close] if close is not None and is_sure else []
    last = key.rpartition(".")[2]
    namesakes = [leaf for leaf in leaves if leaf.rpartition(".")[2] == last]
    if namesakes:
        return f"the whole path, {' or '.join(namesakes)}", namesakes
    by_depth = sorted(leaves, key=lambda leaf: -leaf.count("."))  # the shallowest key wins
    names = {leaf.rpartition(".")[2]: leaf for leaf in by_depth} | {g: g for g in group_options()}
    near = nearest(last, names, cutoff=_SURE)
    if near is not None:
        return f"a known name; the nearest is {names[near]}", [names[near]]
    return _ALL_KEYS, []


def _is_like(key: str, close: str) -> bool:
    return nearest(key.rpartition(".")[2], [close.rpartition(".")[2]], cutoff=_LIKE) is not None


def options_with(group: str, field: str) -> list[str]:
    """Return the options whose schema has the field, for a group with several schemas."""
    schemas = SCHEMAS.get(group, {})
    if len(schemas) < 2 or group == "callbacks":  # noqa: PLR2004
        return []
    if not any(field in schema.__dataclass_fields__ for schema in schemas.values()):  # type: ignore[attr-defined]
        return []
    owners = [c for c in _options_of(group) if field in c.values[group].keys()]  # noqa: SIM118
    # First the options that leave the key to the user, then those that set it.
    owners.sort(key=lambda cell: not OmegaConf.is_missing(cell.values[group], field))
    return [owner.choices[group] or "" for owner in owners]


def _options_of(group: str) -> Iterator[Composed]:
    """Yield the options of a group, except unreadable ones, which the command does not use."""
    for option in group_options()[group]:
        with suppress(MensError):
            yield from compose([[f"{group}={option}"]])


def meant_by(text: str) -> str | None:
    """Suggest a replacement for a text that is not an override."""
    flagless = text.lstrip("-")
    if text in TASKS:
        more = ", or nothing: it is the default" if text == "train" else ""
        return f"write task={text}{more}"
    places = [group for group, options in group_options().items() if text in options]
    if places:
        return f"write {' or '.join(f'{group}={text}' for group in places)}"
    if text in declarations() or flagless in group_options():
        return f"write {flagless}=<value>, without spaces"
    if text.lower().endswith(_ROWS):
        return f"write data=jsonl data.path={text}"
    if (Path(text).expanduser() / "manifest.json").is_file():
        return f"write path={text} and the task that reads it, or resume={text}"
    near = nearest(text, TASKS, cutoff=_SURE)
    likely = f"write study={text}" if text.endswith((".yaml", ".yml")) else _WORDS.get(text)
    return likely or ("see --help" if near is None else f"write task={near}")


_WORDS = {
    "help": "write --help",
    "version": "write task=doctor",
    "run": "write no word for it: python -m mens_exp trains",
    "start": "write no word for it: python -m mens_exp trains",
}


def of_flag(flag: str, value: str | None) -> str | None:
    """Return the override equivalent to another command line's flag; None if none is likely.

    Args:
        flag: as typed, such as ``--epochs`` or ``--epochs=3``.
        value: the argument after it, unless that is a flag or an override.
    """
    name, _, inside = flag.lstrip("-").replace("-", "_").partition("=")
    given = inside or value or "…"
    leaves = [path for path in declarations() if not path.startswith("callbacks.")]
    places = [path for path in leaves if name in {path, path.rpartition(".")[2]}]
    if name in group_options():
        places = [name]
    if len(places) == 1:
        return f"write {places[0]}={given}"
    chosen = [group for group, options in group_options().items() if name in options]
    if len(chosen) == 1 and not inside:
        return f"write {chosen[0]}={name}"
    peer = alias_of(name)
    if peer is not None:
        return (
            "drop it: it is not offered here"
            if peer.ours is None
            else (f"write {peer.how or f'{peer.ours}={given}'}")
        )
    if places:
        return f"write {' or '.join(f'{place}={given}' for place in places[:4])}"
    near = nearest(name, {path.rpartition(".")[2]: path for path in leaves}, cutoff=_SURE)
    found = [path for path in leaves if path.rpartition(".")[2] == near]
    return f"write {found[0]}={given}" if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class Alias:
    """A name used by another tool.

    Attributes:
        ours: the equivalent key or group here; None if there is none.
        used_by: the tools that use the name.
        how: the replacement, if a key alone is not enough.
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

# Names without an exact equivalent here; the rest are in the declarations.
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
    "gpus": Alias("trainer.devices", "Lightning 1"),
    "data_config": Alias("data.subset", "datasets"),
    "data_name": Alias("data.subset", "datasets"),
    "use_flash_attention_2": Alias(None, "Transformers"),
    "flash_attention": Alias(None, _AX),
    "deepspeed": Alias(None, f"{_HF} and {_AX}"),
    "use_liger_kernel": Alias("model.kernels", _HF, "model.kernels=liger"),
    "enable_liger_kernel": Alias("model.kernels", _LF, "model.kernels=liger"),
    "liger_kernel": Alias("model.kernels", _AX, "model.kernels=liger"),
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
