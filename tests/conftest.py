"""Fixtures for the tests of several packages."""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

# One thread: tiny models gain nothing from more, and on a busy machine, threads that wait for each
# other take a hundred times as long. Set before torch is imported, and for subprocesses too.
os.environ["OMP_NUM_THREADS"] = "1"

import fork_server
import live_adapters
import numpy as np
import probe_cache
import pytest
from filelock import FileLock
from hypothesis import settings

from mens_exp.artifacts import host, provenance
from mens_exp.artifacts.scorecard import Scorecard, read_item_events
from mens_exp.config import loader
from mens_exp.config.compose import compose, typed
from mens_exp.rows.documents import Encoded
from mens_exp.sandbox.bubblewrap import Bubblewrap

settings.register_profile("untimed", deadline=None)  # the default is 200 ms for an example
settings.load_profile("untimed")

pytest_plugins = ["cpu_costs", "family_models", "real_models", "slow_tests"]


# Shells start background jobs with SIGINT ignored, which all that tests start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

loader._MOST = 10_000  # compositions kept by a process; tests ask for many


@pytest.hookimpl(optionalhook=True)  # not called if xdist is switched off
def pytest_xdist_auto_num_workers(config):
    """Use one process more than there are cores, as many slow tests wait for a clock or service."""
    waiting = 0 if "not slow" in config.option.markexpr else 1
    return min((os.cpu_count() or 1) + waiting, 4)


def pytest_collection_modifyitems(items):
    """Run the files of slow tests first, so that no worker ends up alone with one."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: -slow[item.path] / tests[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable garbage collection during imports, which saves a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


_frozen_modules = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Exempt what tests have imported from garbage collection, a seventh of a run's CPU time."""
    global _frozen_modules
    try:
        return (yield)
    finally:
        if len(sys.modules) > _frozen_modules + 100:
            gc.collect()
            gc.freeze()
            _frozen_modules = len(sys.modules)


# Files whose tests fork from a server of their own, whose imports take twelve seconds.
TOGETHER = ("tests/plugins/", "tests/export/test_serving")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distribute tests by file, and put files that share a server on one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return next((place for place in TOGETHER if file.startswith(place)), file)

    return ByServer(config, log)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Use one cache for the session, separate from the user's own."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MENS_EXP_CACHE", str(root))
        yield root


@pytest.fixture(scope="session")
def probes(tmp_path_factory):
    """The directory of known results of probes, for all workers."""
    root = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        root = root.parent
    (root / "probes").mkdir(exist_ok=True)
    return root / "probes"


@pytest.fixture(autouse=True)
def _probes(request):
    """Probe anew in a test that is about probes, and while its monkeypatch has changed code."""
    is_marked = request.node.get_closest_marker("probes") is not None
    patch = "monkeypatch" in request.fixturenames and request.getfixturevalue("monkeypatch")

    def is_as_written():
        if not patch:
            return not is_marked
        items = [place for place, _, _ in patch._setitem if place is not os.environ]
        return not is_marked and not patch._setattr and not items

    usual = probe_cache.is_usable
    probe_cache.is_usable = is_as_written
    yield
    probe_cache.is_usable = usual


