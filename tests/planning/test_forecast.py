from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mens_exp.config.compose import compose, typed
from mens_exp.config.quant import BUILT_IN
from mens_exp.layout.shape import shape_of
from mens_exp.planning.activations import Documents
from mens_exp.planning.forecast import documents_of, forecast
from mens_exp.planning.machine import Machine
from mens_exp.planning.throughput_model import (
    Entry,
    append,
    comparison_s,
    flop_per_token,
    ledger_path,
    quantization_s,
    time,
)

CPU = Machine(kind="cpu", name="a CPU", total_bytes=1, free_bytes=1)
GPU = dataclasses.replace(CPU, kind="cuda", name="a GPU")
PARAMETERS, TOKENS = 94_528, 2048  # of the tiny configuration
ENTRY = Entry(
    utc="2026-11-20T05:58:01.123Z",
    device="a CPU",
    family="llama",
    backend="qlora",
    run_id="run",
    contract="0" * 64,
    parameters=PARAMETERS,
    tokens_per_step=TOKENS,
    predicted_peak_bytes=1000,
    measured_peak_bytes=1200,
    flop_per_step=3e12,
    predicted_step_s=9.0,
    measured_step_s=1.0,
)


@pytest.fixture
def ahead(tiny_config, tmp_path):
    """Forecast tiny_llama on a device, with given runs in the ledger."""

    def made(*known, device=CPU):
        ledger_path(tmp_path).unlink(missing_ok=True)
        for entry in known:
            append(ledger_path(tmp_path), entry)
        config = tiny_config()
        documents = Documents(longest=100, typical=100)
        return forecast(config, shape_of(config.model), documents, device, tmp_path)

    return made


def test_three_runs_correct_and_bound_the_next(ahead):
    """They took 20% more than the formula: the estimate follows, with an interval of ±7%."""
    plain, known = ahead(), ahead(ENTRY, ENTRY, ENTRY)
    assert (plain.runs, known.runs) == ((), ("run",) * 3)
    assert known.memory.estimate == pytest.approx(1.2 * plain.memory.estimate, rel=1e-6)
    assert known.memory.high / known.memory.estimate == pytest.approx(1.07, abs=0.01)
    assert known.memory.low / known.memory.estimate == pytest.approx(0.93, abs=0.01)
    assert "3 earlier runs of similar size" in known.memory.basis
    assert known.formula == plain.formula == plain.memory.estimate


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another"},
        {"backend": "proxy"},
        {"parameters": 2 * PARAMETERS + 2},
        {"parameters": PARAMETERS // 2 - 1},
        {"tokens_per_step": 2 * TOKENS + 1},
        {"tokens_per_step": TOKENS // 2 - 1},
    ],
)
def test_runs_of_another_kind_say_nothing(ahead, change):
    """Device and backend must match, and both sizes must be within a factor of two."""
    other = dataclasses.replace(ENTRY, **change)
    assert ahead(other, other, other) == ahead()


