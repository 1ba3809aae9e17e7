"""Arguments of Lightning's Trainer are passed on, or refused with the promise they break."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from lightning import Trainer
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.override_values import spelled_out
from mens_exp.config.overrides import check
from mens_exp.config.trainer import REFUSED, TrainerConfig
from mens_exp.planning.checks import classes
from mens_exp.planning.contract import contract_of
from mens_exp.planning.learned_settings import learned_settings

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "loggers.md").read_text("utf-8")
PROFILERS = "lightning.pytorch.profilers"
SIMPLE = f"{PROFILERS}.SimpleProfiler"
SINGLE = "lightning.pytorch.strategies.SingleDeviceStrategy"
GROUPS = {"logger", "callbacks"}  # separate config groups
PASSED = [
    ("gradient_clip_algorithm", "value"),
    ("limit_val_batches", 2),
    ("limit_val_batches", 0.5),
    ("min_steps", 3),
    ("num_sanity_val_steps", 1),
    ("log_every_n_steps", 5),
    ("enable_autolog_hparams", False),
]


def only(*overrides):
    (problem,) = check(["model=tiny_llama", "trainer=cpu", *overrides]).problems
    return problem


def test_every_argument_of_the_trainer_is_a_setting_or_refused():
    """A new argument of the installed Lightning has to be decided on."""
    arguments = inspect.signature(Trainer.__init__).parameters.keys() - {"self"}
    ours = TrainerConfig.__dataclass_fields__.keys()
    assert arguments - ours - REFUSED.keys() - GROUPS == set()
    assert ours & REFUSED.keys() == set()
    assert REFUSED.keys() - arguments == set()


def test_refusals_are_on_the_page_with_their_promises():
    """Callbacks are listed too, under the names that users write."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for name, refusal in REFUSED.items():
        (row,) = (line for line in rows if f"`{name}`" in line.split("|")[1])
        assert str(refusal.promise) in row
    for name, refusal in classes._REFUSED.items():
        kind = name.rpartition(".")[2].removeprefix("Base")
        if ".callbacks." in name and kind != "PredictionWriter":
            (row,) = (line for line in rows if kind in line.split("|")[1])
            assert str(refusal.promise) in row


@pytest.mark.parametrize(("name", "value"), PASSED)
def test_an_argument_reaches_the_trainer(built, name, value):
    """The setting has Lightning's own name."""
    trainer = built(f"trainer.{name}={value}".replace("False", "false"))
    assert getattr(trainer, name) == value


def test_flags_that_the_trainer_keeps_elsewhere_reach_it(built, tmp_path):
    """Profilers write into the run directory, and strategies have arguments of their own."""
    trainer = built("trainer.detect_anomaly=true", "trainer.inference_mode=false")
    assert trainer._detect_anomaly
    assert not trainer.validate_loop.inference_mode
    profiler = built("trainer.profiler=advanced").profiler
    assert isinstance(profiler, AdvancedProfiler)
    assert profiler.dirpath == str(tmp_path / "profile")
    named = (
        "trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler, extended: false}"
    )
    profiler = built(named).profiler
    assert isinstance(profiler, SimpleProfiler)
    assert not profiler.extended


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bf16-mixed"), ("f32", "32-true")])
def test_the_precision_is_that_of_the_graph(built, dtype, name):
    """The trainer reports the precision of the graph, whether requested or not."""
    for more in ((), (f"trainer.precision={name}",)):
        assert built(f"quant.compute_dtype={dtype}", *more).precision == name


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainer.precision=32"], "quant.compute_dtype=f32"),
        (["trainer.precision=bf16-true"], "The artifact is the model"),
        (["trainer.precision=fp8"], "use trainer.precision=bf16-mixed, or drop"),
        (["trainer.precision=16-mixed"], "What ran is what you asked for"),
        (["trainer.precision=16-mixed"], "use trainer.precision=bf16-mixed"),
        (["trainer.precision=16-mixed", "quant.compute_dtype=f32"], "precision=32-true"),
        (["trainer.limit_val_batches=0"], "A comparison is a comparison"),
        (["trainer.limit_val_batches=1.5"], "up to 1.0"),
        (["trainer.limit_val_batches=few"], "is not a number of micro-batches"),
        (["trainer.deterministic=7.5"], "true, false, warn"),
        (["trainer.profiler=simpel"], "the nearest is simple"),
        (["trainer.strategy=dpp"], "the nearest is ddp"),
        (
            ["trainer.strategy=ddp_find_unused_parameters_true"],
            "DDPStrategy trainer.strategy.find_unused_parameters=true",
        ),
        (["trainer.strategy=zero"], "use trainer.strategy=one"),
        (["trainer.strategy.foo=1"], "name the class too: trainer.strategy._target_=lightning."),
        (["trainer.strategy={_target_:a.B}"], "add trainer.devices"),
        (["trainer.plugins=[bitsandbytes]"], "does not name a class"),
        (["trainer.gradient_clip_algorithm=nrm"], "the nearest is norm"),
        (["trainer.max_time=5m"], "DD:HH:MM:SS"),
        (["trainer.max_time=00:00:00:00"], "DD:HH:MM:SS"),
        (["trainer.min_steps=99"], "at most trainer.max_steps (60)"),
    ],
)
def test_a_value_that_lightning_would_refuse_later_is_refused_now(overrides, told):
    """The error comes before anything is read and lists accepted values."""
    assert told in str(only(*overrides))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_argument_names_its_promise(name):
    """This holds for every spelling of the argument."""
    for override in (f"trainer.{name}=1", f"+trainer.{name}=1"):
        text = str(only(override))
        assert f"the promise “{REFUSED[name].promise}”" in text
        assert REFUSED[name].remedy in text


