"""Suites, quantizers and adapter methods from the working directory, named in ./conf."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import fork_server
import pytest
from safetensors.numpy import load_file

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import read_item_events

HERE = Path(__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "extending.md").read_text("utf-8")
SECTION = PAGE.partition("## A suite, adapter method or quantizer\n")[2].partition("\n## ")[0]
FILES = dict(
    re.findall(r"^`conf/(\S+)`:\n\n```yaml\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
)
OWN = ("quant=steps", "lora=gains", "lora.start=0.9")


@pytest.fixture
def own(tmp_path):
    """Write modules and options into a directory; return a function that runs commands there."""
    directory = tmp_path / "own"
    for file, text in FILES.items():
        (directory / "conf" / file).parent.mkdir(parents=True)
        (directory / "conf" / file).write_text(text, "utf-8")
    for kind in ("adapter", "quantizer", "suite"):
        (module,) = (HERE / kind).glob("toy_*.py")
        shutil.copy(module, directory)

    def run(*words, code=0, cwd=directory):
        command = [sys.executable, "-m", "mens_exp", *words]
        done = fork_server.run(command, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run.directory = directory
    return run


def facts(run):
    return json.loads(run.manifest.read_text("utf-8"))


def test_a_run_on_named_specs_is_that_on_installed_ones(own, trained, tiny_run, tmp_path):
    """The adapter is bitwise equal; the manifest has the specs and their modules."""
    usual = {word.partition("=")[0]: word for word in tiny_run}
    own(*usual.values(), *OWN, "hydra.run.dir=run")
    run = RunDir(own.directory / "run")
    installed = trained(*OWN)
    (tensors,) = run.adapter.glob("*.safetensors")
    assert tensors.read_bytes() == (installed.adapter / tensors.name).read_bytes()
    assert load_file(tensors)
    classes = facts(run)["provenance"]["own_classes"]
    assert classes["targets"] == ["toy_adapter.SPEC", "toy_quantizer.SPEC"]
    assert classes["files"] == {
        f"toy_{kind}.py": hashlib.sha256((HERE / kind / f"toy_{kind}.py").read_bytes()).hexdigest()
        for kind in ("adapter", "quantizer")
    }
    assert facts(run)["contract"]["digest"] == facts(installed)["contract"]["digest"]

    # Tasks that read the run find its specs by the same files, and say if they are missing.
    own("task=evaluate", "path=run", "suite=letters", "trainer=cpu", "hydra.run.dir=scored")
    scored = RunDir(own.directory / "scored")
    assert {event["item_id"] for event in read_item_events(scored.events)} == set("abcde")
    assert facts(scored)["provenance"]["own_classes"]["targets"] == ["toy_suite.SPEC"]
    own("task=merge", "parity.tokens=64", "path=run", "out=merged", "trainer=cpu")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    said = own("task=evaluate", f"path={run.path}", "trainer=cpu", code=2, cwd=elsewhere).stderr
    assert "quant.quant_type: unknown quantizer" in said
    assert "lora.variant: unknown adapter method" in said
    assert "start where conf/quant/steps.yaml is" in " ".join(said.split())


def test_a_sweep_of_named_and_built_in_specs_reads_the_frozen_options(own, tiny_run):
    """Each job is a process that reads a copy of ./conf."""
    usual = {word.partition("=")[0]: word for word in tiny_run}
    own("-m", *usual.values(), "lora=gains", "quant=steps,nf4", "hydra.sweep.dir=sweep")
    manifests = [json.loads(one.read_text()) for one in own.directory.glob("sweep/*/manifest.json")]
    assert sorted(one["facts"]["quant"] for one in manifests) == ["nf4", "steps"]


def test_two_processes_train_on_named_specs(own, tiny_run):
    """Worker processes of the run find the specs too."""
    usual = {word.partition("=")[0]: word for word in tiny_run} | {"trainer": "trainer=ddp"}
    own(*usual.values(), *OWN, "trainer.devices=2", "hydra.run.dir=run")
    manifest = facts(RunDir(own.directory / "run"))
    assert (manifest["facts"]["quant"], manifest["facts"]["levels"]) == ("steps", 15)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("quant/other.yaml", "_target_: toy_quantizer.SPEC", "does not have the name of its file"),
        ("quant/other.yaml", "_target_: toy_suite.SPEC", "a mens_exp.config.quant.QuantizerSpec"),
        ("suite/other.yaml", "_target_: math.pi", "has the wrong type"),
        ("suite/other.yaml", "_target_: no_such.SPEC", "there is no module no_such"),
        ("lora/other.yaml", "_target_: toy_adapter.SPCE", "the nearest is toy_adapter.SPEC"),
        ("lora/other.yaml", "_target_: broken.SPEC", "its module cannot be imported"),
        (
            "lora/other.yaml",
            "_target_: hollow.SPEC\ntargets: [attention]",
            "there is no module no_such_torch",
        ),
        ("quant/nf3.yaml", "_target_: toy_quantizer.SPEC", "which would take precedence"),
        ("lora/vera2.yaml", "_target_: toy_adapter.SPEC\n_partial_: true", "is not a setting of"),
    ],
)
def test_a_file_that_names_no_usable_spec_is_refused(own, file, text, said):
    """The error comes before anything is read, and includes the original message."""
    (own.directory / "broken.py").write_text("1 / 0\n", "utf-8")
    (own.directory / "hollow.py").write_text(
        "from mens_exp.artifacts.adapter_tensors import AdapterForm\n"
        "from mens_exp.config.lora import AdapterSpec\n"
        "SPEC = AdapterSpec(name='other', method='no_such_torch:IT',\n"
        "    form=AdapterForm(name='other', tensors={'gain': ('out',)}, no_delta='a gain'))\n"
    )
    (own.directory / "conf" / file).write_text(f"# Of mine.\n{text}\n", "utf-8")
    group, name = Path(file).with_suffix("").parts
    words = [f"{group}={name}", "task=plan", "trainer=cpu", "model=tiny_llama"]
    assert said in " ".join(own(*words, code=2).stderr.split())


IN_TWO_PLACES = """
import os
from mens_exp.config.overrides import check
from mens_exp.errors import ConfigError

usual = ["model=tiny_llama", "trainer=cpu", "suite=none", "logger=none"]
(cell,) = check([*usual, "quant=steps"]).cells
assert cell.config.quant.quant_type.spec.code_bits == 5
os.chdir("..")
try:
    check([*usual, "quant.quant_type=steps"])
except ConfigError as error:
    print(error)
"""


def test_a_name_stays_with_its_directory(own):
    """One process composes in two directories; a name of the first is refused in the second.

    A process of its own, because the name stays a member of the setting's enumeration.
    """
    command = [sys.executable, "-c", IN_TWO_PLACES]
    done = fork_server.run(command, cwd=own.directory, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("quant: unknown quantizer")
