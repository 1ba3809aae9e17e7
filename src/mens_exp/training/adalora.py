"""AdaLoRA's allocation of ranks (arXiv:2303.10512), computed by PEFT's own allocator.

After each step, the importance of a value is its sensitivity, ``|w · gradient|``, times the
uncertainty of the sensitivity, both averaged over steps. A triplet is a row of A, a factor and a
column of B. The factors of the least important triplets become zero until the budget is met. The
budget falls over the steps, for all layers together. A gradient also pulls A and B towards
orthogonality; the reported loss is that of the objective alone.

Shapes: R rank, X inputs or outputs of a projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.config.lora import LoraConfig

_PARTS = {"adalora_a": "lora_A", "adalora_e": "lora_E", "adalora_b": "lora_B"}
_NAME = "default"
_AVERAGES = ("exp_avg_ipt", "exp_avg_unc")


class RankAllocation:
    """The importance of an adapter's ranks, and the ranks that are left."""

    def __init__(
        self, lora: LoraConfig, parameters: Mapping[str, torch.nn.Parameter], *, total_steps: int
    ) -> None:
        """Start with all ranks.

        Args:
            lora: the `lora` group.
            parameters: the adapter's, by logical name.
            total_steps: length of the run; it leaves steps in which to allocate ranks.
        """
        from peft import AdaLoraConfig
        from peft.tuners.adalora.layer import RankAllocator

        self.weight = lora.orthogonality
        self.total_steps, self.settle = total_steps, lora.settle_steps
        self.parameters = parameters
        settings = AdaLoraConfig(
            init_r=lora.r,
            target_r=lora.target_r,
            tinit=lora.allocate_after_steps,
            tfinal=lora.settle_steps,
            deltaT=lora.allocate_every_n_steps,
            total_step=total_steps,
        )
        self.allocator = RankAllocator(self, settings, _NAME)
        self.left: dict[str, list[bool]] = {}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters under PEFT's names and in PEFT's shapes, with their gradients."""
        for name, parameter in self.parameters.items():
            layer, _, part = name.rpartition(".")
            seen, gradient = parameter.detach(), parameter.grad
            if part == "adalora_e":
                seen, gradient = seen[:, None], None if gradient is None else gradient[:, None]
            seen.grad = gradient
            yield f"{layer}.{_PARTS[part]}.{_NAME}", seen

    def pull(self) -> None:
        """Add the gradient of the mean distance of ``A Aᵀ`` and ``Bᵀ B`` from the identity."""
        by_rank = {
            name: one.T if name.endswith("adalora_b") else one
            for name, one in self.parameters.items()
            if not name.endswith("adalora_e")
        }
        found = [self.parameters[name] for name in by_rank]
        with torch.enable_grad():
            apart = torch.stack([_distance(one_RX) for one_RX in by_rank.values()]).mean()
            gradients = torch.autograd.grad(self.weight * apart, found)
        for one, gradient in zip(found, gradients, strict=True):
            one.grad = gradient if one.grad is None else one.grad + gradient

    def update(self, step: int) -> None:
        """Set ranks to zero after a step, numbered from 0, as PEFT's `update_and_allocate` does.

        Without steps to settle in, PEFT never comes to its last allocation, and optimizer steps
        revive ranks since the one before. Here it follows the last step.
        """
        self._allocate(step)
        if not self.settle and step == self.total_steps - 1:
            self._allocate(self.total_steps)

    def ranks_left(self) -> int:
        """Return the number of ranks of all layers that are not zero."""
        factors = [one for name, one in self.parameters.items() if name.endswith("adalora_e")]
        return sum(int(one.detach().count_nonzero()) for one in factors)

    def _allocate(self, step: int) -> None:
        last = self.total_steps - self.settle
        if step > last:
            self.allocator.mask_using_rank_pattern(self, self.left)
            return
        _, left = self.allocator.update_and_allocate(self, step, force_mask=step == last)
        self.left = left or self.left
        if step == last:
            self.allocator.reset_ipt()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, and the ranks that are left."""
        averages = {name: dict(getattr(self.allocator, name)) for name in _AVERAGES}
        return {**averages, "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        devices = {name: one.device for name, one in self.named_parameters()}
        for name in _AVERAGES:
            values = {key: value.to(devices[key]) for key, value in state[name].items()}
            setattr(self.allocator, name, values)
        self.allocator.ipt = dict.fromkeys(state[_AVERAGES[0]])  # recomputed at each step
        self.left = state["left"]


def _distance(matrix_RX: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm of ``M Mᵀ − 1``, where M has a row for each rank."""
    identity_RR = torch.eye(len(matrix_RX), device=matrix_RX.device)
    apart: torch.Tensor = torch.linalg.norm(matrix_RX @ matrix_RX.T - identity_RR)
    return apart
