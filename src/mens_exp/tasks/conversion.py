"""The adapter that task=export writes in another form: found, and checked before a run opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.adapter_delta import portable
from mens_exp.artifacts.adapter_v2 import lower
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.quant import QuantType
from mens_exp.config.task import ExportFormat
from mens_exp.errors import ConfigError, MensError, NoEffectError, Problems
from mens_exp.export.adapter import AdapterPlace, find, needs_base, out_problems, read
from mens_exp.layout.adapter_base import AdapterBase, base_of
from mens_exp.rows.cache import cache_root
from mens_exp.tasks.subject import config_of, subject_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.artifacts.adapter_v3 import Quant
    from mens_exp.config.root import RunConfig

__all__ = ["Conversion", "conversion_of", "form_of", "place_of", "problems"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """One conversion.

    Attributes:
        place: where the adapter lies.
        base: the model that it is for, where the conversion needs it.
        quant: how that was quantized, where the adapter does not tell and somebody does.
    """

    place: AdapterPlace
    base: AdapterBase | None
    quant: Quant | None


def place_of(path: str) -> AdapterPlace:
    """Return the adapter that ``path`` names: a training run's, or one that lies in a directory.

    Raises:
        RequestError: there is none.
        DataError: it is an unpacked bundle, and not what was packed.
    """
    directory = Path(path).expanduser()
    if path == "latest" or RunDir(directory).manifest.is_file():
        directory = subject_of(path).path
    return find(directory)


def form_of(config: RunConfig) -> ExportFormat:
    """Return the adapter's own form in an export: vLLM and Ollama read PEFT's."""
    others = {ExportFormat.vllm, ExportFormat.ollama}
    return ExportFormat.peft if config.format in others else config.format


def conversion_of(config: RunConfig) -> Conversion:
    """Find the adapter and what its conversion needs.

    Raises:
        MensError: there is no adapter, or its base model cannot be described.
    """
    assert config.path is not None, "validation has asked for it"
    place = place_of(config.path)
    owner = None if place.run is None else config_of(place.run)
    base = None
    if needs_base(place, form_of(config)):
        base = base_of((owner or config).model, cache_root())
    quant = _told(config)
    if place.form == "peft" and owner is not None:
        quant = _quant(owner.quant.quant_type, double_quant=owner.quant.double_quant)
    return Conversion(place=place, base=base, quant=quant)


def problems(config: RunConfig, given: Iterable[str]) -> list[MensError]:
    """List what keeps an adapter from being written in the chosen form.

    Args:
        config: the whole configuration.
        given: the command's own overrides.
    """
    found: list[MensError] = []
    if config.out is not None:
        found += out_problems(Path(config.out))
    try:
        conversion = conversion_of(config)
        found += _without_effect(config, conversion, given)
        manifest, tensors = read(conversion.place, conversion.base, conversion.quant)
        if form_of(config) is ExportFormat.peft:
            return found
        light, _ = portable(manifest, tensors)
        if config.format is ExportFormat.v2:
            base = conversion.base
            lower(light, embed_key=None if base is None else base.embed_key)
    except Problems as several:
        found += several.problems
    except MensError as error:
        found.append(error)
    return found


def _without_effect(
    config: RunConfig, conversion: Conversion, given: Iterable[str]
) -> Iterator[ConfigError]:
    place = conversion.place
    keys = {text.lstrip("+").partition("=")[0] for text in given}
    reason = None
    if place.run is not None:
        reason = f"the adapter is of the run {place.run.path}, which names its own"
    elif conversion.base is None:
        reason = f"format={config.format.value} takes all it needs from {place.directory}"
    for key in sorted(keys if reason else ()):
        if key.partition(".")[0] == "model":
            yield NoEffectError("here", where=key, found=reason, expected="no model")
    tells = place.form == "v3" or place.run is not None
    for key in sorted(keys & {"export.base_quant", "export.double_quant"} if tells else ()):
        yield NoEffectError(
            "here",
            where=key,
            found=f"{place.directory} tells how its base was quantized",
            expected="an adapter that does not: schema v2 or PEFT's form",
        )


def _told(config: RunConfig) -> Quant | None:
    told = config.export
    if told.base_quant is None and told.double_quant is None:
        return None
    return _quant(told.base_quant or QuantType.nf4, double_quant=told.double_quant is not False)


def _quant(base_quant: QuantType, *, double_quant: bool) -> Quant:
    return {
        "base_quant": base_quant.value,
        "double_quant": double_quant and base_quant is not QuantType.none,
    }
