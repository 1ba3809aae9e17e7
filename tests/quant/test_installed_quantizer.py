"""A quantizer of an installed package: one object, one YAML, and this test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mens_exp.config import quant
from mens_exp.config.quant import GROUP, QuantizerSpec
from mens_exp.errors import SetupError
from mens_exp.quant.binding import binding_of

TOY = Path(__file__).parent / "toy"


@pytest.fixture(scope="module")
def installed(tmp_path_factory, tiny_run):
    """Install the toy the way pip does, and return a function that types a command beside it."""
    place = tmp_path_factory.mktemp("site")
    shutil.copy(TOY / "toy_quantizer.py", place)
    about = place / "toy_quantizer-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-quantizer\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\nsteps = toy_quantizer:SPEC\n")
    work = tmp_path_factory.mktemp("work")
    shutil.copytree(TOY / "conf", work / "conf")

    def typed(*words):
        # A process of its own, because the schema reads the entry points when it is imported.
        done = subprocess.run(
            [sys.executable, "-m", "mens_exp", *tiny_run, *words],
            cwd=work,
            env={**os.environ, "PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done, work

    return typed


def test_a_run_trains_on_an_installed_quantizer(installed):
    """The base is quantized, agrees with transformers over its values, and is recorded by name."""
    done, work = installed("quant=steps", "hydra.run.dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((work / "run" / "manifest.json").read_text("utf-8"))
    facts = manifest["facts"]
    assert (facts["quant"], facts["levels"]) == ("steps", 15)
    assert facts["quantized_linears"] == 14  # seven in each of two layers
    compared = manifest["data_contract"]["probe"]["reference"]
    assert 0 < compared["gradient"] < 1e-4
    adapter = json.loads((work / "run" / "adapter" / "adapter_manifest.json").read_text("utf-8"))
    assert adapter["quant"] == {"base_quant": "steps", "double_quant": False}


def test_its_settings_are_those_that_it_reads(installed):
    """A block size has no effect on rows that share a step; the refusal is that of int8."""
    done, _ = installed("quant=steps", "quant.block_size=128", "task=plan")
    assert done.returncode == 2
    assert "quant.block_size" in done.stderr
    assert "with quant.quant_type=steps" in done.stderr


def offered(monkeypatch, **offers):
    """Have the installed packages offer these objects."""
    found = {
        name: [EntryPoint(name=name, value=value, group=GROUP) for value in values]
        for name, values in offers.items()
    }
    quant.known.cache_clear()
    monkeypatch.setattr(quant, "_installed", lambda: found)


@pytest.fixture(autouse=True)
def forgets():
    """Leave nothing of what a test offered to the next one."""
    yield
    quant.known.cache_clear()


def test_what_cannot_be_imported_is_named(monkeypatch):
    """The message has the package's own error, and the run that asks for it ends there."""
    offered(monkeypatch, steps=["no_such_module:SPEC"])
    with pytest.raises(SetupError, match=r"(?s)cannot be imported.*no_such_module"):
        quant.known("steps")
    assert quant.known("nf4") is not None


@pytest.mark.parametrize("value", ["math:pi", "mens_exp.config.quant:GROUP"])
def test_what_is_no_quantizer_is_refused(monkeypatch, value):
    """An entry point may point to anything."""
    offered(monkeypatch, steps=[value])
    with pytest.raises(SetupError, match="a QuantizerSpec with the name steps"):
        quant.known("steps")


@pytest.mark.parametrize(
    ("name", "values"), [("nf4", ["one:SPEC"]), ("steps", ["one:SPEC", "two:SPEC"])]
)
def test_two_quantizers_of_one_name_are_refused(monkeypatch, name, values):
    """Neither a built-in one nor another package's is replaced in silence."""
    offered(monkeypatch, **{name: values})
    with pytest.raises(SetupError, match=f"several quantizers are called {name}"):
        quant.known(name)


@pytest.mark.parametrize("binding", ["no_such_module:IT", "math:pi", "math:no_such_name"])
def test_a_quantizer_without_a_binding_is_refused(binding):
    """What loads the weights is imported when a base is loaded, and has to be a binding."""
    spec = QuantizerSpec(name="nowhere", binding=binding, code_bits=8)
    with pytest.raises(SetupError, match="the quantizer nowhere has no binding"):
        binding_of(spec)
