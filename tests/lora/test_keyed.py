from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mens_exp.config.model import RandomModel
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import shape_of
from mens_exp.lora.keyed import HeadDropout, KeyedDropout, initialise, key_of, share_dropout

MODULES = linear_modules(shape_of(RandomModel(name="tiny")))  # two Llama layers and the head
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrices(rank=8, width=64, out=32):
    return torch.full((rank, width), 7.0), torch.full((out, rank), 7.0)


def drawn_a(seed, layer, rank=8, width=64):
    a, b = matrices(rank, width)
    initialise(a, b, seed=seed, layer=layer)
    return a


def dropout(p=0.3, *, seed=1, layer="l0.qkv", at=0):
    module = KeyedDropout(p, seed=seed, layer=layer)
    module.begin(at)
    return module


def mask_of(module, shape=(64, 64)):
    """Return where a module keeps elements."""
    return module(torch.ones(shape)) != 0


# Initialization.


def test_a_is_a_function_of_seed_and_layer_alone():
    """Earlier draws for other layers and shapes change nothing."""
    first = drawn_a(3, "l0.q")
    drawn_a(3, "l1.up", rank=4, width=128)
    torch.rand(100)
    assert torch.equal(drawn_a(3, "l0.q"), first)


def test_initialisation_leaves_the_global_generator_alone():
    """The next global draw is unchanged."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drawn_a(3, "l0.q")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("seed", "layer"), [(4, "l0.q"), (3, "l0.k"), (3, "l1.q")])
def test_another_seed_or_layer_draws_another_a(seed, layer):
    """Streams differ in all but chance agreement."""
    assert not torch.any(drawn_a(seed, layer) == drawn_a(3, "l0.q"))


@pytest.mark.parametrize("width", [64, 576])
def test_a_is_uniform_within_one_over_the_root_of_its_inputs(width):
    """The draws fill PEFT's bound and have the standard deviation bound / sqrt(3)."""
    a = drawn_a(0, "l0.q", rank=64, width=width)
    bound = 1 / math.sqrt(width)
    assert float(a.abs().max()) <= bound
    assert float(a.abs().max()) > 0.99 * bound
    assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert abs(float(a.mean())) < 0.03 * bound


def test_the_bound_is_that_of_peft_s_own_initialisation():
    """kaiming_uniform_ with a = sqrt(5) fills the same interval."""
    theirs = torch.nn.init.kaiming_uniform_(torch.empty(64, 576), a=math.sqrt(5))
    ours = drawn_a(0, "l0.q", rank=64, width=576)
    assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.01)


def test_b_starts_at_zero():
    """Earlier values are overwritten."""
    a, b = matrices()
    initialise(a, b, seed=0, layer="l0.q")
    assert not b.any()
    assert a.all()


def test_a_parameter_s_draws_do_not_depend_on_its_format():
    """A bf16 matrix has the float32 draws, rounded."""
    a, b = torch.empty(8, 64, dtype=torch.bfloat16), torch.empty(32, 8)
    initialise(a, b, seed=3, layer="l0.q")
    assert torch.equal(a, drawn_a(3, "l0.q").bfloat16())


def test_keys_are_63_bits_and_tell_their_parts_apart():
    """Generators accept 63 bits, and ("a", "bc") differs from ("ab", "c")."""
    assert 0 <= key_of(1, "x") < 2**63
    assert key_of("a", "bc") != key_of("ab", "c")
    # The first eight bytes of sha256("1/lora_a/l0.q"), little-endian, without the lowest bit.
    assert key_of(1, "lora_a", "l0.q") == 0x1CB5_B794_7D11_4F43