@pytest.fixture(scope="session", autouse=True)
def forked(tmp_path_factory, probes):
    """Fork the package's own processes instead of starting them; see fork_server."""
    fork_server.keep_log(tmp_path_factory.getbasetemp() / "fork_server.log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "Popen", fork_server.Popen)
        known = known_checkout()
        places = {"source": probe_cache.__file__, "kept": str(probes)}
        fork_server.execute_before_each(
            WITHOUT_DRAWING + WITHOUT_SYNC + known + KNOWN_PROBES.format(**places)
        )
        patch.setattr(os, "fsync", lambda _: None)
        exec(known, {})
        probe_cache.install(probes)
        yield
    fork_server.end_servers()


# matplotlib takes a third of a tiny run's time, and few tests look at its plots.
WITHOUT_DRAWING = """
from mens_exp.report import plots
plots._drawn = lambda *_: '<svg viewBox="0 0 1 1"></svg>'
"""
# A test's files need not survive a power cut, and fsync takes a tenth of a tiny run.
WITHOUT_SYNC = """
import os
os.fsync = lambda _: None
"""
# Git describes this checkout once a session, not once a run.
KNOWN_CHECKOUT = """
import pathlib
from mens_exp.artifacts import provenance
provenance._checkout = lambda directory, find=provenance._checkout: (
    pathlib.Path({root!r}) if directory == provenance._PACKAGE_DIRECTORY else find(directory)
)
provenance._code = lambda root, new_in, find=provenance._code: (
    dict({code!r}) if new_in == provenance._PACKAGE_DIRECTORY else find(root, new_in)
)
"""
KNOWN_PROBES = """
import pathlib, runpy
runpy.run_path({source!r})["install"](pathlib.Path({kept!r}))
"""


def known_checkout():
    """Return code that makes the provenance of this checkout known to a process."""
    package = provenance._PACKAGE_DIRECTORY
    root = provenance._checkout(package)
    if root is None:
        return ""
    return KNOWN_CHECKOUT.format(root=str(root), code=provenance._code(root, package))


@pytest.fixture(scope="session", autouse=True)
def undrawn():
    """Leave the plots of reports empty, except in a test with the marker `draws`."""
    from mens_exp.report import plots

    drawn = plots._drawn
    exec(WITHOUT_DRAWING, {})
    yield drawn
    plots._drawn = drawn


@pytest.fixture(autouse=True)
def _draws(request, undrawn):
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("draws"):
            from mens_exp.report import plots

            patch.setattr(plots, "_drawn", undrawn)
        yield


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Programs ``python`` and ``mens-exp`` that fork mens_exp's commands."""
    return fork_server.write_stubs(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def shell_path(programs):
    """A PATH on which these programs come first."""
    return os.pathsep.join([str(programs), os.environ["PATH"]])


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """Directories made by the first test that asks, for all workers; do not change them."""
    root = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        root = root.parent
    root = root / "shelf"
    root.mkdir(exist_ok=True)
    taken = {}

    def take(name, make):
        place = root / name
        with FileLock(root / f"{name}.lock"):
            if not place.with_suffix(".made").exists():
                make(place)
                place.with_suffix(".made").write_text(state_of(place), "utf-8")
        taken[place] = place.with_suffix(".made").read_text("utf-8")
        return place

    yield take
    changed = [place.name for place, made in taken.items() if state_of(place) != made]
    assert changed == [], "a test has changed what others read; let it copy it first"


def state_of(place):
    """List the files of a directory with their sizes and times."""
    files = sorted(path for path in [place, *place.rglob("*")] if path.is_file())
    return "".join(f"{p} {p.stat().st_size} {p.stat().st_mtime_ns}\n" for p in files)


@pytest.fixture(scope="session")
def sandbox():
    """The sandbox in which tests execute programs."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing: apt-get install bubblewrap")
    return Bubblewrap()


@pytest.fixture(scope="session")
def tiny_config():
    """Compose a configuration of tiny_llama on the CPU from overrides."""

    @functools.cache  # Hydra takes a third of a second each time
    def composed(*overrides):
        usual = ["model=tiny_llama", "logger=none", "trainer=cpu", "suite=none"]
        by_key = {text.partition("=")[0]: text for text in [*usual, *overrides]}
        return typed(compose([list(by_key.values())])[0].values)

    return lambda *overrides: copy.deepcopy(composed(*overrides))


@pytest.fixture(scope="session")
def tiny_base(cache, tiny_config):
    """A random model of two Llama layers on disk."""
    from mens_exp.model.sources import resolve

    return resolve(tiny_config().model, cache)


@pytest.fixture(scope="session")
def tiny_backend(cache, tiny_config):
    """Build a new backend, by default QLoRA on tiny_llama; `live` fills B, which starts at zero."""
    from mens_exp.model.sources import resolve
    from mens_exp.training.build import build_backend

    def build(*overrides, live=False):
        config = tiny_config(*overrides)
        backend = build_backend(config, resolve(config.model, cache))
        return live_adapters.fill_b(backend) if live else backend

    return build


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Replace the Hugging Face Hub by a stand-in with an empty cache."""
    from huggingface_hub import constants

    from mens_exp.layout import hub as hub_snapshot

    stand_in = runpy.run_path(str(Path(__file__).with_name("stand_in_hub.py")))
    with stand_in["serving"]() as server:
        server.new = stand_in["Repository"]
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        hub_snapshot.forget()
        yield server
        hub_snapshot.forget()


@pytest.fixture
def wandb_service(tmp_path, monkeypatch):
    """Replace the W&B service by a stand-in, with an account there."""
    stand_in = runpy.run_path(str(Path(__file__).with_name("stand_in_wandb.py")))
    for name in [*os.environ]:
        if name.startswith(("WANDB", "NETRC")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    with stand_in["serving"](stand_in["Service"]()) as service:
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        yield service


@pytest.fixture
def wandb_sweeps(wandb_service):
    """Let the stand-in handle sweeps, their agents and local controllers."""
    stand_in = runpy.run_path(str(Path(__file__).with_name("stand_in_wandb_sweeps.py")))
    wandb_service.sweeps = stand_in["Sweeps"](wandb_service)
    return wandb_service.sweeps


@pytest.fixture(scope="session")
def mirrored():
    """Read the records of a run's W&B directory with `wandb leet`, all or one kind."""

    def read(run, kind=None):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run.wandb)]
        done = fork_server.run(command, check=True, capture_output=True, text=True)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return [one[kind] for one in found if one["type"] == kind] if kind else found

    return read


@pytest.fixture(scope="session")
def documents_of():
    """Make encoded documents from lists of ids and lists of supervision flags."""

    def made(ids, supervised):
        return Encoded(
            ids=np.array([token for document in ids for token in document], np.int32),
            supervised=np.array([x for document in supervised for x in document], bool),
            offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
            truncated=0,
            dropped=0,
        )

    return made


@pytest.fixture(scope="session")
def random_documents(documents_of):
    """Draw documents of given lengths, with the last `supervised[i]` tokens of each supervised."""

    def drawn(lengths, supervised=None, *, seed=0):
        generator = np.random.default_rng(seed)
        learned = supervised if supervised is not None else [length // 2 for length in lengths]
        return documents_of(
            [generator.integers(3, 259, length).tolist() for length in lengths],
            [[0] * (n - k) + [1] * k for n, k in zip(lengths, learned, strict=True)],
        )

    return drawn


@pytest.fixture(scope="session")
def rows_file(shelf):
    """A file of sixty rows: about 45 for training, the rest for validation and held-out items."""
    rows = [
        {"prompt": f"Add {n}.", "response": f"def add_{n}(x):\n    return x + {n}\n"}
        for n in range(60)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)

    def write(place):
        place.mkdir()
        (place / "rows.jsonl").write_text(text, encoding="utf-8")

    return shelf("rows", write) / "rows.jsonl"


@pytest.fixture(scope="session")
def tiny_run(rows_file):
    """Overrides of a training run that takes half a second: four steps of two micro-batches."""
    return [
        "model=tiny_llama",
        "trainer=cpu",
        "logger=none",
        "suite=none",
        "suite.items=0",
        "schedule=constant",
        "schedule.warmup_steps=0",
        "data=jsonl",
        f"data.path={rows_file}",
        "data.seq_len=192",
        "data.val_frac=0.1",
        "data.heldout_frac=0.1",
        "trainer.max_steps=4",
        "trainer.accumulate_grad_batches=2",
        "optim.lr=1e-3",
        "checkpoint.every_n_steps=2",
    ]


@pytest.fixture(scope="session")
def train_in(tiny_run):
    """Run the command line in this process, with a given run directory."""
    from lightning.pytorch.trainer.connectors import callback_connector

    from mens_exp import cli
    from mens_exp.artifacts.run_dir import RunDir

    # Each of a run's three Trainers looks for callbacks in all installed packages.
    asked = functools.cache(callback_connector._load_external_callbacks)
    callback_connector._load_external_callbacks = asked

    def trained(directory, *overrides, code=0, without=None):
        by_key = {text.partition("=")[0]: text for text in [*tiny_run, *overrides]}
        by_key.pop(without, None)
        if by_key.get("suite") != "suite=none" and by_key.get("suite.items") == "suite.items=0":
            del by_key["suite.items"]  # set for suite=none
        assert cli.main([*by_key.values(), f"hydra.run.dir={directory}"]) == code
        return RunDir(Path(directory))

    return trained


@pytest.fixture
def killed_at():
    """Copy a run's directory just before a micro-batch, as a killed process leaves it."""
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.training.module import TrainingModule

    original = TrainingModule.training_step

    def planned(number, run, copy):
        def step(self, batch, index):
            if batch.index == number and not copy.exists():
                shutil.copytree(run, copy)
                RunDir(copy).lock.unlink()  # its holder would be dead
            return original(self, batch, index)

        TrainingModule.training_step = step
        return RunDir(copy)

    yield planned
    TrainingModule.training_step = original


@pytest.fixture
def whole_and_parts(train_in, killed_at, tmp_path):
    """Return a run and one that was killed in its third step and then resumed."""
    from mens_exp import cli
    from mens_exp.artifacts.manifest import Manifest

    def trained(*overrides):
        parts = killed_at(5, tmp_path / "whole", tmp_path / "parts")
        whole = train_in(tmp_path / "whole", *overrides)
        assert not parts.adapter.exists()
        assert cli.main([f"resume={parts.path}"]) == 0
        assert Manifest.read(parts.manifest).attempts[-1]["resumed_from_step"] == 2
        return whole, parts

    return trained


@pytest.fixture(scope="session")
def finished_with(shelf, train_in):
    """Return the finished run of some overrides, trained once for all tests; do not change it."""
    from mens_exp.artifacts.run_dir import RunDir

    def taken(*overrides):
        digest = hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:16]
        place = shelf(f"run_{digest}", lambda place: train_in(place / "run", *overrides))
        return RunDir(place / "run")

    return taken


@pytest.fixture(scope="session")
def installed(shelf):
    """Install packages that the environment lacks, and return their directory.

    Tests that need one are skipped on a machine without access to a package index.
    """

    def install(name, *packages):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        constraints = ["--constraint", str(Path(__file__).parents[1] / "constraints.txt")]

        def into(place):
            command = [*pip, str(place), *constraints, *packages]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"pip cannot install {' '.join(packages)}: {done.stderr[-300:]}")

        return shelf(name, into)

    return install


