from __future__ import annotations

import pytest

from mens_exp.backends.protocol import Stream

PROMPT = [5, 6, 7, 8]
NO_END = {319}


@pytest.fixture
def backend(tiny_backend):
    return tiny_backend("quant.compute_dtype=f32", "lora.dropout=0.4", live=True)


def finished(stream):
    while not stream.is_done:
        stream.advance()
    return stream.ids


def stream(backend, prompt=PROMPT, **options):
    settings = {"end_ids": NO_END, "max_new_tokens": 12, **options}
    return Stream(backend, prompt, **settings)


def test_tokens_come_as_transformers_generates_them(backend):
    """The oracle is transformers' generate(), without our cache and loop."""
    (expected,) = backend.generate([PROMPT], max_new_tokens=12, end_ids=NO_END)
    assert finished(stream(backend)) == expected


def test_base_and_tuned_take_turns_without_touching_each_other(backend):
    """Alternating token by token gives the same as separate calls."""
    with backend.base_only():
        (base,) = backend.generate([PROMPT], max_new_tokens=12, end_ids=NO_END)
    (tuned,) = backend.generate([PROMPT], max_new_tokens=12, end_ids=NO_END)
    assert base != tuned
    two = [stream(backend, condition=backend.base_only), stream(backend)]
    for _ in range(12):
        for one in two:
            one.advance()
    assert [one.ids for one in two] == [base, tuned]


def test_an_end_id_ends_an_answer_and_the_limit_cuts_it(backend):
    """Only an end id counts as the model's own end."""
    free = finished(stream(backend))
    ended = stream(backend, end_ids={free[3]})
    assert finished(ended) == free[: free.index(free[3]) + 1]
    assert ended.is_ended
    cut = stream(backend, max_new_tokens=2)
    assert finished(cut) == free[:2]
    assert not cut.is_ended
    cut.advance()
    assert cut.ids == free[:2]


def test_drawn_tokens_repeat_under_a_seed(backend):
    """Another seed draws other tokens; near temperature 0 the most likely is drawn."""
    warm = {"temperature": 5.0}
    first = finished(stream(backend, seed=1, **warm))
    assert finished(stream(backend, seed=1, **warm)) == first
    assert finished(stream(backend, seed=2, **warm)) != first
    assert finished(stream(backend, temperature=1e-7)) == finished(stream(backend))


def test_an_answer_ends_where_the_models_positions_do(backend, monkeypatch):
    """This holds whatever the limit is."""
    monkeypatch.setattr(type(backend), "max_positions", property(lambda _self: 7))
    assert len(finished(stream(backend))) == 3
