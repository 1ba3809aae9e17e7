"""Singular values of an update ``s · B A``, without the product itself.

``B A`` is ``Q_B (R_B R_Aᵀ) Q_Aᵀ`` with thin QRs of B and of Aᵀ; both Q are orthonormal, so the
singular values are those of the small matrix in the middle.

Where all experts of a layer are one tensor, A is ``[E, R, I]`` and B ``[E, O, R]``. They act apart,
as the blocks of one matrix, and the values of all of them are its values.

Shapes: R rank, I inputs and O outputs of a projection, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Spectrum", "singular_values", "spectrum"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectrum:
    """The size and the shape of an update.

    Attributes:
        frobenius: root of the sum of squared singular values.
        spectral: the largest of them.
        effective_rank: exp of the entropy of the singular values divided by their sum (Roy and
            Vetterli, The effective rank, EUSIPCO 2007), from 1 to the rank; None for nothing.
        stable_rank: ``(frobenius / spectral)²``, from 1 to the rank; None for nothing.
    """

    frobenius: float
    spectral: float
    effective_rank: float | None
    stable_rank: float | None


def singular_values(
    A_RI: npt.NDArray[np.floating], B_OR: npt.NDArray[np.floating], scale: float
) -> npt.NDArray[np.float64]:
    """Return the singular values of ``scale · B A``, largest first, in f64.

    There are as many as the smallest of R, I and O; all others of the product are zero.
    """
    _, upper_B = np.linalg.qr(B_OR.astype(np.float64))
    _, upper_A = np.linalg.qr(np.swapaxes(A_RI, -1, -2).astype(np.float64))
    values = np.linalg.svd(upper_B @ np.swapaxes(upper_A, -1, -2), compute_uv=False)
    return np.asarray(abs(scale) * np.sort(values, axis=None)[::-1], dtype=np.float64)


def spectrum(
    A_RI: npt.NDArray[np.floating], B_OR: npt.NDArray[np.floating], scale: float
) -> Spectrum:
    """Measure ``scale · B A``; the matrices must be finite."""
    values = singular_values(A_RI, B_OR, scale)
    frobenius, spectral = float(np.linalg.norm(values)), float(values[0])
    if spectral == 0:
        return Spectrum(frobenius=0.0, spectral=0.0, effective_rank=None, stable_rank=None)
    shares = values[values > 0] / values.sum()
    shares = shares[shares > 0]  # a share below the smallest number has no entropy
    return Spectrum(
        frobenius=frobenius,
        spectral=spectral,
        effective_rank=float(np.exp(-np.sum(shares * np.log(shares)))),
        stable_rank=(frobenius / spectral) ** 2,
    )
