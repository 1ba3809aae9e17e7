"""State of optimizers that project gradients, in a form that a checkpoint can hold.

The packages keep an object for each projected weight. A checkpoint is read without executing any
code in it, so it holds the object's tensors and numbers instead.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer

_OBJECT = "projector"  # its key in the state of a weight, in both packages


class PlainProjections(Optimizer):
    """Mixin of a package's optimizer that saves and loads its projections as plain values."""

    kept: ClassVar[tuple[str, ...]]  # attributes in which a used projector differs from a new one

    def new_projector(self, group: dict[str, Any], state: dict[str, Any]) -> Any:
        """Build the package's object for a weight, as its own step would.

        Args:
            group: the weight's group.
            state: the weight's state.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the package's state, with objects replaced by their values."""
        found = super().state_dict()
        return {**found, "state": {key: self._plain(one) for key, one in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state onto the weights' devices, and rebuild the objects.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for state in (self.state[one] for one in group["params"] if one in self.state):
                keys = [name for name in self.kept if f"{_OBJECT}.{name}" in state]
                if not keys:
                    continue
                projector = self.new_projector(group, state)
                for name in keys:
                    setattr(projector, name, state.pop(f"{_OBJECT}.{name}"))
                state[_OBJECT] = projector

    def _plain(self, state: dict[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in state.items() if name != _OBJECT}
        if _OBJECT in state:
            held = vars(state[_OBJECT])
            values |= {f"{_OBJECT}.{name}": held[name] for name in self.kept if name in held}
        return values
