"""Adapter methods: what each does to a model and to a weight; low-rank updates and their starts.

:mod:`mens_exp.config.lora` has the facts of a method that need no torch, and names its object. LoRA
and its variants are in :mod:`mens_exp.backends.lora`.

PiSSA (arXiv:2404.02948) subtracts a low-rank part ``s · B0 A0`` from a weight before quantization,
and starts the adapter from it. LoftQ (arXiv:2310.08659) starts from the quantization error. They
are implemented here because PEFT rejects PiSSA on 4-bit weights and supports LoftQ only on CUDA.

The merged weight is ``W' = W + s · B A``, computed in f32, a block of rows at a time. ``s`` is
``alpha / max(r, 1)``, or ``alpha / sqrt(r)`` for rsLoRA. DoRA (arXiv:2402.09353) then scales each
row to a trained length: ``W'' = m · W' / |W'|``. If a checkpoint stores all experts of a layer in
one tensor ``[E, O, I]``, A and B are stored likewise, and a row is a whole expert.

Shapes: R rank, I inputs and O outputs of a projection, Q width of the sketch, N rows of a piece,
E experts.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.config.plugins import named_object
from mens_exp.lora.keyed import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.lora_spec import AdapterSpec, InitSpec
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.modules import LinearModule
    from mens_exp.lora.linear import Weights

# measured: SmolLM2-135M, r 16, for weights and for quantization errors: the remaining error is
# within 1.3e-4 of the exact decomposition's, in a fifth of the time at width 576, less if wider
_ROUNDS = 8
_OVERSAMPLE = 32  # beyond twice the rank

Pair = tuple[torch.Tensor, torch.Tensor]  # A [R, I] and B [O, R]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Start:
    """Initial values of one layer.

    Attributes:
        pair: A and B of the adapter, f32.
        taken: A and B that were subtracted from the weight before quantization; None if the
            base is quantized unchanged.
    """

    pair: Pair
    taken: Pair | None


def delta(pair: Pair, scale: float) -> torch.Tensor:
    """Return ``scale · B A``, f32 ``[O, I]``, rounded from an f64 product.

    f64 gives the same result on machines whose f32 products differ in the last bit.
    """
    A_RI, B_OR = pair
    return (B_OR.double() @ A_RI.double() * scale).float()


def stacked(pair: Pair, taken: Pair) -> Pair:
    """Return one pair of twice the rank whose product is ``B A − B0 A0``.

    It is the change made by training, relative to the published base model.
    """
    (A_RI, B_OR), (A0_RI, B0_OR) = pair, taken
    return torch.cat([A_RI, A0_RI]), torch.cat([B_OR, -B0_OR], dim=1)


def unstacked(pair: Pair) -> tuple[Pair, Pair]:
    """Undo :func:`stacked`: return the trained pair, and the subtracted one."""
    A_RI, B_OR = pair
    r = A_RI.shape[0] // 2
    return (A_RI[:r], B_OR[:, :r]), (A_RI[r:], -B_OR[:, r:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A weight that gets an adapter.

    Attributes:
        weight_OI: the unquantized weight, f32.
        rounded: quantizes values and returns them dequantized.
        r: rank of the adapter.
        scale: scale of the adapter, ``alpha / r`` in plain LoRA.
        layer: logical name, which seeds the sketch.
    """

    weight_OI: torch.Tensor
    rounded: Callable[[torch.Tensor], torch.Tensor]
    r: int
    scale: float
    layer: str


class Initialization:
    """A rule for a layer's initial values, computed from the weight that it adapts."""

    def start(self, site: Site, lora: LoraConfig) -> Start:
        """Return the initial values."""
        raise NotImplementedError


class _Pissa(Initialization):
    """The top singular directions; the base quantizes the residual."""

    def start(self, site: Site, lora: LoraConfig) -> Start:
        """Decompose the weight."""
        del lora
        pair = low_rank(site.weight_OI, r=site.r, scale=site.scale, layer=site.layer)
        return Start(pair=pair, taken=pair)


class _Loftq(Initialization):
    """The best low-rank part of the quantization error.

    Each round quantizes the weight minus the previous pair and decomposes the remaining error. The
    first round quantizes the weight itself.
    """

    def start(self, site: Site, lora: LoraConfig) -> Start:
        """Decompose the error of each round."""
        weight_OI, taken = site.weight_OI, None
        pair = self._pair(site, weight_OI - site.rounded(weight_OI))
        for _ in range(lora.loftq_iters - 1):
            taken = pair
            left_OI = weight_OI - delta(taken, site.scale)
            pair = self._pair(site, weight_OI - site.rounded(left_OI))
        return Start(pair=pair, taken=taken)

    def _pair(self, site: Site, missed_OI: torch.Tensor) -> Pair:
        return low_rank(missed_OI, r=site.r, scale=site.scale, layer=site.layer)


