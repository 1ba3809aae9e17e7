"""Packed attention, compared with transformers' eager attention on single documents."""

from __future__ import annotations

import pytest
import torch

from mens_exp.errors import ModelFileError
from mens_exp.model import attention

LENGTHS = (7, 1, 37, 12, 5)  # below and above 32, to which lengths are rounded up
TOKENS = sum(LENGTHS)
BOUNDS = tuple(
    (sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS))
)  # (0, 7), (7, 8), (8, 45), (45, 57), (57, 62)
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # far apart, so that a leak shows
}
WINDOW = 4
FAMILIES = {
    "llama": ("Llama", {}),
    "llama without groups": ("Llama", {"num_key_value_heads": 8}),
    "mistral, sliding": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2, one layer sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


@pytest.fixture(autouse=True)
def registered():
    attention.register()


def build(family, implementation, **changes):
    import transformers

    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **extra, **changes})
    config._attn_implementation = implementation
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.eval()


def draw_ids(seed=0):
    return torch.randint(97, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


def packed(model, ids, bounds=BOUNDS):
    """Return the logits ``[T, V]`` of a packed sequence."""
    positions = torch.cat([torch.arange(end - start) for start, end in bounds])[None]
    hidden = model.model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=attention.no_mask(ids),
        use_cache=False,
        documents=bounds,
    ).last_hidden_state
    return model.lm_head(hidden)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_has_the_logits_of_eager_attention_alone(family):
    """In float32, the logits equal those of a plain forward of each document."""
    ours, theirs = build(family, attention.IMPLEMENTATION), build(family, "eager")
    ids = draw_ids()
    with torch.no_grad():
        together = packed(ours, ids)
        for start, end in BOUNDS:
            alone = theirs(input_ids=ids[:, start:end], use_cache=False).logits[0]
            assert (together[start:end] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_has_the_same_logits_packed_and_alone(family):
    """In float32, other documents change nothing beyond rounding."""
    model, ids = build(family, attention.IMPLEMENTATION), draw_ids()
    with torch.no_grad():
        together = packed(model, ids)
        for start, end in BOUNDS:
            alone = packed(model, ids[:, start:end], ((0, end - start),))
            assert (together[start:end] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_changing_a_document_changes_nothing_in_the_others(family):
    """The other documents stay bitwise equal, and the changed one differs."""
    model, ids = build(family, attention.IMPLEMENTATION), draw_ids()
    changed = ids.clone()
    start, end = BOUNDS[2]
    changed[:, start:end] = (changed[:, start:end] + 1) % 97
    with torch.no_grad():
        before, after = packed(model, ids), packed(model, changed)
    assert torch.equal(before[:start], after[:start])
    assert torch.equal(before[end:], after[end:])
    assert not torch.equal(before[start:end], after[start:end])


def test_a_later_token_changes_nothing_before_it():
    """Attention is causal inside a document, bit for bit."""
    model, ids = build("llama", attention.IMPLEMENTATION), draw_ids()
    changed = ids.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 97
    with torch.no_grad():
        before, after = packed(model, ids), packed(model, changed)
    assert torch.equal(before[:15], after[:15])
    assert not torch.equal(before[15:45], after[15:45])


def test_a_token_beyond_the_window_is_not_seen():
    """With one layer and a window of 4, token 8 affects only positions 8 to 11."""
    model = build("mistral, sliding", attention.IMPLEMENTATION, num_hidden_layers=1)
    ids = draw_ids()
    changed = ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 97
    with torch.no_grad():
        moved = (packed(model, ids) - packed(model, changed)).abs().amax(-1) > 0
    assert moved.nonzero().flatten().tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_eager_attention(family):
    """The gradient of a packed loss equals the sum over single documents in float32."""
    ours, theirs = build(family, attention.IMPLEMENTATION), build(family, "eager")
    ids = draw_ids()
    packed(ours, ids).logsumexp(-1).sum().backward()
    for start, end in BOUNDS:
        theirs(input_ids=ids[:, start:end], use_cache=False).logits[0].logsumexp(
            -1
        ).sum().backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_have_the_logits_of_eager_attention_alone(family):
    """Without document bounds SDPA runs with transformers' own masks."""
    ours, theirs = build(family, attention.IMPLEMENTATION), build(family, "eager")
    ids = draw_ids()[:, :24].reshape(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 0
    with torch.no_grad():
        both = ours(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, length in ((0, 9), (1, 12)):
            alone = theirs(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0]
            assert (both[row, :length] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("padding", [True, False])
def test_the_base_model_drops_nothing_of_its_own(padding):
    """A configured attention dropout has no effect in training, packed or padded."""
    model = build("llama", attention.IMPLEMENTATION, attention_dropout=0.5)
    ids = draw_ids()

    def logits():
        if padding:
            mask = torch.ones_like(ids)
            mask[0, 20:] = 0
            return model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return packed(model, ids)

    with torch.no_grad():
        still = logits()
        model.train()
        assert torch.equal(logits(), still)


class Asking(torch.nn.Module):
    def __init__(self, *, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def formula(query, key, value, documents, window):
    """Attend in float64 by definition, per document; ``[1, T, H, K]`` as models expect."""
    repeats = query.shape[1] // key.shape[1]
    parts = []
    for start, end in documents:
        q, k, v = (x[0, :, start:end].double() for x in (query, key, value))
        scores = 0.3 * q @ k.repeat_interleave(repeats, 0).transpose(1, 2)
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = (back < 0) | (back >= (window or end))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(weights @ v.repeat_interleave(repeats, 0))
    return torch.cat(parts, 1).transpose(0, 1)[None]


# A document of one token, one past a block of queries, one of several blocks, and padding.
LONG = ((0, 1), (1, 158), (158, 481))


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_attends_by_the_formula(dtype, window):
    """Output and gradients agree for blocks of queries, in bf16 up to rounding."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 500, heads, 8, generator=generator) for heads in (6, 2, 2)]
    upstream = torch.randn(1, 500, 6, 8, generator=generator)
    upstream[:, LONG[-1][1] :] = 0  # padding has no loss
    leaves = [x.transpose(1, 2).to(dtype).requires_grad_() for x in drawn]
    run = attention._attention
    found, _ = run(Asking(), *leaves, None, documents=LONG, sliding_window=window, scaling=0.3)
    gradients = torch.autograd.grad(found, leaves, upstream.to(dtype))
    expected = formula(*leaves, LONG, window)
    theirs = torch.autograd.grad(expected, leaves, upstream[:, : LONG[-1][1]].double())
    assert not found[:, LONG[-1][1] :].any()
    limit = 1e-6 if dtype == torch.float32 else 0.01
    for mine, other in zip((found[:, : LONG[-1][1]], *gradients), (expected, *theirs), strict=True):
        assert (mine - other).norm() <= limit * other.norm()


@pytest.mark.parametrize("heads", [(6, 2), (1, 1)])
def test_queries_of_the_next_document_are_not_changed(heads):
    """The first document, rounded up, reaches the end, in queries with heads before tokens."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, n, 40, 8, generator=generator) for n in (heads[0], heads[1], heads[1])]
    before = [x.clone() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    documents = ((0, 33), (33, 40))
    found, _ = attention._attention(Asking(), *leaves, None, documents=documents, scaling=0.3)
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    expected = formula(*leaves, documents, None)
    theirs = torch.autograd.grad(expected.square().sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))
    for mine, other in zip((found, *gradients), (expected, *theirs), strict=True):
        assert (mine - other).norm() <= 1e-6 * other.norm()


# A pair sharing a prompt of 40 tokens, a separate document, and a pair with a long prompt.
TREE = ((0, 60), (60, 65), (65, 70), (70, 290), (290, 490))
PREFIXES = (None, (0, 40), None, None, (70, 281))


def by_dense_mask(query, key, value, window, softcap=None):
    """Attend in float64 with one dense mask; ``[1, T, H, K]``."""
    tokens = TREE[-1][1]
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for (start, end), prefix in zip(TREE, PREFIXES, strict=True):
        line = [*range(*(prefix or (0, 0))), *range(start, end)]  # as one document
        for place in range(end - start):
            at = len(line) - (end - start) + place
            first = 0 if window is None else max(at - window + 1, 0)
            seen[start + place, line[first : at + 1]] = True
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (x[0, :, :tokens].double() for x in (query, key, value))
    scores = 0.3 * q @ k.repeat_interleave(repeats, 0).transpose(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v.repeat_interleave(repeats, 0)).transpose(0, 1)[None]


def drawn_for_the_tree(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 500, heads, 8, generator=generator) for heads in (6, 2, 2)]
    return [x.transpose(1, 2).to(dtype).requires_grad_() for x in drawn], generator


@pytest.mark.parametrize("window", [None, 1, 30, 210])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_that_continues_a_prefix_attends_to_both(dtype, window):
    """Output and gradients equal those of a dense mask; padding gets zeros."""
    leaves, generator = drawn_for_the_tree(dtype)
    upstream = torch.randn(1, 500, 6, 8, generator=generator)
    upstream[:, 490:] = 0
    options = {"documents": TREE, "prefixes": PREFIXES, "sliding_window": window, "scaling": 0.3}
    found, _ = attention._attention(Asking(), *leaves, None, **options)
    gradients = torch.autograd.grad(found, leaves, upstream.to(dtype))
    expected = by_dense_mask(*leaves, window)
    theirs = torch.autograd.grad(expected, leaves, upstream[:, :490].double())
    assert not found[:, 490:].any()
    limit = 1e-6 if dtype == torch.float32 else 0.01
    for mine, other in zip((found[:, :490], *gradients), (expected, *theirs), strict=True):
        assert (mine - other).norm() <= limit * other.norm()


@pytest.mark.parametrize(
    "layer", [{}, {"sliding_window": 30}, {"softcap": 2.0}, {"softcap": 2.0, "sliding_window": 30}]
)
def test_a_document_continues_a_prefix_without_gradients_and_with_caps(layer):
    """These are the kernels of validation, and of models with capped scores."""
    leaves, _ = drawn_for_the_tree()
    options = {"documents": TREE, "prefixes": PREFIXES, "scaling": 0.3, **layer}
    with torch.no_grad():
        found, _ = attention._attention(Asking(), *leaves, None, **options)
        expected = by_dense_mask(*leaves, layer.get("sliding_window"), layer.get("softcap"))
    assert (found[:, :490] - expected).norm() <= 1e-6 * expected.norm()
    assert not found[:, 490:].any()


def test_learning_leaves_later_keys_out(monkeypatch):
    """A document of four blocks computes five eighths of the products of all keys."""
    seen = []
    product = attention.product

    def counted(a, b, *, scale=1.0):
        seen.append(a.shape[1] * b.shape[2])
        return product(a, b, scale=scale)

    monkeypatch.setattr(attention, "product", counted)
    query, key, value = torch.ones(3, 1, 1, 512, 8, requires_grad=True).unbind()
    attention._attention(Asking(), query, key, value, None, documents=((0, 512),))
    assert max(seen) == 128 * 512
    assert sum(one for one in seen if one > 512 * 8) == 512 * 512 * 5 // 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_both_kernels_agree(dtype, window):
    """Without gradients a fused kernel is used, which agrees with plain products."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 11, 8, generator=generator).to(dtype)
    key, value = (torch.randn(1, 2, 11, 8, generator=generator).to(dtype) for _ in "kv")
    options = {"documents": ((0, 11),), "sliding_window": window, "scaling": 0.3}
    products, _ = attention._attention(Asking(), query, key, value, None, **options)
    with torch.no_grad():
        fused, _ = attention._attention(Asking(), query, key, value, None, **options)
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    assert (products - fused).abs().max() <= limit


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, ["x....", "xx...", "xxx..", "xxxx.", "xxxxx"]),
        (2, ["x....", "xx...", ".xx..", "..xx.", "...xx"]),
        (1, ["x....", ".x...", "..x..", "...x.", "....x"]),
    ],
)
def test_bias_hides_the_future_and_what_lies_beyond_the_window(window, expected):
    """The bias is zero where a position may attend, and the lowest number elsewhere."""
    bias = attention._bias(5, window, torch.float32, torch.device("cpu"))
    seen = ["".join("x" if value == 0 else "." for value in row) for row in bias.tolist()]
    assert seen == expected
    assert bias.min() in (0, torch.finfo(torch.float32).min)


def test_a_bias_made_during_validation_serves_training():
    """A bias made in inference mode may be saved by the fused kernel's backward pass."""
    attention._whole_bias.cache_clear()
    with torch.inference_mode():
        bias = attention._bias(6, None, torch.float32, torch.device("cpu"))
    query, key, value = torch.ones(3, 2, 6, 16, requires_grad=True).unbind()
    attention._sdpa_document(query, key, value, bias, 0.3).sum().backward()
    assert not bias.is_inference()


def test_registering_twice_changes_nothing():
    """The second call keeps the registered implementation."""
    from transformers import AttentionInterface

    before = AttentionInterface()[attention.IMPLEMENTATION]
    attention.register()
    assert AttentionInterface()[attention.IMPLEMENTATION] is before


def test_scaling_left_open_is_one_over_the_root_of_the_width():
    """A model that gives no scale gets the usual one."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 16, generator=generator) for _ in range(3))
    run = attention._attention
    module = torch.nn.Module()
    implied, _ = run(module, query, key, value, None, documents=((0, 6),))
    stated, _ = run(module, query, key, value, None, documents=((0, 6),), scaling=0.25)
    assert torch.equal(implied, stated)
    assert implied.shape == (1, 6, 2, 16)


def by_hand(query, key, value, seen):
    """Attend with scores capped at 2 in float64; query ``[H, N, K]``, key, value ``[H, N, K]``."""
    scores = torch.einsum("hnk,hmk->hnm", query.double(), key.double()) * 0.3
    scores = 2 * torch.tanh(scores / 2)
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ value.double()


@pytest.mark.parametrize("window", [None, 3])
def test_capped_scores_are_those_of_the_formula(window):
    """Grouped queries and a window are included; without the cap the result differs."""
    generator = torch.Generator().manual_seed(0)
    query = 3 * torch.randn(6, 11, 8, generator=generator)
    key, value = (torch.randn(2, 11, 8, generator=generator) for _ in "kv")
    bias = attention._bias(11, window, torch.float32, torch.device("cpu"))
    expected = by_hand(query, key.repeat_interleave(3, 0), value.repeat_interleave(3, 0), bias == 0)
    capped = attention._capped_document(query, key, value, bias, 0.3, softcap=2.0)
    assert (capped - expected).abs().max() <= 1e-6
    assert (attention._sdpa_document(query, key, value, bias, 0.3) - expected).abs().max() > 0.1


@pytest.mark.parametrize("mask", ["none", "boolean", "added"])
def test_capped_scores_are_the_same_in_a_batch(mask):
    """Cases: no mask, a boolean mask and an additive one."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 8, generator=generator)
    key, value = (torch.randn(2, 2, 5, 8, generator=generator) for _ in "kv")
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    if mask != "none":
        seen = seen & ~torch.ones(5, 5, dtype=torch.bool).tril(-2)
    given = {
        "none": None,
        "boolean": seen[None, None],
        "added": torch.zeros(1, 1, 5, 5).masked_fill(~seen, -1e9),
    }[mask]
    found = attention._capped_batch(query, key, value, given, 0.3, 2.0)
    for row in range(2):
        expected = by_hand(
            query[row], key[row].repeat_interleave(3, 0), value[row].repeat_interleave(3, 0), seen
        )
        assert (found[row].transpose(0, 1) - expected).abs().max() <= 1e-6


def test_a_single_token_sees_every_key_so_far():
    """In generation nothing is masked."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 1, 8, generator=generator)
    key, value = (torch.randn(1, 2, 7, 8, generator=generator) for _ in "kv")
    found = attention._capped_batch(query, key, value, None, 0.3, 2.0)
    everything = torch.ones(1, 7, dtype=torch.bool)
    expected = by_hand(query[0], key[0], value[0], everything)
    assert (found[0].transpose(0, 1) - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("documents", [None, ((0, 4),)])
@pytest.mark.parametrize(
    ("module", "arguments", "named"),
    [
        (Asking(), {"s_aux": torch.zeros(2)}, "s_aux"),
        (Asking(), {"head_mask": torch.ones(2), "position_bias": 1}, "head_mask, position_bias"),
        (Asking(), {"is_causal": False}, "later tokens"),
        (Asking(is_causal=False), {}, "later tokens"),
    ],
)
def test_an_argument_that_is_not_understood_is_refused(module, arguments, named, documents):
    """Attention sinks, head masks and non-causal attention must not be ignored."""
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    with pytest.raises(ModelFileError, match=named):
        attention._attention(module, *tensors, None, documents=documents, **arguments)


def test_arguments_without_effect_are_let_go_by():
    """Positions are already in the queries, and null arguments ask for nothing."""
    tensors = [torch.ones(1, 2, 4, 8)] * 3
    output, _ = attention._attention(
        Asking(), *tensors, None, position_ids=torch.arange(4)[None], use_cache=False, s_aux=None
    )
    assert torch.equal(output, torch.ones(1, 4, 2, 8))