@pytest.fixture
def importable(installed, monkeypatch):
    """Make a package that the environment lacks importable here and in child processes."""

    def make(name, package):
        place = str(installed(name, package))
        monkeypatch.syspath_prepend(place)
        paths = filter(None, [place, os.environ.get("PYTHONPATH")])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return make


@pytest.fixture
def apollo(importable):
    """Make apollo-torch importable; its licence keeps it out of the dev dependencies."""
    importable("apollo", "apollo-torch==1.0.3")


@pytest.fixture(scope="session")
def finished(finished_with):
    """A finished run of `tiny_run`; do not change it."""
    return finished_with()


@pytest.fixture(scope="session")
def notes_of():
    """Read a run's notes without those about this machine, so that they are the same everywhere."""
    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.planning import machine, messages

    lacks = messages.bf16_emulated(machine.look("cpu").name)
    return lambda run: [note for note in Manifest.read(run.manifest).notes if note != lacks]


@pytest.fixture(scope="session")
def untimed():
    """Read a run's scorecard and events without latencies, which differ each time."""

    def steady(values):
        return {name: value for name, value in values.items() if not name.endswith("_ms")}

    def read(run):
        card = Scorecard.read(run.scorecard)
        return {
            "suite": card.suite_digest,
            "generation": card.generation,
            "conditions": {name: steady(kpis) for name, kpis in card.conditions.items()},
            "events": [steady(event) for event in read_item_events(run.events)],
        }

    return read
