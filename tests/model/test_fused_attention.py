"""GPU kernels for packed documents, compared with the float64 formula and torch's masks."""

from __future__ import annotations

import functools
import importlib
from itertools import pairwise

import pytest
import torch

from mens_exp.model import attention, fused_attention
from mens_exp.model.fused_attention import BLOCK, Kernel, Machine, Request, attend, kernel_for

BOUNDS = (0, 7, 8, 45, 57, 62)
TOKENS = 70  # including eight of padding
DOCUMENTS = tuple(pairwise(BOUNDS))
WIDTH = 16
NEW = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux")
NEW += ("scale", "window_size", "enable_gqa")


def draw(heads, groups, tokens=TOKENS):
    seed = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, WIDTH), (1, groups, tokens, WIDTH), (1, groups, tokens, WIDTH)]
    return [torch.randn(one, generator=seed, requires_grad=True) for one in shapes]


# The second document continues the first, and the last one the third.
PREFIXES = (None, (0, 4), None, None, (8, 30))


def by_formula(query, key, value, *, scale, window, softcap=None, bounds=BOUNDS, prefixes=None):
    """Attend for each pair of tokens; `[1, T, H, K]`."""
    query, key, value = (one.double()[0] for one in (query, key, value))
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64)
    for number, (start, end) in enumerate(pairwise(bounds)):
        before = list(range(*((prefixes and prefixes[number]) or (0, 0))))
        for head in range(len(query)):
            of = head * len(key) // len(query)
            for place in range(start, end):
                seen = [*before, *range(start, place + 1)][-(window or TOKENS) :]
                scores = key[of, seen] @ query[head, place] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[head, place] = torch.softmax(scores, 0) @ value[of, seen]
    return out.transpose(0, 1)[None]


def varlen_by_formula(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """Attend as documented for `varlen_attn`, with the arguments of torch 2.13."""
    assert return_aux is None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    bounds = cu_seq_q.tolist()
    assert max_q == max_k == max(end - start for start, end in pairwise(bounds))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right == 0
    parts = [one.transpose(0, 1)[None] for one in (query, key, value)]
    window = None if left == -1 else left + 1
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return by_formula(*parts, scale=scale, window=window, bounds=bounds)[0].to(query.dtype)


def varlen_of_torch_2_10(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
):
    """The first release has only causal, equal head counts, and the default scale."""
    assert is_causal
    assert query.shape[1] == key.shape[1]
    one = functools.partial(varlen_by_formula, window_size=(-1, 0), return_aux=return_aux)
    return one(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)


@pytest.fixture
def in_eager_mode(monkeypatch):
    """Let FlexAttention train on the CPU, where only its eager form has a backward pass."""
    # In the package, this name is the function.
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)


def asked(scale=WIDTH**-0.5, **changes):
    return Request(dtype=torch.float32, width=WIDTH, value_width=WIDTH, scale=scale, **changes)


UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")