PISSA = _Pissa()
LOFTQ = _Loftq()


def low_rank(values_OI: torch.Tensor, *, r: int, scale: float, layer: str) -> Pair:
    """Return the best ``scale · B A`` for a matrix, with singular values split evenly.

    Uses subspace iteration from a sketch seeded by the layer's name alone (Halko, Martinsson and
    Tropp, arXiv:0909.4061, algorithm 4.4): equal inputs give equal bits on one machine, and no
    global generator is used. Exact if the sketch is as wide as the matrix.
    """
    left_OR, spectrum_R, right_RI = leading(values_OI, r=r, layer=layer)
    root_R = (spectrum_R / scale).sqrt()
    return _padded(root_R[:, None] * right_RI, left_OR * root_R, r)


def leading(
    values_OI: torch.Tensor, *, r: int, layer: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first r left singular vectors, singular values and right singular vectors.

    They are fewer if the matrix has fewer; see :func:`low_rank`.
    """
    size = min(2 * r + _OVERSAMPLE, *values_OI.shape)
    generator = torch.Generator().manual_seed(key_of("sketch", layer))
    sketch_IQ = torch.randn((values_OI.shape[1], size), generator=generator)
    basis_OQ = torch.linalg.qr(values_OI @ sketch_IQ.to(values_OI.device)).Q
    for _ in range(_ROUNDS):
        basis_IQ = torch.linalg.qr(values_OI.T @ basis_OQ).Q
        basis_OQ = torch.linalg.qr(values_OI @ basis_IQ).Q
    left, spectrum, right = torch.linalg.svd(basis_OQ.T @ values_OI, full_matrices=False)
    return basis_OQ @ left[:, :r], spectrum[:r], right[:r]


def _padded(A_RI: torch.Tensor, B_OR: torch.Tensor, r: int) -> Pair:
    """Zero-pad a pair to its rank if the matrix has a lower one."""
    missing = r - A_RI.shape[0]
    if missing <= 0:
        return A_RI.contiguous(), B_OR.contiguous()
    return (
        torch.cat([A_RI, A_RI.new_zeros(missing, A_RI.shape[1])]),
        torch.cat([B_OR, B_OR.new_zeros(B_OR.shape[0], missing)], dim=1),
    )


_MATRIX = 2


class Change:
    """The change that an adapter makes to one weight.

    Attributes:
        by_rows: whether rows of the merged weight depend only on the same rows of the weight.
    """

    __slots__ = ()
    by_rows: bool = True

    def left_of(self, weight_NI: torch.Tensor, first: int) -> torch.Tensor:
        """Return the values that the base quantizes for rows from ``first`` on, f32."""
        del first
        return weight_NI

    def onto(self, weight_NI: torch.Tensor, first: int) -> torch.Tensor:
        """Merge into rows of the weight from ``first`` on, f32; may work in place."""
        raise NotImplementedError

    def quantized(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the values that the base quantizes by definition, f64; see `expected`."""
        return weight_OI

    def expected(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the merged weight by definition, f64; certificates compare with it."""
        raise NotImplementedError

    def as_trained(self) -> Change:
        """Return the change relative to the trained base, if its start subtracted from it."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta(Change):
    """The delta that a LoRA adapter adds to one weight.

    Attributes:
        A_RI: f32.
        B_OR: f32.
        scale: the factor applied to ``B A``.
        magnitude_O: row lengths in DoRA, f32.
        taken: the pair that initialization subtracted from the weight before quantization.
    """

    A_RI: torch.Tensor
    B_OR: torch.Tensor
    scale: float
    magnitude_O: torch.Tensor | None = None
    taken: Pair | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs of the projection, preceded by the experts if any."""
        return (*self.B_OR.shape[:-1], self.A_RI.shape[-1])

    def as_trained(self) -> Delta:
        """Split a doubled pair into the trained pair and the one subtracted from the base."""
        (A_RI, B_OR), taken = unstacked((self.A_RI, self.B_OR))
        return Delta(
            A_RI=A_RI, B_OR=B_OR, scale=self.scale, magnitude_O=self.magnitude_O, taken=taken
        )

    def left_of(self, weight_NI: torch.Tensor, first: int) -> torch.Tensor:
        """Return the residual of rows of the weight after initialization, f32."""
        if self.taken is None:
            return weight_NI
        A_RI, B_OR = self.taken
        rows = slice(first, first + len(weight_NI))
        return weight_NI - delta((A_RI, B_OR[rows]), self.scale)

    def onto(self, weight_NI: torch.Tensor, first: int) -> torch.Tensor:
        """Merge into the rows of the weight from ``first`` on; f32, in place."""
        rows = slice(first, first + len(weight_NI))
        # Not in one call: the scaled product is rounded before it is added, as in the seeds' merge.
        A_RI = self.A_RI[rows] if self.A_RI.dim() > _MATRIX else self.A_RI
        weight_NI += (self.B_OR[rows] @ A_RI).mul_(self.scale)
        if self.magnitude_O is not None:
            lengths_N = torch.linalg.vector_norm(weight_NI, dim=1)
            weight_NI *= (self.magnitude_O[rows] / lengths_N).unsqueeze(1)
        return weight_NI

    def quantized(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return ``W - s · B0 A0``, f64."""
        if self.taken is None:
            return weight_OI
        A_RI, B_OR = self.taken
        return weight_OI - self.scale * (B_OR.double() @ A_RI.double())

    def expected(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return ``W + s · B A``, f64; DoRA then rescales its rows (arXiv:2402.09353, eq. 5)."""
        sum_OI = weight_OI + self.scale * (self.B_OR.double() @ self.A_RI.double())
        if self.magnitude_O is None:
            return sum_OI
        length_O: torch.Tensor = self.magnitude_O.double() / sum_OI.norm(dim=1)
        return sum_OI * length_O[:, None]


class AdaptedLayer(torch.nn.Module):
    """A linear layer with trained parameters around it: the layer of a method without PEFT."""

    def __init__(self, base: torch.nn.Module) -> None:
        """Wrap ``base``; parameters are added by the method's own class."""
        super().__init__()
        self.base_layer = base
        self.adapts = True

    def get_base_layer(self) -> torch.nn.Module:
        """Return the wrapped layer."""
        return self.base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, adapted unless the adapter is off, in the layer's dtype."""
        plain: torch.Tensor = self.base_layer(x)
        return self.adapted(x, plain).to(plain.dtype) if self.adapts else plain

    def adapted(self, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Return the adapted output.

        Args:
            x: the layer's input.
            plain: the layer's output without the adapter.
        """
        raise NotImplementedError


class AdapterMethod:
    """The layers of one adapter method: how they are placed, started, saved and merged.

    The defaults are those of a method whose layers are :class:`AdaptedLayer`.
    """

    def sharing(self, projections: Mapping[str, Any]) -> AdapterMethod:
        """Return the method with the random matrices that all layers of one adapter share.

        Args:
            projections: their description in the run's settings or in a record; empty if layers
                share none.

        Raises:
            DataError: the matrices cannot be reproduced.
        """
        del projections
        return self

    def shared(self) -> dict[str, Any]:
        """Return the description of the shared matrices, for the adapter's record."""
        return {}

    # ---- graph

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the adapted layer around a linear layer.

        Args:
            base: the layer.
            one: its description.
            lora: the `lora` group.
        """
        raise NotImplementedError

    def place(
        self, model: Any, lora: LoraConfig, modules: Sequence[LinearModule], family: Family
    ) -> tuple[Any, dict[str, Any]]:
        """Adapt modules of a model in place.

        Args:
            model: the base model, on its device, every parameter frozen.
            lora: the `lora` group.
            modules: the modules to adapt, which the model has.
            family: the model's family.

        Returns:
            The model to run, and its adapted layers by logical name.
        """
        del family
        layers = {}
        for one in modules:
            layers[one.logical] = self.layer(model.get_submodule(one.path), one, lora)
            model.set_submodule(one.path, layers[one.logical])
        return model, layers

    def base_model(self, model: Any) -> Any:
        """Return the transformers model inside the model to run."""
        return model

    def parameters(self, layer: Any) -> dict[str, torch.nn.Parameter]:
        """Return a layer's trained parameters, f32, by the last part of their names in records."""
        return dict(layer.named_parameters(recurse=False))

    @contextmanager
    def disabled(self, model: Any, layers: Collection[Any]) -> Iterator[None]:
        """Disable the adapter inside the block."""
        del model
        for layer in layers:
            layer.adapts = False
        try:
            yield
        finally:
            for layer in layers:
                layer.adapts = True

    def virtual_ids(self, layers: Collection[Any]) -> list[int]:
        """Return the ids of the virtual tokens before each document; empty if there are none.

        Args:
            layers: the adapted layers; a disabled adapter has no virtual tokens.
        """
        del layers
        return []

    def dropouts(self, config: RunConfig, layers: Sequence[tuple[LinearModule, Any]]) -> list[Any]:
        """Return the dropout streams; ``begin()`` is called on each at every micro-batch.

        Args:
            config: the whole configuration.
            layers: the adapted layers, each with the module that it adapts.
        """
        del config, layers
        return []

    def take_over(
        self, layers: Sequence[tuple[LinearModule, Any]], weights: Weights, *, together: bool
    ) -> list[Any]:
        """Replace the training forward of layers with a faster one, if there is one.

        Args:
            layers: the adapted layers, each with the module that it adapts.
            weights: the weights of the wrapped layers.
            together: whether modules with the same ``reads`` are known to be called with one
                tensor.

        Returns:
            Objects that keep tensors; ``forget()`` is called on each at every micro-batch.
        """
        del layers, weights, together
        return []

    def accumulate_in_f32(self, layers: Collection[Any], *, learns: bool) -> None:
        """Prepare layers for a pass under autocast (``learns``), or for one in their own dtype."""

    # ---- start

    def draw(self, layer: Any, *, seed: int, logical: str) -> None:
        """Set a layer's initial values in place, so that the model equals its base."""
        del layer, seed, logical

    def set_start(self, layer: Any, start: Start) -> None:
        """Set the values that an initialization computed from the base's weight, in place."""
        raise NotImplementedError

    def scale(self, layer: Any) -> float:
        """Return the factor applied to a layer's ``B A``; 1 for a method without one."""
        del layer
        return 1.0

    # ---- saved forms

    def write_peft(self, model: Any, directory: Path, *, base: str, revision: str | None) -> None:
        """Write the files of a PEFT directory.

        Args:
            model: the model to run, in its saved form.
            directory: an empty directory.
            base: name of the base model.
            revision: its commit on the hub, if it is from there.
        """
        raise NotImplementedError

    @contextmanager
    def saved_form(
        self, model: Any, lora: LoraConfig, layers: Mapping[str, Any], taken: Tensors
    ) -> Iterator[None]:
        """Give the model the parameters of its saved form inside the block.

        Args:
            model: the model to run.
            lora: the `lora` group.
            layers: its adapted layers by logical name.
            taken: the pairs that a start subtracted from the base; empty if none.
        """
        del model, lora, layers, taken
        yield

    # ---- merge

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Merge a layer's tensors into a weight, by definition.

        The result is differentiable and has the dtype of the arguments.

        Args:
            weight_OI: the weight, dense.
            tensors: the layer's tensors by the last part of their names.
            scale: see :meth:`scale`.
        """
        raise NotImplementedError

    def expert_weights(
        self, weight_EOI: torch.Tensor, tensors: Tensors, *, scale: float
    ) -> torch.Tensor:
        """Merge the tensors of a layer's experts into their stacked weights."""
        raise NotImplementedError

    def change(self, tensors: Tensors, *, scale: float) -> Change:
        """Return the change that a layer's recorded tensors make to its weight."""
        return ByDefinition(self, tensors, scale)


class ByDefinition(Change):
    """The change of a method that merges whole weights."""

    by_rows = False

    def __init__(self, method: AdapterMethod, tensors: Tensors, scale: float) -> None:
        """Store a layer's tensors and their scale; see :meth:`AdapterMethod.weight`."""
        self.method, self.tensors, self.scale = method, tensors, scale

    def onto(self, weight_NI: torch.Tensor, first: int) -> torch.Tensor:
        """Merge into the whole weight, f32."""
        assert first == 0, "the whole weight is merged at once"
        return self.method.weight(weight_NI, self.tensors, scale=self.scale)

    def expected(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the merged weight, computed in f64."""
        tensors = {name: values.double() for name, values in self.tensors.items()}
        return self.method.weight(weight_OI, tensors, scale=self.scale)


def method_of(spec: AdapterSpec) -> AdapterMethod:
    """Return the object that an adapter method names.

    Raises:
        SetupError: it cannot be imported, or is not an adapter method.
    """
    return named_object(spec.method, AdapterMethod, of=f"the adapter method {spec.name}")


def initialization_of(spec: InitSpec) -> Initialization:
    """Return the object that an initialization from the base's weights names."""
    assert spec.start is not None, "the caller has asked"
    return named_object(spec.start, Initialization, of=f"the initialization {spec.name}")
