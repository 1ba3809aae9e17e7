"""The counter-based hash of dropout masks, compared with lowbias32 in uint32 numbers of numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mens_exp.lora.keyed import LOWBIAS32, SFC64, KeyedDropout, Mask, hashed, key_of

CPU = torch.device("cpu")
KEYS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 0xFEED_5EED_DEAD_BEEF >> 1]
COUNT = 1 << 18
SIGMAS = 5  # some hundred figures are tested, of which one in two million is beyond


def lowbias32(x):
    """Hash uint32 numbers as published (nullprogram.com, "Prospecting for Hash Functions")."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def by_definition(count, key):
    """Return the upper 15 bits of the hash of each counter, in two rounds with half a key each."""
    low, high = np.uint32(key % 2**32), np.uint32(key // 2**32)
    return lowbias32(lowbias32(np.arange(count, dtype=np.uint32) ^ low) + high) >> np.uint32(17)


def test_two_keys_have_no_common_set_of_numbers():
    """With one round of the hash, a mask would be another one in a different order."""
    one, other = (draws(key_of("layer", micro_batch)) for micro_batch in (0, 1))
    assert not np.array_equal(np.sort(one), np.sort(other))


def draws(key, count=COUNT):
    return hashed(count, key, CPU).numpy()


def scores(kept):
    """Return kept elements as numbers of mean zero and variance one."""
    values = kept.astype(np.float64)
    return (values - values.mean()) / values.std()


def test_lowbias32_has_its_known_values():
    """Computed by hand in Python's integers, which do not wrap."""

    def plain(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    numbers = [0, 1, 2, 0xFFFF, 0x8000_0000, 0xFFFF_FFFF]
    assert lowbias32(np.array(numbers, np.uint32)).tolist() == [plain(one) for one in numbers]


@pytest.mark.parametrize("key", KEYS)
def test_numbers_are_those_of_the_definition(key):
    """Signed products wrap, and shifts fill with zeros, as those of uint32 do."""
    assert np.array_equal(draws(key, 100_000), by_definition(100_000, key))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_compiled_kernel_gives_the_same_masks_for_every_key_and_size(dtype):
    """Other keys and sizes need no new graph; NaN and infinity are dropped too."""
    from torch._dynamo.utils import counters

    before = None
    for key, size in zip([5, *KEYS], [96, 96, 97, 1000, 4096, 31, 33, 5000], strict=True):
        values = torch.full((size,), math.nan, dtype=dtype)
        values[::2] = 1.5
        kept = torch.from_numpy(by_definition(size, key) >= 9000)
        expected = torch.where(kept, values, 0)
        for is_compiled in (True, False):
            mask = Mask(key, 9000, LOWBIAS32, is_compiled)
            found = mask.cleared(values, mask.draw(values))
            assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
            again = mask.clear(values.clone(), None)
            assert torch.equal(again.nan_to_num(7), expected.nan_to_num(7))
        graphs = counters["stats"]["unique_graphs"]
        assert before in (None, graphs)
        before = graphs


@pytest.mark.parametrize("key", KEYS)
def test_each_number_is_as_frequent_as_the_others(key):
    """The chi-square over 512 classes of numbers is near its mean of 511."""
    counted = np.bincount(draws(key) >> 6, minlength=512)
    chi = float(((counted - COUNT / 512) ** 2).sum() / (COUNT / 512))
    assert abs(chi - 511) < SIGMAS * math.sqrt(2 * 511)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 576, 1536])
def test_neighbouring_counters_are_independent(lag):
    """Their numbers and their masks are uncorrelated, and pairs fill the square evenly."""
    found = draws(key_of("neighbours"))
    one, other = found[:-lag], found[lag:]
    for first, second in ((one, other), (one < 1638, other < 1638)):
        correlation = float((scores(first) * scores(second)).mean())
        assert abs(correlation) < SIGMAS / math.sqrt(len(one))
    pairs = np.bincount((one >> 11) * 16 + (other >> 11), minlength=256)
    chi = float(((pairs - len(one) / 256) ** 2).sum() / (len(one) / 256))
    assert abs(chi - 255) < SIGMAS * math.sqrt(2 * 255)


@pytest.mark.parametrize("bit", range(63))
def test_a_bit_of_the_key_changes_everything(bit):
    """Numbers and masks under two such keys are uncorrelated."""
    key = key_of("bits")
    one, other = draws(key, 1 << 16), draws(key ^ (1 << bit), 1 << 16)
    assert abs(float((scores(one) * scores(other)).mean())) < SIGMAS / 256
    kept = scores(one < 1638) * scores(other < 1638)
    assert abs(float(kept.mean())) < SIGMAS / 256


def dropout(generator=LOWBIAS32, *, layer="l0.qkv", at=0, seed=1):
    module = KeyedDropout(0.3, seed=seed, layer=layer)
    module.generator = generator
    module.begin(at)
    return module


@pytest.mark.parametrize("other", [{"layer": "l1.qkv"}, {"at": 1}, {"seed": 2}])
def test_masks_of_layers_micro_batches_and_seeds_are_uncorrelated(other):
    """512 x 512 elements; equal names give equal masks."""
    one, second, same = (
        (module(torch.ones(512, 512)) != 0).flatten().numpy()
        for module in (dropout(), dropout(**other), dropout())
    )
    assert np.array_equal(one, same)
    assert abs(float((scores(one) * scores(second)).mean())) < SIGMAS / 512
    dropped, p = 1 - one.mean(), 0.3
    assert abs(dropped - p) < SIGMAS * math.sqrt(p * (1 - p)) / 512


@pytest.mark.parametrize("generator", [LOWBIAS32, SFC64, None])
def test_the_gradient_passes_where_the_value_does(generator):
    """Also through a transposed gradient; without a generator, a CPU draws from SFC64."""
    x = torch.ones(6, 4, requires_grad=True)
    kept = dropout(generator)(torch.ones(6, 4)) != 0
    weight = torch.arange(1.0, 25.0).view(4, 6)
    (dropout(generator)(x).T * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, kept)
    usual = dropout(SFC64)(torch.ones(6, 4)) != 0
    assert torch.equal(usual, kept) == (generator is not LOWBIAS32)