@UNCOMPILED
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # read by Dynamo
@pytest.mark.usefixtures("in_eager_mode")
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(
    ("kernel", "layer", "varlen"),
    [
        (Kernel.VARLEN, {}, varlen_by_formula),
        (Kernel.VARLEN, {"window": 5, "scale": 0.3}, varlen_by_formula),
        (Kernel.VARLEN, {}, varlen_of_torch_2_10),
        (Kernel.FLEX, {}, None),
        (Kernel.FLEX, {"window": 5, "scale": 0.3}, None),
        (Kernel.FLEX, {"softcap": 0.7}, None),
        (Kernel.FLEX, {"softcap": 0.7, "window": 1}, None),
        (Kernel.FLEX, {"prefixes": PREFIXES}, None),
        (Kernel.FLEX, {"prefixes": PREFIXES, "window": 5, "softcap": 0.7}, None),
        (Kernel.CAUSAL, {"scale": 0.3}, None),
    ],
)
def test_each_kernel_attends_within_documents(monkeypatch, kernel, layer, varlen, groups):
    """Values and gradients agree; padding gets zeros and no gradient."""
    monkeypatch.setattr(fused_attention, "_varlen", lambda: varlen)
    parts, again = draw(4, groups), draw(4, groups)
    one = asked(**layer)
    found = attend(kernel, *parts, DOCUMENTS, one)
    told = {"scale": one.scale, "window": one.window, "softcap": one.softcap}
    expected = by_formula(*again, **told, prefixes=one.prefixes)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert not found[:, BOUNDS[-1] :].any()
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    found.backward(upstream)
    expected.backward(upstream.double())
    for ours, theirs in zip(parts, again, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_sequences_of_many_lengths_are_compiled_for_few(monkeypatch):
    """Micro-batches differ slightly in length; torch stops compiling after eight shapes."""
    seen = []

    def recorded(query, key, value, **how):
        seen.append((query.shape, key.shape, value.shape, how["block_mask"].seq_lengths))
        return query

    monkeypatch.setattr(fused_attention, "_flex", lambda _: recorded)
    for tokens in (64, 70, 511, 512):
        found = attend(Kernel.FLEX, *draw(4, 2, tokens), DOCUMENTS, asked())
        assert found.shape == (1, tokens, 4, WIDTH)
    assert len(set(seen)) == 1
    assert seen[0][-1] == (512, 512)


def test_documents_with_gaps_are_a_mistake_of_the_caller():
    """A kernel would treat them as one document."""
    with pytest.raises(AssertionError):
        attend(Kernel.CAUSAL, *draw(4, 4), ((0, 7), (9, 20)), asked())


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_those_that_torch_finds_pair_by_pair(seed, window):
    """Partial and full blocks agree in both directions."""
    from torch.nn.attention.flex_attention import create_block_mask

    draws = torch.Generator().manual_seed(seed)
    tokens = [BLOCK, 5 * BLOCK, 5 * BLOCK + 17][seed % 3]
    end = tokens - 9 * (seed % 2)  # if there is padding
    count = int(torch.randint(0, 7, (1,), generator=draws))
    bounds = (0, *sorted({*torch.randint(1, end, (count,), generator=draws).tolist(), end}))
    document_T = torch.bucketize(torch.arange(tokens), torch.tensor(bounds[1:]), right=True)

    def visible(_batch, _head, query, key):
        seen = (document_T[query] == document_T[key]) & (query >= key)
        return seen if window is None else seen & (query - key < window)

    theirs = create_block_mask(visible, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=BLOCK)
    ours = fused_attention.block_mask(bounds, tokens, window, torch.device("cpu"))
    for count, indices in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ):
        assert listed(ours, count, indices) == listed(theirs, count, indices), count


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_prefixes_are_those_that_torch_finds_pair_by_pair(seed, window):
    """Pairs have prompts of many lengths, beside independent documents."""
    from torch.nn.attention.flex_attention import create_block_mask

    draws = torch.Generator().manual_seed(seed)
    bounds, prefixes, place_T, line_T = [0], [], [], []
    for pair in range(4):
        prompt, *answers = torch.randint(1, 260, (3,), generator=draws).tolist()
        start = bounds[-1]
        prefix = None if pair == seed else (start, start + prompt)
        for own, before in ((prompt + answers[0], None), (answers[1], prefix)):
            begin = bounds[-1]
            line = [*range(*(before or (0, 0))), *range(begin, begin + own)]
            place_T += range(len(line) - own, len(line))
            line_T += [line] * own
            bounds.append(begin + own)
            prefixes.append(before)
    tokens = bounds[-1]
    seen_TT = torch.zeros(tokens, tokens, dtype=torch.bool)
    for query, (place, line) in enumerate(zip(place_T, line_T, strict=True)):
        first = 0 if window is None else max(place - window + 1, 0)
        seen_TT[query, line[first : place + 1]] = True

    theirs = create_block_mask(
        lambda _batch, _head, query, key: seen_TT[query, key],
        *(None, None, tokens, tokens),
        device="cpu",
        BLOCK_SIZE=BLOCK,
    )
    device = torch.device("cpu")
    ours = fused_attention.block_mask(tuple(bounds), tokens, window, device, tuple(prefixes))
    for count, indices in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
    ):
        assert listed(ours, count, indices) == listed(theirs, count, indices), count
    every = torch.arange(tokens)
    found_TT = ours.mask_mod(0, 0, every[:, None], every[None])
    assert torch.equal(found_TT, seen_TT)