def test_a_refused_argument_in_an_option_of_the_users_names_its_promise(tmp_path, monkeypatch):
    """The error also names the file."""
    file = tmp_path / "conf" / "trainer" / "quick.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("defaults: [cpu, _self_]\nfast_dev_run: true\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    (problem,) = check(["trainer=quick"]).problems
    assert "conf/trainer/quick.yaml: fast_dev_run" in str(problem)
    assert "Nothing is lost" in str(problem)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.plugins=[{_target_: lightning.pytorch.plugins.MixedPrecision}]", "compute_dtype"),
        ("trainer.plugins=[{_target_: lightning.pytorch.plugins.AsyncCheckpointIO}]", "lost"),
        ("trainer.plugins=[{_target_: lightning.Callback}]", "Precision or LayerSync"),
        (f"trainer.profiler={{_target_: {PROFILERS}.Nothing}}", "has no Nothing"),
        (f"trainer.profiler={{_target_: {PROFILERS}.SimpleProfiler, exended: 1}}", "is extended"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(override, told):
    """Refused are a wrong kind, wrong arguments, or a promise that would break."""
    (cell,) = check(["model=tiny_llama", "trainer=cpu", override]).cells
    (problem,) = classes.check(cell.config)
    assert told in str(problem)


def test_a_strategy_by_its_class_shares_the_work_as_ddp_does():
    """Given arguments are used, and ours where none are given."""
    from mens_exp.planning.machine import Rank
    from mens_exp.training.distributed import strategy_of

    named = "trainer.strategy={_target_: lightning.pytorch.strategies.DDPStrategy, "
    override = named + "find_unused_parameters: true}"
    (cell,) = check(["model=tiny_llama", "trainer=ddp", override]).cells
    assert list(classes.check(cell.config)) == []
    rank = Rank(rank=0, world_size=2, local_rank=0, local_world_size=2)
    made = strategy_of(cell.config, rank)
    assert isinstance(made, DDPStrategy)
    assert made._ddp_kwargs["find_unused_parameters"] is True
    assert cell.config.trainer.sharing.value == "ddp"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in StrategyRegistry.available_strategies()
        if name not in {"ddp", "fsdp"} and not name.startswith("ddp_find_unused")
    ],
)
def test_a_strategy_of_lightnings_that_is_not_offered_names_its_promise(name):
    """All names in the installed Lightning are covered, with an alternative."""
    problem = only(f"trainer.strategy={name}")
    assert "would break the promise" in str(problem)
    assert problem.remedy.startswith("use trainer")


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.strategy=auto",),
        (f"trainer.strategy._target_={SINGLE}",),
        (f"trainer.strategy={{_target_: {SINGLE}, device: cpu}}",),
        (f"+trainer.strategy._target_={SINGLE}", "trainer.strategy.device=cpu"),
        (f"trainer.strategy._target_={SINGLE.replace('.Single', '.single_device.Single')}",),
    ],
)
def test_a_strategy_for_one_device_is_the_one_that_lightning_chooses(built, overrides):
    """Every spelling gives the default run."""
    assert (
        type(built(*spelled_out(overrides)).strategy)
        is type(built().strategy)
        is SingleDeviceStrategy
    )
    (cell,) = check(["model=tiny_llama", "trainer=cpu", *overrides]).cells
    assert list(classes.check(cell.config)) == []
    assert cell.config.trainer.sharing.value == "one"


