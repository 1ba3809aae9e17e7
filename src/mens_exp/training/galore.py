"""GaLore (arXiv:2403.03507): the optimizer of the pytorch-optimizer package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytorch_optimizer.optimizer.galore import GaLore
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

from mens_exp.training.low_rank import PlainProjections

if TYPE_CHECKING:
    import torch


class _Projector(GaLoreProjector):  # type: ignore[misc]  # an untyped package's
    """The package's projector, which decomposes at steps 0, gap, 2 · gap …, as the paper does.

    The package numbers steps from 1, and would decompose at steps 0, gap - 1, 2 · gap - 1 ….
    """

    def project(self, grad: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Return the projected gradient of a step.

        Args:
            grad: gradient of the weight.
            num_steps: number of the step, from 1.
        """
        projected: torch.Tensor = super().project(grad, num_steps - 1)
        return projected


class GaloreAdamw(PlainProjections, GaLore):  # type: ignore[misc]  # an untyped package's
    """The package's optimizer, whose state a checkpoint can hold, with the paper's schedule."""

    kept = ("ortho_matrix", "last_svd_step")

    def init_group(self, group: dict[str, Any], **kwargs: Any) -> None:
        """Give weights their projectors, before the package's step would.

        Args:
            group: the group of the step.
            kwargs: the package's own.
        """
        super().init_group(group, **kwargs)
        for one in group["params"] if "rank" in group else ():
            if one.grad is not None and one.dim() == 2:  # noqa: PLR2004  # a matrix
                state = self.state[one]
                if "projector" not in state:
                    state["projector"] = self.new_projector(group, state)

    def new_projector(self, group: dict[str, Any], state: dict[str, Any]) -> GaLoreProjector:
        """Build the object for a weight.

        Args:
            group: the weight's group.
            state: the weight's state; unused.
        """
        del state
        names = ("rank", "update_proj_gap", "scale", "projection_type")
        return _Projector(**{name: group[name] for name in names})