def listed(mask, count, indices):
    """Return the blocks of each row; entries beyond the count are arbitrary."""
    counts, places = getattr(mask, count)[0, 0], getattr(mask, indices)[0, 0]
    return [sorted(row[:number].tolist()) for number, row in zip(counts, places, strict=True)]


HOPPER = Machine(capability=(9, 0), varlen=frozenset(NEW), has_flex=True)
FIRST = Machine(capability=(8, 0), varlen=frozenset([*NEW[:8], "is_causal"]), has_flex=True)
TURING = Machine(capability=(7, 5), varlen=frozenset(NEW), has_flex=True)
AMD = Machine(capability=None, varlen=frozenset(NEW), has_flex=True)
WITHOUT = Machine(capability=(9, 0), varlen=frozenset(), has_flex=False)


@pytest.mark.parametrize(
    ("layer", "there", "kernel"),
    [
        ({}, HOPPER, Kernel.VARLEN),
        ({"window": 4096}, HOPPER, Kernel.VARLEN),
        ({"scale": 0.5}, HOPPER, Kernel.VARLEN),
        ({"softcap": 50.0}, HOPPER, Kernel.FLEX),
        ({"dtype": torch.float32}, HOPPER, Kernel.FLEX),
        ({"width": 512, "value_width": 512}, HOPPER, Kernel.FLEX),
        ({"value_width": 64}, HOPPER, Kernel.FLEX),
        ({"width": 8, "value_width": 8, "softcap": 1.0}, HOPPER, None),
        ({}, FIRST, Kernel.VARLEN),
        ({"window": 4096}, FIRST, Kernel.FLEX),
        ({"scale": 0.5}, FIRST, Kernel.FLEX),
        ({}, TURING, Kernel.CAUSAL),
        ({"window": 4096}, TURING, None),
        ({}, AMD, Kernel.FLEX),
        ({}, WITHOUT, Kernel.CAUSAL),
        ({"softcap": 50.0}, WITHOUT, None),
        ({"prefixes": PREFIXES}, HOPPER, Kernel.FLEX),
        ({"prefixes": PREFIXES}, AMD, Kernel.FLEX),
        ({"prefixes": PREFIXES}, TURING, None),
    ],
)
def test_the_kernel_is_one_that_computes_the_layer(layer, there, kernel):
    """Flash attention is preferred, then FlexAttention, and None if neither supports the layer."""
    layer = {"dtype": torch.bfloat16, "width": 128, "value_width": 128, **layer}
    assert kernel_for(Request(**{"scale": layer["width"] ** -0.5, **layer}), there) is kernel


def test_a_device_that_is_no_gpu_has_none_of_them():
    """On other devices attention runs in blocks of queries."""
    assert fused_attention.machine_of(torch.device("cpu")) is None
    assert fused_attention.described(torch.device("cpu"), torch.bfloat16) == "by document 1"


@UNCOMPILED
@pytest.mark.parametrize("layer", [{}, {"sliding_window": 5}, {"softcap": 0.7}])
def test_models_attend_with_the_kernel_of_their_machine(monkeypatch, layer):
    """Each kernel that a machine may choose gets the arguments of transformers."""
    flex = Machine(capability=(9, 0), varlen=frozenset(), has_flex=True)
    monkeypatch.setattr(attention, "machine_of", lambda _: flex)
    module = torch.nn.Module()
    with torch.no_grad():
        parts = [one.detach() for one in draw(4, 2)]
        found, _ = attention._attention(module, *parts, None, documents=DOCUMENTS, **layer)
        names = {"sliding_window": "window", "softcap": "softcap"}
        told = {"window": None, **{names[name]: value for name, value in layer.items()}}
        expected = by_formula(*parts, scale=WIDTH**-0.5, **told)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
