from __future__ import annotations

import builtins

import numpy as np
import pytest

from mens_exp.corpus.minhash import MOST_MISSED, Bands, Signer, band_keys, bands_for
from mens_exp.errors import MissingExtra


def test_default_bands_are_21_of_6():
    """At 0.8: 0.8**6 = 0.262144, and 0.737856**21 = 0.00169 are missed; 18 of 7 miss 1.4 %."""
    bands = bands_for(0.8, 128)
    assert bands == Bands(bands=21, rows=6)
    assert bands.missed(0.8) == pytest.approx(0.001688, abs=1e-6)
    assert Bands(bands=18, rows=7).missed(0.8) > MOST_MISSED


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_bands_are_the_widest_that_miss_little(threshold):
    """With one more row per band over 0.5 % would be missed, or the bands would not fit."""
    bands = bands_for(threshold, 128)
    assert bands.bands * bands.rows <= 128
    assert bands.missed(threshold) <= MOST_MISSED
    wider = bands.rows + 1
    assert wider > 128 or Bands(bands=128 // wider, rows=wider).missed(threshold) > MOST_MISSED


def test_too_few_permutations_leave_bands_of_one_row():
    """Single rows are then the best choice; with two permutations 0.5**2 is missed."""
    bands = bands_for(0.5, 2)
    assert bands == Bands(bands=2, rows=1)
    assert bands.missed(0.5) == 0.25


def test_signatures_agree_as_often_as_the_sets_do():
    """300 of 500 values shared: 0.6 within four standard errors of 1,024 permutations (0.061)."""
    rng = np.random.default_rng(0)
    values = np.unique(rng.integers(0, 2**32, 500, dtype=np.uint32))
    signer = Signer(1024)
    one, other = signer.sign(values[:400]), signer.sign(values[100:])
    assert (one == other).mean() == pytest.approx(0.6, abs=0.061)
    assert (one == signer.sign(values[:400][::-1])).all()


def test_keys_are_equal_where_bands_are():
    """Signatures that differ at value 4 differ only in band 1; value 9 is in no band."""
    one = np.arange(10, dtype=np.uint32)
    other, third = one.copy(), one.copy()
    other[4], third[9] = 99, 99
    keys = band_keys(np.stack([one, other, third]), Bands(bands=3, rows=3))
    assert keys.shape == (3, 3)
    assert (keys[:, 0] == keys[:, 1]).tolist() == [True, False, True]
    assert (keys[:, 0] == keys[:, 2]).all()


def test_order_within_a_band_counts():
    """A signature is ordered."""
    two = np.array([[1, 2], [2, 1]], np.uint32)
    keys = band_keys(two, Bands(bands=1, rows=2))
    assert keys[0, 0] != keys[0, 1]


def test_missing_library_is_named(monkeypatch):
    """The error names the extra and the alternative without it."""
    real = builtins.__import__

    def without(name, *rest):
        if name == "datasketch":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"mens-exp\[corpus\].*threshold=null"):
        Signer(16)
