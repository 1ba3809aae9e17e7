"""Initializations of LoRA from the run's own micro-batches: EVA and LoRA-GA.

EVA (arXiv:2410.07170): A starts as the leading right singular vectors of a layer's centred inputs
at the supervised tokens. PEFT's incremental PCA updates them one micro-batch at a time, until all
directions have converged. B is zero, so the model still equals its base. PEFT can also move ranks
from layer to layer (`rho` above 1). Here each layer keeps the rank of the plan, as with ``rho=1``;
the other settings have PEFT's defaults.

LoRA-GA (arXiv:2407.05000): G = U S V is the gradient of a weight W in the run's first optimizer
step. A starts as the first r rows of V, and B as the next r columns of U. The base then holds
W - s B A, quantized, so that the model starts within rounding of W. Factors are those of PEFT 0.21
(its defaults ``ArB2r`` and ``stable``): B is multiplied by S, and by the fourth root of its number
of rows over the root of γ. The authors' own code leaves S out and scales A like B. PEFT refuses
quantized bases. Here, G is the gradient of the dequantized weight, accumulated in f32 from each
layer's inputs and output gradients.

Shapes: N positions (for EVA, supervised ones), I inputs and O outputs of a layer, R rank, K twice
the rank.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import TrainingError
from mens_exp.lora.method import Pair, leading
from mens_exp.objective.causal import CrossEntropy, Passed
from mens_exp.training.build import objective_of
from mens_exp.training.contract_probe import preserve_state

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.data.stream import MicroBatches

_STAYS = 0.99  # cosine of two updates of a direction: PEFT's `tau`
_SEED = 42  # of the decomposition's sketch, as in PEFT
_MOST = 1000  # micro-batches; PEFT has no limit. Unverified guess.


class _Directions:
    """The principal directions of the inputs of one layer."""

    def __init__(self, r: int) -> None:
        from peft.utils.incremental_pca import IncrementalPCA

        self.r, self.stay = r, False
        self.pca = IncrementalPCA(n_components=r, copy=True, lowrank=True, lowrank_seed=_SEED)

    @property
    def found(self) -> torch.Tensor | None:
        """The directions; None before the first update."""
        return getattr(self.pca, "components_", None)

    def update(self, x_NI: torch.Tensor) -> None:
        """Update with inputs; too few for the decomposition's sketch are skipped."""
        if self.stay or len(x_NI) < 2 * self.r:
            return
        before_RI = self.found
        self.pca.partial_fit(x_NI.float())
        if before_RI is not None:
            turns_R = torch.cosine_similarity(self.pca.components_, before_RI)
            self.stay = bool((turns_R >= _STAYS).all())


def start_from_inputs(backend: Any, stream: MicroBatches) -> dict[str, Any]:
    """Set A of every adapted layer, in place.

    Args:
        backend: a backend whose adapter is LoRA's.
        stream: the training micro-batches, from the first one on, repeated if necessary.

    Returns:
        Facts for the record.

    Raises:
        TrainingError: the directions of a layer do not converge.
    """
    began = time.perf_counter()
    together = backend.shape.family.verified  # else layers with one `reads` may differ in inputs
    readers: dict[str, list[str]] = {}
    for one in backend.modules_chosen:
        readers.setdefault(one.reads if together else one.path, []).append(one.logical)
    ranks = {
        logical: backend.method.parameters(layer)["lora_a"].shape[0]
        for logical, layer in backend.layers.items()
    }
    found = {reads: _Directions(max(ranks[one] for one in of)) for reads, of in readers.items()}
    taken = _find_directions(
        backend, stream, {readers[reads][0]: one for reads, one in found.items()}
    )
    with torch.no_grad():
        for reads, layers in readers.items():
            for logical in layers:
                A_RI = backend.method.parameters(backend.layers[logical])["lora_a"]
                directions_RI = found[reads].found
                assert directions_RI is not None, "they stay"
                A_RI.copy_(directions_RI[: len(A_RI)])
    return {"init_micro_batches": taken, "init_s": round(time.perf_counter() - began, 1)}


