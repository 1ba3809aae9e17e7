"""An adapter that a run starts from: schema v3 or a PEFT directory, read under logical names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.artifacts.adapter_v3 import (
    MANIFEST_NAME,
    OLDER_MANIFEST_NAME,
    TENSORS_NAME,
    read_adapter,
)
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.artifacts.typed_json import parse_json
from mens_exp.errors import DataError, ModelFileError, RequestError
from mens_exp.layout.names import logical_name
from mens_exp.layout.safetensors_header import read_header

if TYPE_CHECKING:
    import numpy.typing as npt

    from mens_exp.layout.families import Family
    from mens_exp.layout.safetensors_header import TensorInfo

__all__ = ["StartingAdapter", "find", "read"]

_WHERE = "lora.init_from"
_PEFT_CONFIG, _PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_HALVES = {".lora_A.weight": "lora_a", ".lora_B.weight": "lora_b"}
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
# What of a PEFT configuration makes another update than (alpha / r) B A on the listed modules.
_PLAIN: dict[str, Any] = {
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "bias": "none",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingAdapter:
    """An adapter on disk.

    Attributes:
        directory: where its files lie.
        form: ``v3`` or ``peft``.
        sha256: of the file of tensors.
        rank: r of every layer.
        alpha: numerator of its scale.
        alphas: that of each layer where it is another.
        variant: ``lora``, ``rslora`` or ``dora``.
        base_weights_sha256: of the base it was trained on; None where the form does not tell.
        tensors: ``{logical}.lora_a`` [r, in], ``{logical}.lora_b`` [out, r] and, in dora,
            ``{logical}.lora_magnitude`` [out], f32.
    """

    directory: Path
    form: str
    sha256: str
    rank: int
    alpha: int
    alphas: dict[str, int]
    variant: str
    base_weights_sha256: str | None
    tensors: dict[str, npt.NDArray[np.float32]]


def find(text: str) -> Path:
    """Return the directory of the adapter that ``lora.init_from`` names.

    Args:
        text: ``latest``, a run directory, or a directory that holds an adapter.

    Raises:
        RequestError: there is none.
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
    """Read an adapter that :func:`find` has found.

    Args:
        directory: holds the adapter.
        family: of the model that it is for; a PEFT directory names modules by their paths.

    Raises:
        DataError: a file is missing, damaged, or breaks a rule of its form.
        ModelFileError: a tensor belongs to no projection with a logical name.
    """
    if _form(directory) == "peft":
        return _read_peft(directory, family)
    manifest, tensors = read_adapter(directory)
    ours = manifest.mens_exp or {}
    if manifest.variant == "rslora" and ours.get("init", {}).get("doubled_rank"):
        raise DataError(
            "the adapter's scale is no alpha over a root of its rank",
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
        tensors=tensors,
    )


def _form(directory: Path) -> str | None:
    if any((directory / name).is_file() for name in (MANIFEST_NAME, OLDER_MANIFEST_NAME)):
        return "v3"
    return "peft" if (directory / _PEFT_CONFIG).is_file() else None


def _read_peft(directory: Path, family: Family) -> StartingAdapter:
    place = directory / _PEFT_CONFIG
    config = parse_json(read_bytes(place), str(place))
    if not isinstance(config, dict):
        raise DataError("not an object", where=str(place))
    for name, plain in _PLAIN.items():
        if (config.get(name) or plain) != plain:
            raise DataError(
                "the adapter is no plain LoRA",
                where=f"{place}: {name}",
                found=str(config[name]),
                expected=str(plain),
            )
    try:
        rank, alpha = int(config["r"]), int(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError("has no whole r and lora_alpha", where=str(place)) from error
    path = directory / _PEFT_TENSORS
    return StartingAdapter(
        directory=directory,
        form="peft",
        sha256=sha256_file(path) if path.is_file() else "",
        rank=rank,
        alpha=alpha,
        alphas={},
        variant="lora",
        base_weights_sha256=_recorded_base(directory),
        tensors=_peft_tensors(path, family),
    )


def _recorded_base(directory: Path) -> str | None:
    """Return the base's hash where the PEFT directory is the view of an adapter of ours."""
    if _form(directory.parent) != "v3" or directory != RunDir(directory.parents[1]).peft:
        return None
    manifest, _ = read_adapter(directory.parent)
    found = (manifest.mens_exp or {}).get("base_weights_sha256")
    return str(found) if found else None


def _peft_tensors(path: Path, family: Family) -> dict[str, npt.NDArray[np.float32]]:
    header = read_header(path)
    raw = path.read_bytes()
    data = raw[len(raw) - max((info.end for info in header.values()), default=0) :]
    tensors = {}
    for name, info in header.items():
        suffix = next((end for end in _HALVES if name.endswith(end)), None)
        if suffix is None or info.dtype not in _NUMPY:
            raise ModelFileError(
                "is no matrix of a LoRA adapter",
                where=f"{path}: {name}",
                found=info.dtype,
                expected="….lora_A.weight or ….lora_B.weight in F32, F16 or BF16",
            )
        logical = logical_name(name.removesuffix(suffix), family)
        tensors[f"{logical}.{_HALVES[suffix]}"] = _as_f32(data, info)
    return tensors


def _as_f32(data: bytes, info: TensorInfo) -> npt.NDArray[np.float32]:
    values: npt.NDArray[Any] = np.frombuffer(data[info.start : info.end], _NUMPY[info.dtype])
    if info.dtype == "BF16":  # the upper half of an f32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).reshape(info.shape)