@pytest.mark.parametrize(
    ("overrides", "where", "told"),
    [
        (
            ("trainer.strategy.device=cuda",),
            "trainer.strategy.device",
            "trainer=cpu or trainer=gpu",
        ),
        (("trainer.strategy.precision_plugin=1",), "trainer.strategy.precision_plugin", "drop"),
        (("trainer.devices=2",), "trainer.strategy", "use trainer=ddp"),
    ],
)
def test_a_strategy_for_another_device_is_refused(overrides, where, told):
    """The error names the promise that would break."""
    problem = only(f"trainer.strategy._target_={SINGLE}", *overrides)
    assert problem.where == where
    assert "would break the promise" in str(problem)
    assert told in problem.remedy


def test_auto_shares_the_work_of_several_processes():
    """The strategy is then that of ddp."""
    named = ("model=tiny_llama", "trainer=cpu", "trainer.strategy=auto", "trainer.devices=2")
    (cell,) = check([*named]).cells
    assert cell.config.trainer.sharing.value == "ddp"


def test_class_and_arguments_may_be_said_one_by_one():
    """Nested overrides equal the mapping, for strategies and profilers."""
    ddp = "trainer.strategy._target_=lightning.pytorch.strategies.DDPStrategy"
    more = ("trainer.strategy.find_unused_parameters=true", f"trainer.profiler._target_={SIMPLE}")
    (cell,) = check(["model=tiny_llama", "trainer=ddp", ddp, *more]).cells
    assert cell.config.trainer.strategy == {
        "_target_": "lightning.pytorch.strategies.DDPStrategy",
        "find_unused_parameters": True,
    }
    assert cell.config.trainer.profiler == {"_target_": SIMPLE}


def test_what_is_new_is_part_of_the_contract_once_it_is_set(tiny_config):
    """Values enter the digest if set; without them a contract is unchanged."""
    plain = contract_of(tiny_config())
    assert not [
        name for name in plain.settings if name in ("trainer.max_time", "trainer.precision")
    ]
    for override, value in (
        ("trainer.max_time=00:01:00:00", "00:01:00:00"),
        ("trainer.gradient_clip_algorithm=value", "value"),
        ("trainer.precision=bf16-mixed", "bf16-mixed"),
        ("trainer.min_steps=2", 2),
        ("trainer.limit_val_batches=2", 2),
    ):
        made = contract_of(tiny_config(override))
        assert made.settings[override.partition("=")[0]] == value
        assert made.digest != plain.digest
    assert contract_of(tiny_config("trainer.profiler=simple")).digest == plain.digest
    chosen = ["adapter.select=best", "trainer.val_check_interval=4"]
    limited = learned_settings(tiny_config(*chosen, "trainer.limit_val_batches=1"))
    assert limited["trainer.limit_val_batches"] == 1


def test_flags_work_together_on_a_run_that_ends_by_the_clock(train_in, tmp_path, monkeypatch):
    """The run stops after a whole validated step with a checkpoint, and records the reason."""
    run = train_in(
        tmp_path / "run",
        *("trainer.max_steps=100000", "trainer.max_time=00:00:00:01", "trainer.profiler=simple"),
        *("trainer.limit_val_batches=1", "trainer.num_sanity_val_steps=1"),
        *("trainer.min_steps=2", "checkpoint.every_n_steps=100000"),
    )
    events = read_events(run.telemetry)
    (stop,) = (e["payload"] for e in events if e["event"] == "stop_requested")
    validated = [e["payload"]["step"] for e in events if e["event"] == "validation"]
    assert validated == [0, stop["step"]]
    (saved,) = (e["payload"]["step"] for e in events if e["event"] == "checkpoint_saved")
    assert 2 <= saved == stop["step"] < 10000
    manifest = Manifest.read(run.manifest)
    assert manifest.results["steps"] == stop["step"]
    assert any("trainer.max_time" in note for note in manifest.notes)
    assert manifest.results["tuned_val_bits_per_byte"] is None
    assert "limit_val_batches" in manifest.unknown["results.tuned_val_bits_per_byte"]
    assert "run_training_batch" in (run.profiles / "fit-profile.txt").read_text("utf-8")
