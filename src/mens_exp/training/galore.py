"""GaLore (arXiv:2403.03507): the optimizer of the pytorch-optimizer package."""

from __future__ import annotations

from typing import Any

from pytorch_optimizer.optimizer.galore import GaLore
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

from mens_exp.training.low_rank import PlainProjections


class GaloreAdamw(PlainProjections, GaLore):  # type: ignore[misc]  # an untyped package's
    """The package's optimizer, whose state a checkpoint can hold."""

    kept = ("ortho_matrix", "last_svd_step")

    def new_projector(self, group: dict[str, Any], state: dict[str, Any]) -> GaLoreProjector:
        """Build the package's object for a weight, as its own step does.

        Args:
            group: the weight's group.
            state: the weight's state; unused.
        """
        del state
        names = ("rank", "update_proj_gap", "scale", "projection_type")
        return GaLoreProjector(**{name: group[name] for name in names})
