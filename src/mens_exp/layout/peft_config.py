"""PEFT's adapter_config.json: what of it decides what a LoRA adapter adds, read strictly.

Keys of PEFT 0.21 (https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.foreign_patterns import matches, problem_of
from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.typed_json import check_keys, parse_json
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["CONFIG_NAME", "PeftSettings", "read_settings"]

CONFIG_NAME = "adapter_config.json"
_READ: dict[str, Any] = {
    "peft_type": str,
    "r": int,
    "lora_alpha": float,
    "use_rslora": bool | None,
    "use_dora": bool | None,
    "rank_pattern": dict[str, int] | None,
    "alpha_pattern": dict[str, float] | None,
    "base_model_name_or_path": str | None,
    "target_parameters": list[str] | None,
}
# They say how an adapter was made or is found again, and nothing of what its tensors mean.
_HARMLESS = frozenset(
    [
        *("auto_mapping", "peft_version", "task_type", "inference_mode", "revision"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("ensure_weight_tying", "velora_config"),
    ]
)
# Starts that leave the base as it is; others (pissa, olora, corda, loftq, lora_ga) change it.
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
_NOTHING: tuple[Any, ...] = (None, False, 0, "", "none", [], {})


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftSettings:
    """The part of a configuration that the tensors need.

    Attributes:
        r: rank of modules that no pattern matches.
        alpha: numerator of the scale of those.
        rslora: whether the scale is ``alpha / sqrt(r)`` instead of ``alpha / r``.
        dora: whether the tensors hold row lengths too.
        ranks: pattern (a regular expression over the end of a path) to rank.
        alphas: pattern to alpha.
        base_model: as it is recorded.
        file: that holds it, for messages.
        parameters: ends of the paths of adapted tensors that are no module's weight.
    """

    r: int
    alpha: float
    rslora: bool
    dora: bool
    ranks: dict[str, int]
    alphas: dict[str, float]
    base_model: str | None
    file: str
    parameters: tuple[str, ...] = ()

    def adapts(self, parameter: str) -> bool:
        """Tell whether a parameter is among those that it names; the end of a path counts."""
        return any(f".{parameter}".endswith(f".{one}") for one in self.parameters)

    def rank_of(self, path: str) -> int:
        """Return r of a module; the first pattern that matches counts, as in PEFT."""
        return next((r for key, r in self.ranks.items() if self._applies(key, path)), self.r)

    def alpha_of(self, path: str) -> float:
        """Return alpha of a module."""
        alphas = self.alphas.items()
        return next((alpha for key, alpha in alphas if self._applies(key, path)), self.alpha)

    def scale_of(self, path: str) -> float:
        """Return the factor before ``B @ A`` of a module."""
        rank = self.rank_of(path)
        return self.alpha_of(path) / (math.sqrt(rank) if self.rslora else rank)

    def _applies(self, pattern: str, path: str) -> bool:
        """Tell whether PEFT applies a pattern to a module: it matches the end of the path."""
        return matches(_in_full(pattern), path, self.file)


def read_settings(directory: Path) -> PeftSettings:
    """Read the configuration of a LoRA adapter.

    Args:
        directory: holds adapter_config.json.

    Raises:
        DataError: it cannot be read, is of another method, or makes another update than
            ``scale * B A`` (and DoRA's) on the listed modules.
        Problems: several of these.
    """
    path = directory / CONFIG_NAME
    config = parse_json(read_bytes(path), str(path))
    if not isinstance(config, dict):
        raise DataError("not an object", where=str(path))
    known = {name: value for name, value in config.items() if name in _READ}
    found = check_keys(known, _READ, ("peft_type", "r", "lora_alpha"), str(path))
    Problems.raise_if(found or list(_problems(config, str(path))))
    return PeftSettings(
        r=config["r"],
        alpha=config["lora_alpha"],
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        ranks=config.get("rank_pattern") or {},
        alphas=config.get("alpha_pattern") or {},
        base_model=config.get("base_model_name_or_path") or None,
        file=str(path),
        parameters=tuple(config.get("target_parameters") or ()),
    )


def _problems(config: dict[str, Any], where: str) -> Iterator[DataError]:
    if config["peft_type"] != "LORA":
        yield DataError(
            "no LoRA adapter",
            where=f"{where}: peft_type",
            found=config["peft_type"],
            expected="LORA",
        )
        return
    start = config.get("init_lora_weights")
    if start not in _STARTS:
        yield DataError(
            "its start changed the weights of the base, which the tensors do not tell",
            where=f"{where}: init_lora_weights",
            found=start,
            expected=", ".join(str(one) for one in _STARTS[1:]),
            remedy="save it from PEFT with path_initial_model_for_weight_conversion",
        )
    for name in sorted(config.keys() - _READ.keys() - _HARMLESS - {"init_lora_weights"}):
        if config[name] not in _NOTHING:
            yield DataError(
                "the adapter is more than LoRA matrices",
                where=f"{where}: {name}",
                found=config[name],
                expected="nothing",
                remedy="train without it, or take it out of a copy of the file if it changes "
                "nothing that is computed",
            )
    yield from _number_problems(config, where)


def _number_problems(config: dict[str, Any], where: str) -> Iterator[DataError]:
    for name in ("r", "lora_alpha"):
        if config[name] <= 0:
            yield _too_small(f"{where}: {name}", config[name])
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern, value in (config.get(name) or {}).items():
            place = f"{where}: {name}.{pattern}"
            if value <= 0:
                yield _too_small(place, value)
            problem = problem_of(_in_full(pattern), where)
            if problem is not None:
                yield DataError("no regular expression", where=place, found=problem)


def _too_small(where: str, found: object) -> DataError:
    return DataError("wrong value", where=where, found=found, expected="more than 0")


def _in_full(pattern: str) -> str:
    """Return what PEFT matches in place of a pattern."""
    return rf"(.*\.)?({pattern})$"
