from __future__ import annotations

from collections import Counter

import pytest
import torch

from mens_exp.backends.generation import Draw, Sampling, Stops, StopWatch

F32 = "quant.compute_dtype=f32"
NO_END = {319}
PROMPTS = [[5 + row, *range(9, 9 + row % 5)] for row in range(16)]


def drawn(*, temperature=1.0, top_p=1.0, draws=4000):
    """Draw from probabilities 0.5, 0.3, 0.2 for ids 2, 0, 1."""
    logits = torch.log(torch.tensor([0.3, 0.2, 0.5])).repeat(draws, 1)
    draw = Draw(Sampling(temperature=temperature, top_p=top_p, seeds=list(range(draws))))
    return Counter(draw(logits).tolist())


def test_tokens_come_up_as_often_as_they_are_likely():
    """Frequencies over 4,000 draws are within four standard errors."""
    counts = drawn()
    for token, chance in ((2, 0.5), (0, 0.3), (1, 0.2)):
        assert abs(counts[token] / 4000 - chance) < 4 * (chance * (1 - chance) / 4000) ** 0.5


def test_temperature_sharpens():
    """At 0.5 probabilities are squared: 25, 9 and 4 of 38."""
    counts = drawn(temperature=0.5)
    assert counts[2] / 4000 == pytest.approx(25 / 38, abs=0.03)
    assert counts[1] / 4000 == pytest.approx(4 / 38, abs=0.02)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {2}), (0.5, {2}), (0.7, {0, 2}), (1.0, {0, 1, 2})]
)
def test_top_p_keeps_the_fewest_that_have_the_share(top_p, kept):
    """The most likely token is always included."""
    assert set(drawn(top_p=top_p, draws=500)) == kept


def test_a_row_draws_from_its_own_stream():
    """Its draws do not depend on the other rows or their order."""
    logits = torch.zeros(3, 50)
    together = Draw(Sampling(temperature=1.0, top_p=1.0, seeds=[7, 8, 9]))
    alone = Draw(Sampling(temperature=1.0, top_p=1.0, seeds=[8]))
    assert [together(logits)[1].item() for _ in range(5)] == [
        alone(logits[:1])[0].item() for _ in range(5)
    ]
    picked = Draw(Sampling(temperature=1.0, top_p=1.0, seeds=[7, 8, 9]))
    fresh = Draw(Sampling(temperature=1.0, top_p=1.0, seeds=[7, 8, 9]))(logits)
    assert picked(logits[:1], [2]).item() == fresh[2].item()


@pytest.fixture(scope="module", params=["qlora", "proxy"])
def backend(request, tiny_backend):
    """Return the graph based on transformers, or our own."""
    more = (F32,) if request.param == "qlora" else ("backend=proxy", F32)
    return tiny_backend(*more, live=True)


def completed(backend, rows, **options):
    prompts = [PROMPTS[row] for row in rows]
    return backend.generate(prompts, max_new_tokens=8, end_ids=NO_END, **options)


def sampling(rows, seed=0):
    return Sampling(temperature=1.0, top_p=0.95, seeds=[seed * 1000 + row for row in rows])


def test_an_item_gets_the_same_sample_whatever_the_batch(backend):
    """The sample is the same alone and among sixteen, and depends on the seed."""
    rows = list(range(16))
    together = completed(backend, rows, sampling=sampling(rows))
    alone = [completed(backend, [row], sampling=sampling([row]))[0] for row in rows]
    assert together == alone
    assert together != completed(backend, rows, sampling=sampling(rows, seed=1))
    assert together != completed(backend, rows)


def test_greedy_text_is_the_same_alone_and_among_sixteen(backend):
    """In float32 all texts agree; the requirement is 99 of 100."""
    rows = list(range(16))
    together = completed(backend, rows)
    same = sum(completed(backend, [row])[0] == together[row] for row in rows)
    assert same / len(rows) >= 0.99


def test_a_stop_text_ends_the_answer_that_reaches_it(backend):
    """Only that answer ends, with its ids up to the stop text, which is not an end marker."""

    def decode(ids):
        return "".join(f"<{token}>" for token in ids)

    free = completed(backend, [0, 1, 2])
    stop = decode(free[0][2:4])
    stops = Stops(texts=[[stop], [], []], decode=decode)
    stopped = completed(backend, [0, 1, 2], stops=stops)
    first = next(n for n in range(1, 9) if stop in decode(free[0][:n]))
    assert stopped == [free[0][:first], free[1], free[2]]
    assert len(stopped[0]) < 8


def test_a_watch_remembers_where_an_answer_stopped():
    """The stop text may span tokens, and later text does not matter."""
    watch = StopWatch(Stops(texts=[["ab"], []], decode=lambda ids: "".join(map(chr, ids))))
    assert not watch.has_stopped(0, [ord("x"), ord("a")])
    assert watch.has_stopped(0, [ord("x"), ord("a"), ord("b")])
    assert watch.has_stopped(0, [ord("x"), ord("a"), ord("b"), 0, 0])
    assert not watch.has_stopped(1, [ord("a"), ord("b")])
    assert watch.lengths == {0: 3}
