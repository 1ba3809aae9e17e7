"""EVA (arXiv:2410.07170): adapters start from the principal directions of their layers' inputs.

A starts as the leading right singular vectors of a layer's centred inputs at the supervised tokens
of the run's own micro-batches. PEFT's incremental PCA updates them one micro-batch at a time, until
all directions have converged. B is zero, so the model still equals its base.

PEFT can also move ranks from layer to layer (`rho` above 1). Here each layer keeps the rank of the
plan, as with ``rho=1``; the other settings have PEFT's defaults.

Shapes: N supervised positions, I inputs of a layer, R rank.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import TrainingError
from mens_exp.training.contract_probe import preserve_state

if TYPE_CHECKING:
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
    taken = _passes(backend, stream, {readers[reads][0]: one for reads, one in found.items()})
    with torch.no_grad():
        for reads, layers in readers.items():
            for logical in layers:
                A_RI = backend.method.parameters(backend.layers[logical])["lora_a"]
                directions_RI = found[reads].found
                assert directions_RI is not None, "they stay"
                A_RI.copy_(directions_RI[: len(A_RI)])
    return {"init_micro_batches": taken, "init_s": round(time.perf_counter() - began, 1)}


def _passes(backend: Any, stream: MicroBatches, found: dict[str, _Directions]) -> int:
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
                backend.layers[logical].register_forward_pre_hook(_watch(one, places_N))
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


def _watch(directions: _Directions, places_N: torch.Tensor) -> Any:
    def see(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x_NI = inputs[0].flatten(0, -2).index_select(0, places_N)
        directions.update(x_NI)

    return see