# Dropout.


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_the_share_that_is_dropped_is_the_probability(p):
    """Over a quarter of a million elements it is within six standard deviations."""
    count = 512 * 512
    dropped = 1 - float(mask_of(dropout(p), (512, 512)).float().mean())
    assert abs(dropped - p) < 6 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_preserved(dtype):
    """Kept elements are scaled by 1 / (1 - p), so ones keep a mean of one."""
    x = torch.ones(512, 512, dtype=dtype)
    y = dropout(0.25)(x)
    assert y.dtype == dtype
    assert float(y.float().mean()) == pytest.approx(1, abs=0.01)
    assert {float(value) for value in y.unique()} == {0.0, float(torch.tensor(4 / 3, dtype=dtype))}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropped_elements_are_zero_whatever_they_were(dtype):
    """Inf and NaN are cleared too, since their bits are masked and not multiplied."""
    x = torch.tensor([1.0, -2.0, math.inf, -math.inf, math.nan], dtype=dtype).repeat(400)
    kept = mask_of(dropout(0.5), (2000,))
    y = dropout(0.5)(x)
    assert not y[~kept].any()
    assert torch.equal(y[kept].nan_to_num(1.5), (x * 2)[kept].nan_to_num(1.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_the_mask_times_the_scale(dtype):
    """By hand: the upstream gradient over 1 - p where kept, and 0 elsewhere; p = 1/2 is exact."""
    module = dropout(0.5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 5, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(33, 5, generator=generator).to(dtype)
    kept = mask_of(dropout(0.5), (33, 5))
    y = module(x)
    y.backward(upstream)
    assert torch.equal(y, torch.where(kept, x * 2, 0))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(kept, upstream * 2, 0))


def test_a_gradient_that_is_not_contiguous_is_masked_at_the_right_places():
    """A transposed product after it returns a transposed gradient."""
    x = torch.ones(6, 4, requires_grad=True)
    kept = mask_of(dropout(0.5), (6, 4))
    weight = torch.arange(24.0).view(4, 6)
    (dropout(0.5)(x).T * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(kept, weight.T * 2, 0))


def test_the_input_is_left_as_it_was():
    """Masking in place works on a copy."""
    x = torch.ones(64, 64)
    dropout(0.5)(x)
    assert bool((x == 1).all())


@pytest.mark.parametrize("other", [{"seed": 2}, {"layer": "l1.qkv"}, {"at": 1}])
def test_seed_layer_and_micro_batch_each_change_the_mask(other):
    """Equal triples give equal masks."""
    assert torch.equal(mask_of(dropout()), mask_of(dropout()))
    assert not torch.equal(mask_of(dropout()), mask_of(dropout(**other)))


def test_the_mask_does_not_depend_on_the_order_of_calls():
    """Micro-batch 5 has the same mask after 0 to 4, before them, and after global draws."""
    direct = mask_of(dropout(at=5))
    late = dropout()
    for index in range(6):
        late.begin(index)
        mask = mask_of(late)
        torch.rand(3)
    assert torch.equal(mask, direct)
    late.begin(2)
    mask_of(late)
    late.begin(5)
    assert torch.equal(mask_of(late), direct)


def test_dropout_leaves_the_global_generators_alone():
    """There is no generator state to save."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    mask_of(dropout())
    assert torch.equal(torch.rand(3), expected)


def test_masks_of_two_layers_are_uncorrelated():
    """This also holds for two micro-batches; 262,144 draws have a correlation of about zero."""

    def correlation(other):
        masks = torch.stack([mask_of(m, (512, 512)).flatten() for m in (dropout(), other)])
        return float(torch.corrcoef(masks.double())[0, 1])

    assert abs(correlation(dropout(layer="l1.qkv"))) < 6 / 512
    assert abs(correlation(dropout(at=1))) < 6 / 512
    assert correlation(dropout()) == pytest.approx(1)


def test_neighbours_in_a_mask_are_uncorrelated():
    """Four draws come from one word of the generator and are still independent."""
    mask = mask_of(dropout(), (512, 512)).flatten().double()
    for lag in (1, 2, 3, 4, 512):
        pair = torch.stack([mask[:-lag], mask[lag:]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 6 / 512


def test_equal_inputs_get_the_very_same_result():
    """q, k and v read one tensor, which is masked once and shared."""
    module, x = dropout(), torch.ones(16, 16)
    module.sharers = 3
    first = module(x)
    assert module(x) is first
    assert module(x) is first


def test_a_result_is_let_go_of_once_all_have_had_it():
    """Checkpointing frees activations after a layer, so no reference may remain."""
    module, x = dropout(), torch.ones(16, 16)
    for sharers in (1, 3):
        module.sharers = sharers
        first = module(x)
        assert [module._last is None for _ in range(sharers - 1) if module(x) is first] == (
            [False, True] if sharers == 3 else []
        )
        assert module._last is None


def test_computing_again_draws_the_same_mask():
    """The recomputation in the backward pass gives the same values in a new tensor."""
    module, x = dropout(), torch.ones(16, 16)
    module.sharers = 3
    first, _, _ = (module(x) for _ in range(3))
    again = module(x.clone())
    assert again is not first
    assert torch.equal(again, first)


def test_another_tensor_is_not_mistaken_for_the_last_one():
    """An equal tensor is masked anew with the same mask."""
    module, x, twin = dropout(), torch.ones(16, 16), torch.full((16, 16), 2.0)
    first, second = module(x), module(twin)
    assert torch.equal(second, first * 2)


def test_a_new_micro_batch_forgets_the_last_result():
    """The same tensor gets a new mask, and the old result is freed."""
    module, x = dropout(), torch.ones(64, 64)
    module.sharers = 2
    first = module(x)
    module.begin(1)
    assert module._last is None
    assert not torch.equal(module(x), first)


def test_evaluation_drops_nothing():
    """The input itself is returned."""
    module, x = dropout(0.9).eval(), torch.ones(4, 4)
    assert module(x) is x


def test_a_probability_of_zero_drops_nothing():
    """This also holds in training, without a draw."""
    x = torch.ones(4, 4)
    assert dropout(0.0)(x) is x


def test_the_highest_probability_still_keeps_something():
    """The probability never rounds to one, where the scale would be infinite."""
    module = dropout(0.99999)
    assert module.threshold == 32767
    assert module(torch.ones(64, 64)).isfinite().all()


@pytest.mark.parametrize("size", [1, 3, 5, 4097])
def test_sizes_that_fill_no_whole_word_work(size):
    """Four draws share a word; a shorter mask is a prefix of a longer one."""
    assert torch.equal(mask_of(dropout(), (size,)), mask_of(dropout(), (8192,))[:size])


def test_the_bits_that_accelerators_draw_are_in_range():
    """On accelerators torch draws 15-bit integers as int16 over the full range."""
    draws = torch.randint(
        32768, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int16
    )
    assert int(draws.min()) >= 0
    assert int(draws.max()) > 32000


def test_projections_of_one_input_share_an_instance():
    """q, k, v share one, and gate, up another; o and down have their own; layers differ."""
    adapted = [(one, SimpleNamespace(lora_dropout={})) for one in MODULES[:-1]]
    streams = share_dropout(adapted, p=0.1, seed=3, adapter="default")
    of = {one.path: module.lora_dropout["default"] for one, module in adapted}
    first = "model.layers.0."
    assert of[f"{first}self_attn.q_proj"] is of[f"{first}self_attn.k_proj"]
    assert of[f"{first}self_attn.q_proj"] is of[f"{first}self_attn.v_proj"]
    assert of[f"{first}mlp.gate_proj"] is of[f"{first}mlp.up_proj"]
    assert len({id(stream) for stream in of.values()}) == len(streams) == 8
    assert len({stream.layer for stream in streams}) == 8
    assert sorted(stream.sharers for stream in streams) == [1, 1, 1, 1, 2, 2, 3, 3]


def test_fewer_targets_leave_the_masks_of_the_others_as_they_are():
    """With q and v only, their masks equal those with all four projections."""
    masks = []
    for chosen in (MODULES[:4], (MODULES[0], MODULES[2])):
        adapted = [(one, SimpleNamespace(lora_dropout={})) for one in chosen]
        share_dropout(adapted, p=0.3, seed=3, adapter="default")
        masks.append(mask_of(adapted[0][1].lora_dropout["default"]))
    assert torch.equal(*masks)


def test_the_stream_names_are_those_of_earlier_releases():
    """Other names would change the masks, and old runs could not be resumed."""
    adapted = [(one, SimpleNamespace(lora_dropout={})) for one in MODULES]
    streams = share_dropout(adapted, p=0.1, seed=3, adapter="default")
    names = [stream.layer for stream in streams]
    assert names[0] == "base_model.model.model.layers.0.self_attn.qkv"
    assert names[3] == "base_model.model.model.layers.0.mlp.down_proj"
    assert names[-1] == "base_model.model.lm_head"


def test_a_model_that_drops_nothing_keeps_peft_s_own_modules():
    """DoRA then skips a matrix product."""
    adapted = [(one, SimpleNamespace(lora_dropout={})) for one in MODULES]
    assert share_dropout(adapted, p=0.0, seed=3, adapter="default") == []
    assert not adapted[0][1].lora_dropout


def test_chunks_before_a_head_have_masks_of_their_own():
    """Rows of one micro-batch differ; beginning it again repeats its masks."""
    module = HeadDropout(0.3, seed=1, layer="lm_head")
    runs = []
    for _ in range(2):
        module.begin(7)
        runs.append([mask_of(module, (8, 64)) for _ in range(3)])
    first, again = runs
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_measuring_moves_no_mask_of_the_head():
    """Only training rows are counted."""
    module = HeadDropout(0.3, seed=1, layer="lm_head")
    module.begin(7)
    expected = mask_of(module, (8, 64))
    module.begin(7)
    module.eval()(torch.ones(5, 64))
    assert torch.equal(mask_of(module.train(), (8, 64)), expected)
