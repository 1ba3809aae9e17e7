"""Adapter tensors: their forms, their file and its validation, and the spectrum of an update.

Schemas v2 and v3 share these rules. The singular values of an update ``s · B A`` are computed
without forming the product: with thin QRs of B and of Aᵀ, ``B A`` is ``Q_B (R_B R_Aᵀ) Q_Aᵀ``. Both
Q are orthonormal, so the singular values are those of the small matrix in the middle. Where all
experts of a layer are stored as one tensor, A is ``[E, R, I]`` and B ``[E, O, R]``. They act
independently, like the blocks of a block-diagonal matrix, so the singular values of the layer are
those of all experts together.

Shapes: R rank, I inputs and O outputs of a projection, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mens_exp.artifacts.atomic import write_bytes
from mens_exp.errors import DataError, MensError, expected_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

_MATRIX_RANK, _STACK_RANK = 2, 3
_SHOWN = 8
HALVES: dict[str, tuple[str, ...]] = {"lora_a": ("r", "in"), "lora_b": ("out", "r")}
MAGNITUDE = "lora_magnitude"
HEAD = "lm_head"
SIZES = ("r", "in", "out")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterForm:
    """The tensors that an adapter has for each layer, and the update that they encode.

    Attributes:
        name: the adapter method, as records have it.
        tensors: sizes of each tensor, by the last part of its name: ``r`` (rank), ``in``, ``out``,
            or others that :meth:`sizes` derives from these.
        root_scale: whether the scale of ``B A`` is ``alpha / sqrt(r)`` instead of ``alpha / r``.
        no_delta: reason why the tensors do not encode an update ``s · B A``; None if they do.
        exports: whether PEFT's form is written of them although they encode none.
        shares: whether the update also needs random matrices that all layers share.
        in_peft: whether only PEFT can apply the tensors; a record describes their sizes.
    """

    name: str
    tensors: dict[str, tuple[str, ...]]
    root_scale: bool = False
    no_delta: str | None = None
    exports: bool = False
    shares: bool = False
    in_peft: bool = False

    @property
    def has_pair(self) -> bool:
        """Whether two of the tensors are the matrices A and B of an update ``s · B A``."""
        return HALVES.keys() <= self.tensors.keys()

    def scale(self, alpha: float, rank: float) -> float:
        """Return the factor applied to ``B A``."""
        return alpha / (math.sqrt(rank) if self.root_scale else rank)

    def alpha(self, scale: float, rank: float) -> float:
        """Return the alpha that gives a scale; see :meth:`scale`."""
        return scale * (math.sqrt(rank) if self.root_scale else rank)

    def shapes(self, *, r: int, width: int, out: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's tensors, by the last part of their names."""
        sizes = self.sizes(r=r, width=width, out=out)
        return {name: tuple(sizes[one] for one in dims) for name, dims in self.tensors.items()}

    def sizes(self, *, r: int, width: int, out: int) -> dict[str, int]:
        """Return the sizes of a layer's tensors by their names in :attr:`tensors`."""
        return {"r": r, "in": width, "out": out}

    def parameters(self, *, r: int, width: int, out: int) -> int:
        """Return the number of values of a layer's tensors."""
        shapes = self.shapes(r=r, width=width, out=out)
        return sum(math.prod(shape) for shape in shapes.values())

    def weight_shape(
        self, layer: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[int | None, ...]:
        """Return the shape of the weight that a layer's tensors update; unknown sizes are None.

        Args:
            layer: logical name.
            shapes: shapes of the adapter's tensors by name.
        """
        found: dict[str, int] = {}
        stacked: tuple[int, ...] = ()
        for name, dims in self.tensors.items():
            shape = shapes[f"{layer}.{name}"]
            stacked = shape[: len(shape) - len(dims)]
            found |= dict(zip(dims, shape[len(stacked) :], strict=True))
        return (*stacked, *self.ends(found))

    def ends(self, sizes: Mapping[str, int]) -> tuple[int | None, int | None]:
        """Return a layer's numbers of outputs and inputs, derived from the sizes of its tensors."""
        return sizes.get("out"), sizes.get("in")


class _Vector(AdapterForm):
    """New values of a vector of the base."""

    def weight_shape(
        self, layer: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[int | None, ...]:
        """Return the shape of the tensor itself."""
        (name,) = self.tensors
        return shapes[f"{layer}.{name}"]


class _Lokr(AdapterForm):
    """LoKr's Kronecker product; outputs and inputs of the layer are each split into two factors."""

    def sizes(self, *, r: int, width: int, out: int) -> dict[str, int]:
        """Split outputs and inputs into two factors each."""
        (out_1, out_2), (in_1, in_2) = factors(out), factors(width)
        return {"r": r, "out_1": out_1, "out_2": out_2, "in_1": in_1, "in_2": in_2}

    def ends(self, sizes: Mapping[str, int]) -> tuple[int | None, int | None]:
        """Multiply the factors."""
        return sizes["out_1"] * sizes["out_2"], sizes["in_1"] * sizes["in_2"]


class _RandLora(AdapterForm):
    """RandLoRA's factors of random bases, whose ranks add up to the full rank of the layer."""

    def sizes(self, *, r: int, width: int, out: int) -> dict[str, int]:
        """Count the bases."""
        smaller = min(width, out)
        return {"r": r, "bases": -(-smaller // r), "smaller": smaller}


def factors(size: int) -> tuple[int, int]:
    """Return the two factors of a size that are closest to each other, the smaller one first."""
    smaller = next(one for one in range(math.isqrt(size), 0, -1) if size % one == 0)
    return smaller, size // smaller


FORMS = {
    form.name: form
    for form in (
        AdapterForm(name="lora", tensors=HALVES),
        AdapterForm(name="rslora", tensors=HALVES, root_scale=True),
        AdapterForm(
            name="dora",
            tensors={**HALVES, MAGNITUDE: ("out",)},
            no_delta="DoRA is not a delta: it sets the length of each row of the weight that it "
            "changes",
            exports=True,
        ),
        AdapterForm(
            name="ia3",
            tensors={"ia3_l": ("out",)},
            no_delta="(IA)³ is not a delta: it multiplies the rows of the weight that it changes",
        ),
        _Vector(
            name="ln_tuning",
            tensors={"ln_tuning": ("out",)},
            no_delta="tuned norms are not a delta: their values replace those of the base",
            exports=True,
        ),
        AdapterForm(
            name="loha",
            tensors={
                "hada_w1_a": ("out", "r"),
                "hada_w1_b": ("r", "in"),
                "hada_w2_a": ("out", "r"),
                "hada_w2_b": ("r", "in"),
            },
            no_delta="the update of LoHa is a product of two low-rank matrices, and no such matrix "
            "itself",
        ),
        AdapterForm(
            name="vera",
            tensors={"vera_lambda_b": ("out",), "vera_lambda_d": ("r",)},
            no_delta="VeRA's update also has projections, which all layers share and no file holds",
            shares=True,
        ),
        _Lokr(
            name="lokr",
            tensors={
                "lokr_w1": ("out_1", "in_1"),
                "lokr_w2_a": ("out_2", "r"),
                "lokr_w2_b": ("r", "in_2"),
            },
            no_delta="the update of LoKr is a Kronecker product, and no product of low rank",
        ),
        AdapterForm(
            name="adalora",
            tensors={
                "adalora_a": ("r", "in"),
                "adalora_e": ("r",),
                "adalora_b": ("out", "r"),
            },
            no_delta="the update of AdaLoRA also has a factor for each rank",
        ),
        _RandLora(
            name="randlora",
            tensors={"randlora_lambda": ("r", "bases"), "randlora_gamma": ("bases", "smaller")},
            no_delta="RandLoRA's update also has bases, which all layers share and no file holds",
            shares=True,
        ),
        AdapterForm(
            name="prompt_tuning",
            tensors={"prompt_embeddings": ("r", "in")},
            no_delta="prompt tuning changes no weight: its tensor holds inputs of the model",
        ),
        AdapterForm(
            name="passthrough",
            tensors={},
            no_delta="PEFT's layers alone know what their tensors make of a weight",
            in_peft=True,
        ),
    )
}


def form_in_peft(described: Mapping[str, Sequence[str]]) -> AdapterForm:
    """Return the form of a PEFT method without a form here, given the sizes of its tensors."""
    return replace(FORMS["passthrough"], tensors={part: tuple(d) for part, d in described.items()})


def foreign_form(name: str, tensors: Mapping[str, Sequence[str]]) -> AdapterForm:
    """Return the form of another package's method, as a record describes it.

    Args:
        name: the method.
        tensors: sizes of each tensor of a layer.
    """
    return AdapterForm(
        name=name,
        tensors={part: tuple(dims) for part, dims in tensors.items()},
        no_delta=f"{name} is not a delta: only its own method can apply its tensors to a weight",
    )


class Header(Protocol):
    """Interface of a header, of either schema, that describes the tensors."""

    layer_order: list[str]
    base_key_map: dict[str, str]
    vocab: int
    d_model: int
    rank: int
    alpha: int

    def rank_of(self, layer: str) -> int:
        """Return the rank r of one logical layer."""
        ...

    @property
    def form(self) -> AdapterForm:
        """The tensors that each layer has."""
        ...


def header_problems(header: Header, where: str) -> list[DataError]:
    """List layers without a separate key, keys without a layer, and sizes below 1.

    Args:
        header: the parsed header.
        where: the file, for messages.
    """
    layers, keys = header.layer_order, header.base_key_map
    found = [] if layers else [DataError("contains no layers", where=f"{where}: layer_order")]
    found += [
        DataError("a layer without a base key", where=f"{where}: base_key_map", found=layer)
        for layer in layers
        if layer not in keys
    ]
    found += [
        DataError(
            "a base key does not belong to any layer",
            where=f"{where}: base_key_map",
            found=layer,
            expected=expected_name(layer, layers),
        )
        for layer in sorted(set(keys) - set(layers))
    ]
    for name, values in (("layer_order", layers), ("base_key_map", list(keys.values()))):
        if len(set(values)) < len(values):
            repeated = sorted({x for x in values if values.count(x) > 1})
            found.append(DataError("repeated", where=f"{where}: {name}", found=repeated))
    for name in ("vocab", "d_model", "rank", "alpha"):
        size = getattr(header, name)
        if size < 1:
            place = f"{where}: {name}"
            found.append(DataError("wrong value", where=place, found=size, expected="1 or more"))
    return found


class TensorFile:
    """An open safetensors file of an adapter: types and shapes first, values on demand."""

    def __init__(self, path: Path) -> None:
        """Read the file's header.

        Raises:
            DataError: the file is missing or truncated.
        """
        self.path = path
        try:
            with safe_open(path, framework="numpy") as file:
                slices = {name: file.get_slice(name) for name in list(file.keys())}
                self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
                self.kinds = {name: str(part.get_dtype()) for name, part in slices.items()}
                self.notes: dict[str, str] = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise _not_whole(path, error) from error

    def problems(self, header: Header) -> list[DataError]:
        """List the file's disagreements with a header."""
        found = few(disagreements(header, self.shapes, self.kinds, str(self.path)), str(self.path))
        for name in ("rank", "alpha"):  # safetensors metadata, if the writer stored any
            noted, ours = self.notes.get(name), getattr(header, name)
            if noted is not None and noted != str(ours):
                found.append(
                    DataError(
                        f"the file notes another {name} than the header",
                        where=f"{self.path}: __metadata__.{name}",
                        found=noted,
                        expected=str(ours),
                    )
                )
        return found

    def read(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the tensors, keyed by name.

        Raises:
            DataError: the file is no longer complete.
        """
        try:
            with safe_open(self.path, framework="numpy") as file:
                return {name: file.get_tensor(name) for name in self.shapes}
        except (OSError, SafetensorError) as error:
            raise _not_whole(self.path, error) from error


def write_tensors(
    header: Header,
    tensors: Mapping[str, npt.NDArray[np.float32]],
    path: Path,
    problems: list[DataError],
) -> None:
    """Write the tensors of an adapter atomically; equal tensors give identical bytes.

    Args:
        header: the header that describes the tensors.
        tensors: float32, by name.
        path: the target.
        problems: problems of the header itself.

    Raises:
        MensError: header and tensors disagree, or could not be read back; nothing is written.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    kinds = {name: _kind_of(tensor.dtype) for name, tensor in tensors.items()}
    found = problems or disagreements(header, shapes, kinds, str(path))
    if found:
        raise MensError(
            "an adapter could not be read back, so it is not written",
            found="; ".join(str(problem) for problem in found),
        )
    ordered = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    write_bytes(path, save(ordered))


def few(problems: list[DataError], where: str) -> list[DataError]:
    """Return the first problems of a file, and the number of the others, for short messages."""
    more = len(problems) - _SHOWN
    if more <= 0:
        return problems
    return [*problems[:_SHOWN], DataError(f"and {more} more problems of this kind", where=where)]


def disagreements(
    header: Header,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str],
    where: str,
) -> list[DataError]:
    """List tensors that are missing, belong to no layer, or have the wrong type or shape."""
    found = [
        DataError("wrong type", where=f"{where}: {name}", found=kind, expected="F32")
        for name, kind in kinds.items()
        if kind != "F32"
    ]
    parts = header.form.tensors
    expected = {f"{layer}.{part}" for layer in header.layer_order for part in parts}
    for name in sorted(set(shapes) - expected):
        known = expected_name(name, expected)
        found.append(
            DataError(
                "a tensor does not belong to any layer", where=where, found=name, expected=known
            )
        )
    found += [
        DataError("a tensor is missing", where=where, expected=name)
        for name in sorted(expected - set(shapes))
    ]
    for layer in dict.fromkeys(header.layer_order):
        found += _shape_problems(layer, header.form, header.rank_of(layer), shapes, where)
    return found + _head_problems(header, shapes, where)


def _shape_problems(
    layer: str,
    form: AdapterForm,
    rank: int,
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> list[DataError]:
    found, sizes = [], {"r": rank}
    for part, dims in form.tensors.items():
        name = f"{layer}.{part}"
        shape = shapes.get(name)
        if shape is None or part == MAGNITUDE:
            continue
        stacks = (len(dims), len(dims) + 1) if part in HALVES else (len(dims),)
        given = list(zip(dims[::-1], shape[::-1], strict=False))
        if len(shape) not in stacks or any(sizes.get(one, size) != size for one, size in given):
            expected = ", ".join(str(sizes.get(one, one)) for one in dims)
            found.append(_wrong_shape(f"{where}: {name}", shape, f"[{expected}]"))
        else:
            sizes |= dict(given)
    first, second = (shapes.get(f"{layer}.{half}", ()) for half in HALVES)
    if first and second and first[:-2] != second[:-2]:
        what = f"{list(first[:-2])}, the experts of lora_a, before its rows and columns"
        found.append(_wrong_shape(f"{where}: {layer}.lora_b", second, what))
    magnitude, out = shapes.get(f"{layer}.{MAGNITUDE}"), shapes.get(f"{layer}.lora_b", ())[:1]
    if magnitude is not None and magnitude != out:
        place = f"{where}: {layer}.{MAGNITUDE}"
        found.append(_wrong_shape(place, magnitude, f"{list(out)}, the rows of lora_b"))
    return found


def _head_problems(
    header: Header, shapes: Mapping[str, tuple[int, ...]], where: str
) -> list[DataError]:
    """Compare the head's matrices, which have the vocabulary size and width, with the header."""
    wanted = {"lora_a": (-1, header.d_model, "d_model"), "lora_b": (0, header.vocab, "vocab")}
    found = []
    for half, (axis, size, name) in wanted.items():
        shape = shapes.get(f"{HEAD}.{half}", ())
        if len(shape) == _MATRIX_RANK and shape[axis] != size:
            expected = f"{size} {'columns' if axis else 'rows'}, the header's {name}"
            found.append(_wrong_shape(f"{where}: {HEAD}.{half}", shape, expected))
    return found


def _wrong_shape(where: str, shape: tuple[int, ...], expected: str) -> DataError:
    return DataError("wrong shape", where=where, found=list(shape), expected=expected)


def _not_whole(path: Path, error: Exception) -> DataError:
    return DataError(
        "not a valid safetensors file",
        where=str(path),
        found=str(error),
        remedy="copy the adapter again, or write it again from a checkpoint of its run",
    )


def _kind_of(dtype: np.dtype[Any]) -> str:
    """Return safetensors' name for float32, and numpy's for any other type."""
    return "F32" if dtype == np.float32 else str(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectrum:
    """The size and the shape of an update.

    Attributes:
        frobenius: root of the sum of squared singular values.
        spectral: the largest singular value.
        effective_rank: exp of the entropy of the singular values divided by their sum (Roy and
            Vetterli, The effective rank, EUSIPCO 2007), from 1 to the rank; None for a zero update.
        stable_rank: ``(frobenius / spectral)²``, from 1 to the rank; None for a zero update.
    """

    frobenius: float
    spectral: float
    effective_rank: float | None
    stable_rank: float | None


def singular_values(
    A_RI: npt.NDArray[np.floating], B_OR: npt.NDArray[np.floating], scale: float
) -> npt.NDArray[np.float64]:
    """Return the singular values of ``scale · B A``, largest first, in f64.

    Their number is the smallest of R, I and O; all other singular values of the product are zero.
    """
    _, upper_B = np.linalg.qr(B_OR.astype(np.float64))
    _, upper_A = np.linalg.qr(np.swapaxes(A_RI, -1, -2).astype(np.float64))
    values = np.linalg.svd(upper_B @ np.swapaxes(upper_A, -1, -2), compute_uv=False)
    return np.asarray(abs(scale) * np.sort(values, axis=None)[::-1], dtype=np.float64)


def spectrum(
    A_RI: npt.NDArray[np.floating], B_OR: npt.NDArray[np.floating], scale: float
) -> Spectrum:
    """Compute the spectrum of ``scale · B A``; the matrices must be finite."""
    values = singular_values(A_RI, B_OR, scale)
    frobenius, spectral = float(np.linalg.norm(values)), float(values[0])
    if spectral == 0:
        return Spectrum(frobenius=0.0, spectral=0.0, effective_rank=None, stable_rank=None)
    shares = values[values > 0] / values.sum()
    shares = shares[shares > 0]  # shares that underflow to zero contribute no entropy
    return Spectrum(
        frobenius=frobenius,
        spectral=spectral,
        effective_rank=float(np.exp(-np.sum(shares * np.log(shares)))),
        stable_rank=(frobenius / spectral) ** 2,
    )