@pytest.mark.parametrize(
    "change",
    [
        {"family": "gpt2"},
        {"parameters": 2 * PARAMETERS},
        {"parameters": PARAMETERS // 2},
        {"tokens_per_step": 2 * TOKENS},
        {"tokens_per_step": TOKENS // 2},
    ],
)
def test_runs_of_like_size_count(ahead, change):
    """The family does not matter, and the forecast names the runs."""
    other = dataclasses.replace(ENTRY, **change)
    assert ahead(other, other, other).runs == ("run",) * 3


@st.composite
def of_other_sizes(draw):
    """Draw a run on the main job's device and backend, of any other size and speed."""
    factor = st.floats(2.01, 1e6) | st.floats(1e-4, 0.49)
    sizes = [(draw(factor), 1.0), (1.0, draw(factor)), (draw(factor), draw(factor))]
    parameters, tokens = draw(st.sampled_from(sizes))
    return dataclasses.replace(
        ENTRY,
        parameters=max(1, int(parameters * MAIN_PARAMETERS)),
        tokens_per_step=max(1, int(tokens * MAIN_TOKENS)),
        measured_peak_bytes=draw(st.integers(1, 10**15)),
        measured_step_s=draw(st.floats(1e-6, 1e6)),
    )


MAIN_PARAMETERS, MAIN_TOKENS = 134_515_008, 2048


@given(known=st.lists(of_other_sizes(), min_size=20, max_size=20))
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_twenty_runs_of_other_sizes_move_the_main_job(known, main_job, tmp_path):
    """A single tiny run once turned 5 minutes into 31 hours, and 28 GiB into 20."""
    config, documents = main_job, Documents(longest=512, typical=400)
    shape = shape_of(config.model)
    assert shape.total_parameters == MAIN_PARAMETERS
    empty = forecast(config, shape, documents, CPU, tmp_path / "none")
    path = ledger_path(tmp_path)
    path.unlink(missing_ok=True)
    for entry in known:
        append(path, entry)
    assert forecast(config, shape, documents, CPU, tmp_path) == empty


@pytest.fixture(scope="module")
def main_job():
    """Compose the default configuration."""
    return typed(compose([[]])[0].values)


def test_two_runs_leave_the_formula_alone(ahead):
    """Two are too few to estimate a spread."""
    assert ahead(ENTRY, ENTRY).memory == ahead().memory


def test_rate_of_this_machine_beats_the_table(ahead):
    """3e12 FLOP/s is used from the first run on; the third one adds an interval."""
    assert ahead(ENTRY).pace.rate == 3e12
    known = ahead(ENTRY, ENTRY, ENTRY).pace
    assert known.rate == pytest.approx(3e12)
    assert known.runs == 3
    assert known.low is not None
    assert 0.9 < known.low / 3e12 < 1


def test_gpu_without_a_run_has_no_rate(ahead):
    """The rate is unknown; the first run on the GPU measures it."""
    assert ahead(device=GPU).pace.rate is None
    measured = ahead(dataclasses.replace(ENTRY, device="a GPU"), device=GPU).pace
    assert measured.rate == 3e12


def test_time_is_operations_over_the_rate(ahead):
    """100 tokens to train on and 60 to validate on, where a forward pass costs half as much."""
    pace = ahead(ENTRY).pace
    made = time(pace, 3e10, 100, 60, 50)
    assert (made["estimate"], made["step_s"]) == (1.3, 0.5)
    assert (made["low"], made["high"]) == (0.7, 2.6)
    unknown = time(pace, 3e10, None, 60, 50)
    assert (unknown["estimate"], unknown["step_s"]) == (None, 0.5)


def test_operations_of_a_token(tiny_config):
    """4 FLOP per frozen weight, 6 per adapter weight, 4 per head weight on half of the tokens."""
    shape = shape_of(tiny_config().model)
    weights = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128)
    assert flop_per_token(shape, 1000) == 4 * weights + 6000 + 2 * 320 * 64
    again = flop_per_token(shape, 1000, reference=True) - flop_per_token(shape, 1000)
    assert again == 2 * weights + 320 * 64  # forward only, and the head on half of the tokens


def test_quantizing_takes_time_on_a_cpu_and_is_unknown_on_a_gpu(
    tiny_config,
):
    """It was not measured on a GPU; 8 bits take a fifth of the time of 4 bits."""
    shape = dataclasses.replace(shape_of(tiny_config().model), num_hidden_layers=10_000)
    four, eight, none = (
        quantization_s(shape, "cpu", kind)
        for kind in (BUILT_IN[name] for name in ("nf4", "int8", "none"))
    )
    assert four is not None
    assert eight is not None
    assert none == 0
    assert 1 < eight < four / 5
    assert four > 10
    assert quantization_s(shape, "cuda", BUILT_IN["nf4"]) is None
    compared = comparison_s(shape, "cpu")
    assert compared is not None
    assert 1 < compared < four
    assert comparison_s(shape, "cuda") is None


def test_unknown_documents_are_as_long_as_they_may_be(
    tiny_config,
):
    """seq_len is the most that attention can cost."""
    config = tiny_config("data.seq_len=300")
    assert documents_of(config, {}) == Documents(longest=300, typical=300, varied=True)
    known = {"longest_tokens": 200, "typical_tokens": 50}
    assert documents_of(config, known) == Documents(longest=200, typical=50, varied=True)
    alike = {"longest_tokens": 200, "typical_tokens": 195}
    assert documents_of(config, alike) == Documents(longest=200, typical=195, varied=False)


@pytest.mark.parametrize(
    ("objective", "share"),
    [
        (("objective=last_k",), 1 / 50),
        (("objective=last_k", "objective.k=40"), 40 / 50),
        (("objective=last_k", "objective.k=64"), 1.0),
        (("objective=last_k", "objective.k=0"), 0.5),
        (("objective=assistant",), 0.5),
        (("objective=causal",), 1.0),
    ],
)
def test_share_of_learned_tokens(tiny_config, objective, share):
    """For documents of 50 tokens: the last k, all, or about half as in the main job."""
    settings = tiny_config(*objective).objective
    assert settings.spec.supervised_frac(settings, 50.0) == share


def test_operations_of_the_proxy_are_those_of_learned_positions(tiny_config, tmp_path):
    """By hand: two 64 * 64 projections and the head with LoRA; unpacking costs 154 positions."""
    config = tiny_config("backend=proxy", "objective.k=40", "data.seq_len=512")
    shape = shape_of(config.model)
    made = forecast(config, shape, Documents(longest=50, typical=50), CPU, tmp_path)
    weights, adapter = 2 * 64 * 64 + 320 * 64, 16 * (2 * 128 + 320 + 64)
    expected = (40 / 50 + 154 / 512) * (4 * weights + 6 * adapter)
    assert made.per_token == pytest.approx(expected)
    assert made.pace.rate is not None
    assert made.pace.low == pytest.approx(made.pace.rate / 3)
    assert "learned positions alone" in made.pace.basis
    unknown = forecast(config, shape, Documents(longest=50, typical=50), GPU, tmp_path).pace
    assert unknown.rate is None
