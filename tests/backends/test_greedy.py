from __future__ import annotations

import functools
import random
import warnings
from collections import Counter

import families
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from mens_exp.backends import frozen_base, generation
from mens_exp.backends.generation import Answers, evaluating, greedy, next_logits
from mens_exp.data.batch import packed_batch
from mens_exp.model import kernels
from mens_exp.quant.layers import binding_that_holds, quantized_linears

F32 = "quant.compute_dtype=f32"
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [16]]
NO_END = {319}  # an id that must not occur


@pytest.fixture
def backend(tiny_backend):
    return tiny_backend(F32, "lora.dropout=0.4", live=True)


def complete(backend, prompts, *, limit=12, end_ids=NO_END):
    return backend.generate(prompts, max_new_tokens=limit, end_ids=end_ids)


def test_each_prompt_is_continued_as_if_it_were_alone(backend):
    """Left padding changes no id in float32."""
    together = complete(backend, PROMPTS)
    assert together == [complete(backend, [prompt])[0] for prompt in PROMPTS]
    assert [len(ids) for ids in together] == [12, 12, 12]


FAMILIES = {  # the fastest way that is right
    "camembert": "_Recomputed",  # numbers positions from its padding id
    "openai-gpt": "_Recomputed",  # has no cache
    "falcon_h1": "_Recomputed",  # keeps a state of its own
    "recurrent_gemma": "_Recomputed",  # likewise, outside the cache
    "moshi": "_Batch",  # with positions, unlike transformers' default
    "mpt": "partial",  # its attention counts padding behind a common prefix
    "llama": "_Batch",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_passes_without_a_cache(name, tmp_path):
    """In batches of any size, with a common prefix or without, and token by token."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory = families.make_fitting(name, tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    drawn = random.Random(5)
    for common in (0, 20):
        prefix = drawn.choices(range(3, 320), k=common)
        prompts = [prefix + drawn.choices(range(3, 320), k=own) for own in (1, 3, 12, 23)]
        expected = [by_hand(model, prompt, 4) for prompt in prompts]
        for size in (1, 3, None):
            found = greedy(model, prompts, max_new_tokens=4, end_ids=set(), batch_size=size)
            assert found == expected
        for prompt, answer in zip(prompts, expected, strict=True):
            cache, said, new = None, [], prompt
            for _ in answer:
                logits_V, cache = next_logits(model, new, cache)
                new = [int(logits_V.argmax())]
                said += new
            assert said == answer
    way = generation._WAYS[model]
    assert getattr(way, "__name__", type(way).__name__) == FAMILIES[name]


def by_hand(model, prompt, count):
    """Return the most likely tokens by passes over whole sequences."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_answers_make_room_for_prompts_as_they_end(backend, monkeypatch):
    """Two at a time need fewer passes than batches that wait for their longest answer.

    Each prompt is read once, copies of it with it; no prompt waits once there is room.
    """
    prompts = [[20 + n, 5, 6, 7] for n in range(8)]
    free = complete(backend, prompts, limit=24)
    ends = {free[n][0] for n in range(1, 8)} - set(free[0])
    expected = [complete(backend, [prompt], limit=24, end_ids=ends)[0] for prompt in prompts]
    lengths = [len(ids) for ids in expected]
    assert max(lengths) > 2 * sorted(lengths)[4]
    passes = []
    model, forward = type(backend.causal_lm), type(backend.causal_lm).forward

    @functools.wraps(forward)
    def counted(self, *args, **named):
        passes.append(named["input_ids"].shape)
        return forward(self, *args, **named)

    monkeypatch.setattr(model, "forward", counted)
    times = {}
    ours = backend.generate(
        prompts, max_new_tokens=24, end_ids=ends, batch_size=2, on_end=times.__setitem__
    )
    assert ours == expected
    assert sum(rows * width for rows, width in passes if width > 1) == 4 * len(prompts)
    waiting = sum(max(lengths[at : at + 2]) for at in range(0, 8, 2))
    assert sum(width == 1 for _, width in passes) < waiting - 8
    assert all(rows <= 2 for rows, _ in passes)
    assert sorted(times) == list(range(8))
    assert all(seconds > 0 for seconds in times.values())

    passes.clear()
    twice = backend.generate([prompts[0]] * 3, max_new_tokens=4, end_ids=NO_END)
    assert twice == [expected[0][:4]] * 3 or len(expected[0]) < 4
    assert passes[0] == (1, 4)


def test_a_prefix_that_all_have_is_read_once(backend, monkeypatch):
    """With a system prompt of seventeen ids, each answer equals that of its prompt alone."""
    prefix = list(range(30, 47))
    prompts = [[*prefix, 5], [*prefix, 6, 7, 8], [*prefix, 9, 10]]
    expected = [complete(backend, [prompt])[0] for prompt in prompts]
    read = []
    model, forward = type(backend.causal_lm), type(backend.causal_lm).forward

    @functools.wraps(forward)
    def counted(self, *args, **named):
        read.append(named["input_ids"].numel())
        return forward(self, *args, **named)

    monkeypatch.setattr(model, "forward", counted)
    assert complete(backend, prompts) == expected
    assert read[:2] == [17, 9]

    read.clear()
    assert backend.generate(prompts, max_new_tokens=12, end_ids=NO_END, batch_size=1) == expected
    assert sum(read) == 17 + 6 + 3 * 11


@pytest.mark.parametrize("quant", ["nf4", "fp4", "int8", "nf3", "uint4"])
@pytest.mark.parametrize(("dtype", "has_bf16"), [("bf16", True), ("bf16", False), ("f32", True)])
def test_weights_are_dequantized_once_for_all_tokens(
    tiny_backend, monkeypatch, quant, dtype, has_bf16
):
    """Logits of every step are bitwise those of weights that are dequantized for each token.

    Without free memory, nothing is kept; afterwards, nothing is kept either.
    """
    monkeypatch.setattr(kernels, "has_bf16", lambda _: has_bf16)
    backend = tiny_backend(f"quant={quant}", f"quant.compute_dtype={dtype}", live=True)
    logits = []

    def taken(self, rows, logits_BV):
        logits.append(logits_BV)
        return take(self, rows, logits_BV)

    take = Answers.take
    monkeypatch.setattr(Answers, "take", taken)
    kept = complete(backend, PROMPTS, limit=5)
    layers = quantized_linears(backend.causal_lm)
    asked = []
    binding = type(binding_that_holds(next(iter(layers.values()))))
    weight = binding.weight
    monkeypatch.setattr(
        binding,
        "weight",
        lambda self, layer, wanted: asked.append(layer) or weight(self, layer, wanted),
    )
    complete(backend, PROMPTS, limit=5)
    assert Counter(map(id, asked)) == {id(layer): 1 for layer in layers.values()}
    monkeypatch.setattr(frozen_base, "host_memory", lambda: (1 << 40, 1000))
    asked.clear()
    assert complete(backend, PROMPTS, limit=5) == kept
    steps = len(logits) // 3
    assert all(map(torch.equal, logits[:steps], logits[-steps:]))
    assert not backend.weights.are_kept(next(iter(layers.values())))


@pytest.mark.parametrize(("room", "kept"), [(100.0, torch.float32), (2.0, torch.bfloat16)])
def test_weights_are_kept_in_the_format_of_products(tiny_backend, monkeypatch, room, kept):
    """Without bf16 instructions they are converted once, the head's too, if there is room.

    A quarter of the free memory is used, ``room`` bytes for each quantized weight.
    """
    monkeypatch.setattr(kernels, "has_bf16", lambda _: False)
    backend = tiny_backend("quant.compute_dtype=bf16", live=True)
    head = backend.causal_lm.get_output_embeddings()
    layers = list(quantized_linears(backend.causal_lm).values())
    free = 4 * room * sum(one.in_features * one.out_features for one in layers)
    monkeypatch.setattr(frozen_base, "host_memory", lambda: (1 << 40, free))
    layer = layers[0]
    narrow = backend.weights.of(layer, torch.bfloat16)
    with backend.weights.dequantized_once(backend.causal_lm, torch.bfloat16):
        weight = backend.weights.of(layer, torch.bfloat16)
        assert weight.dtype is kept
        assert torch.equal(weight, narrow)
        assert backend.weights.of(layer, torch.bfloat16) is weight
        assert backend.weights.are_kept(head) is (kept is torch.float32)


def test_the_head_is_not_copied_for_each_prompt(backend):
    """No tensor has the head's weight once per prompt, as torch makes it for strided states."""
    head = backend.causal_lm.get_output_embeddings().weight

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                self.most = max(self.most, made.untyped_storage().nbytes())
            return made

    with Sizes() as sizes:
        complete(backend, PROMPTS * 4, limit=2)
    assert 0 < sizes.most < 2 * head.nbytes


def test_every_id_is_the_most_likely_next_one(backend, documents_of):
    """The completion is fed back through the training forward pass."""
    (completion,) = complete(backend, [PROMPTS[0]])
    ids = PROMPTS[0] + completion
    encoded = documents_of([ids], [[0] * 4 + [1] * 12])
    backend.eval()
    with torch.no_grad():
        logits = backend.head(backend(packed_batch(encoded, [[0]], index=0)))
    assert logits.argmax(-1).tolist() == completion


@pytest.mark.parametrize("kind", ["qlora", "lora", "full", "burn"])
def test_bf16_products_generate_on_every_backend(tiny_backend, documents_of, kind):
    """In bf16 each id is the most likely one up to rounding."""
    backend = tiny_backend(f"backend={kind}", "quant.compute_dtype=bf16").eval()
    (completion,) = complete(backend, [PROMPTS[0]])
    encoded = documents_of([PROMPTS[0] + completion], [[0] * 4 + [1] * 12])
    with torch.no_grad():
        logits_MV = backend.head(backend(packed_batch(encoded, [[0]], index=0))).float()
    chosen_M = logits_MV.gather(1, torch.tensor(completion)[:, None])[:, 0]
    assert len(completion) == 12
    assert (logits_MV.amax(-1) - chosen_M).max() < 0.01 * logits_MV.std()


def test_a_completion_stops_at_the_first_end_id_and_keeps_it(backend):
    """The first of two end ids ends the completion; the others go on to theirs or the limit."""
    free = complete(backend, PROMPTS)
    ends = {free[0][4], free[1][7]}

    def cut(ids):
        return ids[: next((i for i, token in enumerate(ids) if token in ends), 11) + 1]

    stopped = complete(backend, PROMPTS, end_ids=ends)
    assert stopped == [cut(ids) for ids in free]
    assert len(stopped[0]) < 12


def test_nothing_is_dropped_while_generating(backend):
    """In training mode and at any micro-batch, completions equal those of evaluation mode."""
    expected = complete(backend.eval(), PROMPTS)
    backend.train()
    for index in (0, 1):
        backend.begin(index)
        assert complete(backend, PROMPTS) == expected


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_as_before_afterwards(backend, training):
    """The mode of each module is restored, even if they differ."""
    backend.train(training)
    odd = backend.causal_lm.model.layers[0]
    odd.train(not training)
    before = [module.training for module in backend.modules()]
    complete(backend, PROMPTS, limit=2)
    assert [module.training for module in backend.modules()] == before


def test_the_mode_is_as_before_after_an_error(backend):
    """An error does not leave the model in evaluation mode."""
    before = [module.training for module in backend.train().modules()]
    seen = []

    def fail():
        with evaluating(backend):
            seen.append(backend.training)
            raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        fail()
    assert seen == [False]
    assert [module.training for module in backend.modules()] == before


def test_sampling_settings_of_the_checkpoint_play_no_part(backend):
    """A repetition penalty in generation_config.json would change greedy decoding."""
    expected = complete(backend, PROMPTS)
    loaded = backend.causal_lm.generation_config
    loaded.repetition_penalty, loaded.no_repeat_ngram_size = 9.0, 1
    loaded.do_sample, loaded.temperature, loaded.max_length = True, 3.0, 5
    assert complete(backend, PROMPTS) == expected


def test_the_base_is_what_completes_while_the_adapter_is_off(backend, tiny_backend):
    """With the adapter off, completions equal those of a fresh graph; with it on, they do not."""
    fresh = complete(tiny_backend(F32), PROMPTS)
    assert complete(backend, PROMPTS) != fresh
    with backend.base_only():
        assert complete(backend, PROMPTS) == fresh


def test_generating_leaves_the_gradients_of_the_next_step_as_they_were(backend, random_documents):
    """No inference tensor or repacked weight remains."""
    from mens_exp.data.batch import packed_batch

    batch = packed_batch(random_documents([20]), [[0]], index=0)

    def gradient():
        backend.train().zero_grad()
        backend.begin(0)
        backend(batch).square().sum().backward()
        found = backend.trainable()["l0.q.lora_a"].grad
        assert found is not None
        return found.clone()

    before = gradient()
    complete(backend, PROMPTS)
    assert torch.equal(gradient(), before)


def test_a_limit_of_one_token_gives_one(backend):
    """A completion of one token is possible."""
    ids = greedy(backend.causal_lm, [PROMPTS[0]], max_new_tokens=1, end_ids=NO_END)
    assert [len(row) for row in ids] == [1]
