"""The merged weight of an adapter: ``W' = W + s · B A``, in f32, a block of rows at a time.

``s`` is ``alpha / max(r, 1)``, in rsLoRA ``alpha / sqrt(r)``. DoRA (arXiv:2402.09353) then gives
each row a length of its own: ``W'' = m · W' / |W'|``.

Where a checkpoint has all experts of a layer in one tensor ``[E, O, I]``, so have A and B, and its
rows are whole experts.

Shapes: R rank, I inputs and O outputs of a projection, N rows of a piece, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mens_exp.lora.from_weights import delta, unstacked

if TYPE_CHECKING:
    from mens_exp.lora.from_weights import Pair

__all__ = ["Delta"]

_MATRIX = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """The delta that an adapter adds to one weight.

    Attributes:
        A_RI: f32.
        B_OR: f32.
        scale: the factor before ``B A``.
        magnitude_O: lengths of the rows in DoRA, f32.
        taken: the pair that its start took out of the weight before that was quantized.
    """

    A_RI: torch.Tensor
    B_OR: torch.Tensor
    scale: float
    magnitude_O: torch.Tensor | None = None
    taken: Pair | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs of the projection; the experts before them."""
        return (*self.B_OR.shape[:-1], self.A_RI.shape[-1])

    def as_trained(self) -> Delta:
        """Take a doubled pair apart: what was trained, and what was taken out of the base."""
        (A_RI, B_OR), taken = unstacked((self.A_RI, self.B_OR))
        return Delta(
            A_RI=A_RI, B_OR=B_OR, scale=self.scale, magnitude_O=self.magnitude_O, taken=taken
        )

    def left_of(self, weight_NI: torch.Tensor, first: int) -> torch.Tensor:
        """Return what the start of the adapter left of rows of the weight, f32."""
        if self.taken is None:
            return weight_NI
        A_RI, B_OR = self.taken
        rows = slice(first, first + len(weight_NI))
        return weight_NI - delta((A_RI, B_OR[rows]), self.scale)

    def onto(self, weight_NI: torch.Tensor, first: int) -> torch.Tensor:
        """Merge into rows of the weight that begin with row ``first``; f32, overwritten."""
        rows = slice(first, first + len(weight_NI))
        # Not in one call: the scaled product is rounded before it is added, as in the seeds' merge.
        A_RI = self.A_RI[rows] if self.A_RI.dim() > _MATRIX else self.A_RI
        weight_NI += (self.B_OR[rows] @ A_RI).mul_(self.scale)
        if self.magnitude_O is not None:
            lengths_N = torch.linalg.vector_norm(weight_NI, dim=1)
            weight_NI *= (self.magnitude_O[rows] / lengths_N).unsqueeze(1)
        return weight_NI
