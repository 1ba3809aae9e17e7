"""The adapter that a run starts from: schema v3 or a PEFT directory, read under logical names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v2 import schema_in
from mens_exp.artifacts.adapter_v3 import TENSORS_NAME, read_adapter
from mens_exp.artifacts.digest import refuse_changed_adapter, sha256_file
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.errors import DataError, RequestError
from mens_exp.layout.peft_adapter import TENSORS_NAME as PEFT_TENSORS
from mens_exp.layout.peft_adapter import is_peft, read_peft

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import AdapterManifest, Quant
    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.layout.families import Family

_WHERE = "lora.init_from"


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingAdapter:
    """An adapter on disk.

    Attributes:
        directory: the directory of its files.
        form: ``v3`` or ``peft``.
        sha256: hash of the tensor file.
        rank: rank r of every layer.
        alpha: numerator of its scale.
        alphas: alpha of each layer that has a different one.
        variant: the adapter method.
        base_weights_sha256: hash of the base it was trained on; None if not recorded.
        quant: quantization of that base; None if not recorded.
        quantizer: its block size and skipped modules; None if not recorded.
        tensors: the method's tensors of each layer, such as ``{logical}.lora_a`` [r, in], f32.
        peft_config: the fields of PEFT's configuration; empty for a method with a name here.
    """

    directory: Path
    form: str
    sha256: str
    rank: int
    alpha: int
    alphas: dict[str, int]
    variant: str
    base_weights_sha256: str | None
    quant: Quant | None
    quantizer: Quantizer | None
    tensors: dict[str, npt.NDArray[np.float32]]
    peft_config: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> dict[str, int]:
        """Rank r of each layer: that of its A, or the adapter's if it has none."""
        found = dict.fromkeys((name.rpartition(".")[0] for name in self.tensors), self.rank)
        halves = {n: t for n, t in self.tensors.items() if n.endswith(".lora_a")}
        return found | {name.rpartition(".")[0]: t.shape[-2] for name, t in halves.items()}


def find(text: str) -> Path:
    """Return the directory of the adapter that ``lora.init_from`` names.

    Args:
        text: ``latest``, a run directory, or a directory that contains an adapter.

    Raises:
        RequestError: there is no such adapter.
    """
    directory = Path(text).expanduser()
    if text != "latest" and _form(directory) is not None:
        return directory.resolve()
    try:
        run = resolve(text, task="train")
    except RequestError as error:
        raise RequestError(
            error.what,
            where=_WHERE,
            found=text,
            expected=f"an adapter directory (schema v3 or PEFT), or {error.expected}",
            remedy="write lora.init_from=latest, or name a run or the directory of an adapter",
        ) from error
    if _form(run.adapter) is None:
        raise RequestError(
            "the run has no adapter",
            where=_WHERE,
            found=str(run.path),
            expected="a training run that has ended",
            remedy=f"finish it with resume={run.path}",
        )
    return run.adapter.resolve()


def read(directory: Path, family: Family) -> StartingAdapter:
    """Read an adapter found by :func:`find`.

    Args:
        directory: the directory of the adapter.
        family: family of its model; a PEFT directory names modules by their paths.

    Raises:
        DataError: a file is missing, damaged, or violates its format, or its scale cannot be
            expressed by a run's settings.
        ModelFileError: the tensor file of a PEFT directory is damaged.
        Problems: several of these, or a file differs from what its run wrote.
    """
    refuse_changed_adapter(directory)
    if _form(directory) == "peft":
        return _read_peft(directory, family)
    manifest, tensors = read_adapter(directory)
    ours = manifest.mens_exp or {}
    if ours.get("scale") == "header" and ours.get("rank_pattern"):
        raise DataError(
            "the adapter's layers have different ranks but one scale, which no alpha can express",
            where=_WHERE,
            found="mens_exp.scale=header",
            expected="the adapter of a run, or a PEFT directory",
            remedy=f"make one: task=export path={directory} export.format=peft",
        )
    if manifest.form.root_scale and ours.get("init", {}).get("doubled_rank"):
        raise DataError(
            "the adapter's scale is not an alpha over the root of its rank",
            where=_WHERE,
            found="rslora whose start took a part out of the base",
            expected="an adapter without one of the two",
            remedy=f"start from its PEFT form, {directory / 'peft'}",
        )
    return StartingAdapter(
        directory=directory,
        form="v3",
        sha256=sha256_file(directory / TENSORS_NAME),
        rank=manifest.rank,
        alpha=manifest.alpha,
        alphas=dict(ours.get("alpha_pattern") or {}),
        variant=manifest.variant,
        base_weights_sha256=ours.get("base_weights_sha256"),
        quant=manifest.quant,
        quantizer=manifest.quantizer,
        tensors=tensors,
        peft_config=manifest.peft_config,
    )


def _form(directory: Path) -> str | None:
    if schema_in(directory) == "v3":
        return "v3"
    return "peft" if is_peft(directory) else None


def _read_peft(directory: Path, family: Family) -> StartingAdapter:
    adapter, own = read_peft(directory, family), _own_record(directory)
    settings = adapter.settings
    alphas = {layer: settings.alpha_of(path) for layer, path in adapter.paths.items()}
    for found in (settings.alpha, *alphas.values()):
        if not float(found).is_integer():
            raise DataError("has no whole alpha", where=str(directory), found=found)
    if len(settings.variants) > 1:
        raise DataError(
            "combines two variants, which no lora.variant does",
            where=str(directory),
            found=" and ".join(settings.flags),
            expected="one of the two",
        )
    return StartingAdapter(
        directory=directory,
        form="peft",
        sha256=sha256_file(directory / PEFT_TENSORS),
        rank=settings.r,
        alpha=int(settings.alpha),
        alphas={layer: int(one) for layer, one in alphas.items() if one != settings.alpha},
        variant=settings.variants[0],
        base_weights_sha256=None
        if own is None
        else (own.mens_exp or {}).get("base_weights_sha256"),
        quant=None if own is None else own.quant,
        quantizer=None if own is None else own.quantizer,
        tensors=adapter.tensors,
    )


def _own_record(directory: Path) -> AdapterManifest | None:
    """Return the record of our adapter if a PEFT directory is a copy of one."""
    if _form(directory.parent) != "v3" or directory != RunDir(directory.parents[1]).peft:
        return None
    return read_adapter(directory.parent)[0]
