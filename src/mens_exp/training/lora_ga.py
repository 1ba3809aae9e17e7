"""LoRA-GA (arXiv:2407.05000): adapters start from the gradient of the weights they adapt.

G = U S V is the gradient of a weight W in the run's first optimizer step. A starts as the first r
rows of V, and B as the next r columns of U. The base then holds W - s B A, quantized, so that the
model starts within rounding of W. Factors are those of PEFT 0.21 (its defaults ``ArB2r`` and
``stable``): B is multiplied by S, and by the fourth root of its number of rows over the root of γ.
The authors' own code leaves S out and scales A like B.

PEFT refuses quantized bases. Here, G is the gradient of the dequantized weight, accumulated in f32
from each layer's inputs and output gradients.

Shapes: N positions, I inputs and O outputs of a layer, R rank, K twice the rank.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.lora.method import Pair, leading
from mens_exp.objective.causal import CrossEntropy, Passed
from mens_exp.training.build import objective_of
from mens_exp.training.contract_probe import preserve_state

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.data.stream import MicroBatches

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
        handles.append(layer.register_forward_hook(_watch(sums[logical])))
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


def _watch(total_OI: torch.Tensor) -> Any:
    """Return a forward hook that accumulates the gradient of a layer's weight."""

    def see(_: Any, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        x_NI = inputs[0].detach().flatten(0, -2)

        def add(by_y: torch.Tensor) -> None:
            total_OI.addmm_(by_y.flatten(0, -2).float().T, x_NI.float())

        y.register_hook(add)  # type: ignore[no-untyped-call]

    return see