def _find_directions(backend: Any, stream: MicroBatches, found: dict[str, _Directions]) -> int:
    """Pass micro-batches through the base until all directions converge; return their number."""
    device = next(backend.parameters()).device
    with preserve_state(backend), torch.no_grad(), backend.base_only():
        backend.eval()
        for number in range(_MOST):
            left = {logical: one for logical, one in found.items() if not one.stay}
            if not left:
                return number
            batch = stream.batch(number % stream.total).to(device)
            places_N = batch.target_places  # the supervised tokens themselves, as in PEFT
            handles = [
                backend.layers[logical].register_forward_pre_hook(_watch_inputs(one, places_N))
                for logical, one in left.items()
            ]
            try:
                backend(batch)
            finally:
                for handle in handles:
                    handle.remove()
    raise TrainingError(
        "the principal directions of a layer's inputs do not converge",
        where="lora.init",
        found=f"{', '.join(sorted(left)[:4])} after {_MOST} micro-batches",
        expected="stable directions, from micro-batches of twice lora.r supervised tokens",
        remedy="set lora.init=default, a lower lora.r, or a larger data.micro_batch_size",
    )


def _watch_inputs(directions: _Directions, places_N: torch.Tensor) -> Any:
    def see(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x_NI = inputs[0].flatten(0, -2).index_select(0, places_N)
        directions.update(x_NI)

    return see


_GAMMA = 16  # PEFT's `stable_gamma`, and the paper's in most of its experiments


def start_from_gradients(config: RunConfig, backend: Any, stream: MicroBatches) -> dict[str, Any]:
    """Set A and B of every adapted layer, and subtract their product from the base, in place.

    Args:
        config: the whole configuration.
        backend: a backend whose adapter is LoRA's, with B zero.
        stream: the training micro-batches.

    Returns:
        Facts for the record.
    """
    began = time.perf_counter()
    many = config.trainer.accumulate_grad_batches
    for logical, gradient_OI in _gradients(config, backend, stream, many).items():
        r = backend.method.parameters(backend.layers[logical])["lora_a"].shape[0]
        backend.start_from(logical, pair_of(gradient_OI, r=r, layer=logical))
    backend.start_s += time.perf_counter() - began
    return {"init_micro_batches": many}


def pair_of(gradient_OI: torch.Tensor, *, r: int, layer: str) -> Pair:
    """Return A and B, f32.

    Args:
        gradient_OI: gradient of the mean loss with respect to a weight.
        r: rank, at most half of O and of I.
        layer: logical name, which seeds the decomposition's sketch.
    """
    left_OK, spectrum_K, right_KI = leading(gradient_OI, r=2 * r, layer=layer)
    factor = len(gradient_OI) ** 0.25 / _GAMMA**0.5
    return right_KI[:r].contiguous(), left_OK[:, r:] * spectrum_K[r:] * factor


def _gradients(
    config: RunConfig, backend: Any, stream: MicroBatches, many: int
) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean loss of ``many`` micro-batches for each adapted weight."""
    objective = objective_of(config)
    assert isinstance(objective, CrossEntropy), "others are refused"
    device = next(backend.parameters()).device
    sums, handles = {}, []
    for logical, layer in backend.layers.items():
        tensors = backend.method.parameters(layer)
        size = (len(tensors["lora_b"]), tensors["lora_a"].shape[1])
        sums[logical] = torch.zeros(size, device=device)
        handles.append(layer.register_forward_hook(_watch_gradient(sums[logical])))
    count = 0.0
    try:
        with preserve_state(backend):
            backend.train()
            for number in range(many):
                batch = stream.batch(number % stream.total).to(device)
                backend.begin(batch.index)
                loss = objective.loss(Passed(batch, backend(batch), backend.head))
                loss.total.backward()  # type: ignore[no-untyped-call]
                count += loss.count
    finally:
        for handle in handles:
            handle.remove()
    return {logical: total_OI.div_(count) for logical, total_OI in sums.items()}


def _watch_gradient(total_OI: torch.Tensor) -> Any:
    """Return a forward hook that accumulates the gradient of a layer's weight."""

    def see(_: Any, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        x_NI = inputs[0].detach().flatten(0, -2)

        def add(by_y: torch.Tensor) -> None:
            total_OI.addmm_(by_y.flatten(0, -2).float().T, x_NI.float())

        y.register_hook(add)  # type: ignore[no-untyped-call]

    return see
