"""Graphs that start from the published weights as they are, and that PEFT has no form for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["OwnForm"]


class OwnForm:
    """Such a graph's answers to the backend protocol's questions about PEFT and starts."""

    def start_state(self) -> dict[str, torch.Tensor]:
        """Return nothing: a checkpoint depends on the published weights alone."""
        return {}

    def load_start_state(self, taken: dict[str, torch.Tensor]) -> None:
        """Do nothing, as :meth:`start_state` gives nothing."""
        assert not taken, "made by another backend"

    def quantization_errors(self) -> dict[str, tuple[float, float]]:
        """Return nothing: the start does not depend on them."""
        return {}

    @property
    def has_peft_view(self) -> bool:
        """PEFT knows no such graph."""
        return False

    @property
    def peft_view_is_exact(self) -> bool:
        """There is no view that could differ."""
        return True

    @contextmanager
    def as_peft_view(self) -> Iterator[None]:
        """Leave the graph as it is: there is no view."""
        yield
