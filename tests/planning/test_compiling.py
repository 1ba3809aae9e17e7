"""The decision whether layers are compiled, and the refusal of what cannot be."""

from __future__ import annotations

import pytest

from mens_exp.config.overrides import check
from mens_exp.errors import SetupError
from mens_exp.planning import compiling, kernels
from mens_exp.planning.checks.machine import check_compiling
from mens_exp.planning.compiling import Rate, why_not, why_not_worth
from mens_exp.planning.estimate import make_plan
from mens_exp.planning.kernels import Part, reasons
from mens_exp.report import plan_view

TRUE = "trainer.compile=true"


@pytest.fixture
def rate(monkeypatch):
    """Set the rate of CPUs."""

    def put(saved_frac, compile_s):
        monkeypatch.setitem(compiling.RATES, "cpu", Rate(saved_frac, compile_s))

    return put


def cells_of(plan):
    (section,) = plan_view.document(plan).parts
    return [cell for facts in section.parts for cell in facts.cells]


def test_compiling_pays_if_it_saves_more_than_it_takes(rate):
    """A tenth of 401 s is more than 40 s, and a tenth of 400 s is not."""
    rate(0.1, 40)
    assert why_not_worth("cpu", 401) is None
    assert why_not_worth("cpu", 400) == "it would save 40 s of the 400 s left, and take 40 s"
    assert why_not_worth("cpu", None) == "the time of the run is unknown"


def test_a_gain_within_the_noise_is_none(rate):
    """Below a twentieth of a step, no run is long enough."""
    rate(0.049, 1)
    assert why_not_worth("cpu", 1e9) == (
        "it saves 4.9% of a step on cpu, as measured; less than 5% does not count"
    )
    rate(0.05, 1)
    assert why_not_worth("cpu", 1e9) is None


def test_nothing_is_compiled_on_devices_without_a_measured_rate():
    """That is so of every GPU."""
    assert why_not_worth("cuda", 1e9) == "what it saves has not been measured on cuda"


def test_a_plan_says_that_layers_are_compiled(tiny_config, tmp_path, rate):
    """The page has a line for it only then; the record has the reason in either case."""
    plans = [make_plan(tiny_config(asked), tmp_path) for asked in (TRUE, "trainer.compile=auto")]
    cells = [cells_of(plan) for plan in plans]
    lines = [next((one.text for one in found if one.label == "compile"), None) for found in cells]
    assert lines == ["decoder layers: trainer.compile=true", None]
    assert plans[1]["compile"]["reason"].startswith("it saves 1.4% of a step on cpu")
    rate(0.5, 0)
    made = make_plan(tiny_config("trainer.compile=auto"), tmp_path)["compile"]
    assert made == {"layers": "compiled", "reason": "it pays, by the measured rates"}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["backend=proxy"], "backend=proxy has no decoder layers"),
        (["data.packing=false"], "data.packing=false pads each micro-batch"),
        (["trainer=ddp", "trainer.devices=2"], "several processes share the run"),
    ],
)
def test_what_cannot_be_compiled_is_refused_if_asked_for(tiny_config, overrides, reason):
    """With auto, the reason is recorded; with true, it is an error before anything runs."""
    asked = tiny_config(TRUE, *overrides)
    assert why_not(asked, kind="cpu").startswith(reason)
    (found,) = check_compiling(asked)
    assert isinstance(found, SetupError)
    assert (found.where, found.found.startswith(f"true, but {reason}")) == (
        "trainer.compile",
        True,
    )
    assert not list(check_compiling(tiny_config(*overrides)))


def test_a_compiler_is_needed(tiny_config, monkeypatch, tmp_path):
    """On a CPU, it is that of CXX or on the PATH; on a GPU, it is Triton."""
    config = tiny_config(TRUE)
    assert why_not(config, kind="cpu") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert why_not(config, kind="cpu") == "this machine has no C++ compiler, which torch needs"
    program = tmp_path / "clang++"
    program.touch(0o755)
    assert why_not(config, kind="cpu") is None
    monkeypatch.setenv("CXX", "absent")
    assert why_not(config, kind="cpu") is not None
    monkeypatch.setattr(compiling, "find_spec", lambda _: None)
    assert why_not(config, kind="cuda") == "Triton is not installed, which torch needs on a GPU"


def test_compiled_layers_leave_liger_the_head_alone(tiny_config, monkeypatch):
    """Norms, RoPE and SwiGLU are parts of the graphs."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    found = reasons(tiny_config(TRUE), on_gpu=True)
    assert found.pop(Part.HEAD) is None
    assert set(found.values()) == {"trainer.compile=true compiles it"}


@pytest.mark.parametrize("value", ["1", "on", "yes", "null", "fast"])
def test_another_value_is_refused(value):
    """The message names the three."""
    (found,) = check([f"trainer.compile={value}"]).problems
    assert str(found).startswith("trainer.compile: is not a valid value")
    assert "true, false, or auto" in str(found)
