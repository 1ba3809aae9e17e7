"""APOLLO (arXiv:2412.05270): the optimizer of the authors' apollo-torch package."""

from __future__ import annotations

from typing import Any

import torch
from apollo_torch import APOLLOAdamW

from mens_exp.training.low_rank import PlainProjections


class ApolloAdamw(PlainProjections, APOLLOAdamW):  # type: ignore[misc]  # an untyped package's
    """The package's optimizer, seeded by the run, whose state a checkpoint can hold.

    The package draws a weight's projections from a separate generator, seeded with the weight's
    index.
    """

    kept = ("ortho_matrix", "seed", "svd_count")

    def __init__(self, params: Any, *, seed: int, **settings: Any) -> None:
        """Give each parameter a seed drawn from the run's in place of its index.

        Args:
            params: groups; that of the projected weights has `rank`.
            seed: the run's.
            settings: other arguments of `apollo_torch.APOLLOAdamW`.
        """
        super().__init__(params, **settings)
        generator = torch.Generator().manual_seed(seed)
        for group in self.param_groups:
            if "rank" in group:
                group["proj_type"] = "std"
            seeds = torch.randint(2**32, (len(group["params"]),), generator=generator).tolist()
            for parameter, drawn in zip(group["params"], seeds, strict=True):
                self.state[parameter]["seed"] = drawn

    def new_projector(self, group: dict[str, Any], state: dict[str, Any]) -> Any:
        """Build the package's object for a weight, as its own step does.

        Args:
            group: the weight's group.
            state: the weight's state, with its seed.
        """
        return self._initialize_projector(group, state)
