"""Errors in what an installed package offers are reported the same way for every kind."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config import option_files
from mens_exp.config.data_sources import SOURCES
from mens_exp.config.lora import ADAPTERS
from mens_exp.config.objective import OBJECTIVES
from mens_exp.config.quant import QUANTIZERS
from mens_exp.config.suite import SUITES
from mens_exp.errors import SetupError

HERE = Path(__file__).parent
GROUPS = {
    "adapter": "mens_exp.adapter_methods",
    "quantizer": "mens_exp.quantizers",
    "source": "mens_exp.sources",
    "suite": "mens_exp.suites",
}
REGISTRIES = [ADAPTERS, OBJECTIVES, QUANTIZERS, SOURCES, SUITES]


@pytest.fixture(params=REGISTRIES, ids=lambda one: one.kind)
def offered(request, monkeypatch):
    """Return a registry for which installed packages offer the given objects."""

    def offer(**values):
        registry = dataclasses.replace(request.param)  # nothing loaded yet
        found = [
            EntryPoint(name=name, value=value, group=registry.group)
            for name, several in values.items()
            for value in several
        ]
        module = "mens_exp.config.plugins.entry_points"
        monkeypatch.setattr(module, lambda group: found if group == registry.group else [])
        return registry

    offer.ours = request.param
    return offer


def test_what_cannot_be_imported_is_named(offered):
    """The message has the package's own error, and the run that needs it ends."""
    registry = offered(thirds=["no_such_module:SPEC"])
    with pytest.raises(SetupError, match=r"(?s)cannot be imported.*no_such_module"):
        registry.known("thirds")
    assert all(registry.known(name) is spec for name, spec in offered.ours.built_in.items())


@pytest.mark.parametrize("value", ["math:pi", "mens_exp.config.plugins:Registry"])
def test_what_is_of_another_kind_is_refused(offered, value):
    """An entry point may refer to anything."""
    registry = offered(thirds=[value])
    with pytest.raises(SetupError, match=f"a {registry.spec.__name__} with the name thirds"):
        registry.known("thirds")


def test_a_spec_of_another_name_is_refused(offered):
    """Records use the name of the spec, and settings that of the entry point."""
    ours = next(iter(offered.ours.built_in))
    offered.ours.spec.another = offered.ours.built_in[ours]  # any importable object
    place = f"{offered.ours.spec.__module__}:{offered.ours.spec.__qualname__}.another"
    try:
        with pytest.raises(SetupError, match="with the name thirds"):
            offered(thirds=[place]).known("thirds")
    finally:
        del offered.ours.spec.another


@pytest.mark.parametrize("others", [1, 2])
def test_several_of_one_name_are_refused(offered, others):
    """Neither our own nor another package's is replaced silently."""
    name = next(iter(offered.ours.built_in)) if others == 1 else "thirds"
    registry = offered(**{name: ["one:SPEC", "two:SPEC"][:others]})
    what = f"several {registry.kind}s are called {name}"
    with pytest.raises(SetupError, match=what):
        registry.known(name)


def test_a_file_and_a_package_of_one_name_are_refused(offered, tmp_path, monkeypatch):
    """A file of ./conf replaces nothing silently either."""
    registry = offered(thirds=["one:SPEC"])
    if registry.options is None:
        assert registry.named_in_conf() == {}  # the option's files name classes
        return
    file = tmp_path / "conf" / registry.options / "thirds.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("_target_: mine.SPEC\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match=f"several {registry.kind}s are called thirds"):
        registry.known("thirds")


def test_only_names_that_a_setting_can_have_are_offered(offered):
    """Other names are skipped, since no command can select them."""
    registry = offered(thirds=["one:SPEC"], Third=["one:SPEC"], mro=["one:SPEC"])
    assert registry.installed_names() == ("thirds",)


def test_what_nobody_offers_is_unknown(offered):
    """Records from elsewhere may have unknown names."""
    assert offered().known("thirds") is None


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("data=broken", "data source"),
        ("lora.variant=broken", "adapter method"),
        ("objective=broken", "objective"),
        ("quant.quant_type=broken", "quantizer"),
        ("suite=broken", "suite"),
    ],
)
def test_a_command_that_asks_for_a_broken_package_says_which(trained, tmp_path, word, kind):
    """The environment is at fault; commands that do not need the package still work."""
    done = trained(word, code=3)
    assert f"an installed {kind} cannot be imported" in done.stderr
    assert "no_such_module" in done.stderr
    assert "repair or uninstall broken" in done.stderr
    assert not (tmp_path / "run").exists()


PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "extending.md").read_text("utf-8")
SHOWN = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize(
    ("kind", "option", "command"),
    [
        ("suite", "conf/suite/letters.yaml", "task=evaluate path=base suite=letters suite.items=5"),
        ("adapter", "conf/lora/gains.yaml", "lora=gains lora.start=0.9"),
        ("source", "conf/data/tables.yaml", "data=tables data.upto=9"),
        ("quantizer", "conf/quant/steps.yaml", "quant=steps"),
    ],
)
def test_the_page_shows_what_the_tests_install(typed, kind, option, command):
    """The page has the exact module, its option and entry point, and a working command."""
    (module,) = (HERE / kind).glob("toy_*.py")
    assert SHOWN[module.name] == module.read_text("utf-8")
    name = Path(option).name
    installed = yaml.safe_load((HERE / kind / name).read_text("utf-8"))
    assert yaml.safe_load(SHOWN[option]) == installed
    points = tomllib.loads(SHOWN["pyproject.toml of your package"])["project"]["entry-points"]
    group = GROUPS[kind]
    assert points[group] == {Path(option).stem: f"{module.stem}:SPEC"}
    assert f"\npython -m mens_exp {command}\n" in PAGE
    tiny = ["model=tiny_llama", "trainer=cpu", "logger=none", "hydra.run.dir=run"]
    words = command.split()
    if "task=evaluate" not in words:
        rows = [] if kind == "source" else ["data=tables", "data.upto=4"]
        tiny += [*rows, "suite=none", "trainer.max_steps=2", "schedule=constant"]
        tiny += ["trainer.accumulate_grad_batches=1"]
    typed(*words, *tiny)


def test_a_package_brings_options_of_its_own(typed, tmp_path):
    """Entry points provide a schedule and a module without a file in ./conf."""
    tiny = ["model=tiny_llama", "trainer=cpu", "logger=none", "suite=none", "trainer.max_steps=4"]
    own = ["schedule=halving", "module=watched", "data=tables", "data.upto=6"]
    typed(*tiny, *own, "optim.lr=1e-3", "hydra.run.dir=run")
    run = RunDir(tmp_path / "run")
    rates = [e["payload"]["optim/lr"] for e in read_events(run.telemetry) if e["event"] == "step"]
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4]
    manifest = Manifest.read(run.manifest)
    assert "lab/index" in manifest.facts["metrics"]
    targets = manifest.provenance["own_classes"]["targets"]
    assert {"toy_lab.module.Watched", "torch.optim.lr_scheduler.StepLR"} <= set(targets)


def test_a_package_without_its_options_is_named(monkeypatch):
    """The environment is at fault."""
    broken = EntryPoint(name="lab", value="no_such_package.conf", group=option_files.PACKAGES)
    monkeypatch.setattr(option_files, "entry_points", lambda group: [broken])
    option_files.package_directories.cache_clear()
    try:
        with pytest.raises(
            SetupError,
            match=r"config directory of an installed package is missing.*no_such_package.conf",
        ):
            option_files.package_directories()
    finally:
        option_files.package_directories.cache_clear()
