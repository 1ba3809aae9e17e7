from __future__ import annotations

import pytest

from mens_exp.config import override_values
from mens_exp.config.override_parsing import read_space
from mens_exp.config.override_values import override_of
from mens_exp.config.overrides import check
from mens_exp.config.sweep import LAUNCHERS, launcher_settings, launcher_values


def said(*texts, multirun):
    return [str(problem) for problem in check(texts, multirun=multirun).problems]


@pytest.mark.parametrize(
    "override",
    ["sweep.retries=2", "hydra.launcher.n_jobs=2", "hydra/launcher=basic", "sweep.invalid=skip"],
)
def test_a_setting_of_a_sweep_needs_one(override):
    """It would have no effect on a single run."""
    (problem,) = said("model=tiny_llama", override, multirun=False)
    assert "has no effect on a single run" in problem
    assert "add -m" in problem
    assert said("model=tiny_llama", override, multirun=True) == []


def test_the_launcher_in_one_process_reads_no_setting_of_a_sweep():
    """The basic launcher keeps no record and retries nothing."""
    (problem,) = said("sweep.retries=2", "hydra/launcher=basic", multirun=True)
    assert "has no effect with hydra/launcher=basic" in problem


def test_an_unknown_key_of_the_launcher_is_refused():
    """Hydra's own schema of the launcher decides."""
    (problem,) = said("hydra.launcher.jobs=2", multirun=True)
    assert "jobs" in problem


@pytest.mark.parametrize(
    ("launcher", "setting"),
    [("local", "n_jobs=2"), ("slurm", "timeout_min=5"), ("submitit_slurm", "timeout_min=5")],
)
def test_each_launcher_has_its_settings(launcher, setting):
    """They are typed and survive storing, also for the earlier name; unknown ones are refused."""
    given = ["model=tiny_llama", f"hydra/launcher={launcher}", f"hydra.launcher.{setting}"]
    checked = check(given, multirun=True)
    assert checked.problems == ()
    composed = checked.cells[0].composed
    typed = launcher_settings(composed.launcher, str(composed.launcher_option))
    kind = LAUNCHERS[launcher.removeprefix("submitit_")]
    assert type(typed) is kind
    assert launcher_settings(launcher_values(typed), launcher) == typed
    assert typed != kind()
    (problem,) = said(f"hydra/launcher={launcher}", "hydra.launcher.nodes=2", multirun=True)
    assert "nodes" in problem


def test_a_launcher_that_is_none_here_is_refused():
    """The message lists the available launchers."""
    problems = said("hydra/launcher=ray", multirun=True)
    assert any("local, slurm" in problem for problem in problems)


@pytest.fixture
def without_plugins(monkeypatch):
    """Hide Hydra plugins of the development environment, which include joblib."""
    monkeypatch.setattr(override_values, "hydra_options", lambda kind: frozenset())


@pytest.mark.parametrize(
    ("given", "instead", "gone"),
    [
        ([], ["n_jobs=-1"], ""),
        (["n_jobs=2"], ["n_jobs=2"], ""),
        (["threads=3", "n_jobs=-2"], ["threads=3", "n_jobs=-2"], ""),
        (["backend=loky"], ["n_jobs=-1"], ", and drop hydra.launcher.backend=loky"),
    ],
)
@pytest.mark.parametrize("sweeper", [[], ["hydra/sweeper=optuna"]])
@pytest.mark.usefixtures("without_plugins")
def test_joblib_is_refused_with_what_to_write_instead(given, instead, gone, sweeper):
    """The suggestion keeps the settings, and is a valid command itself."""
    usual = ["seed=1,2", *sweeper]
    settings = [f"hydra.launcher.{one}" for one in given]
    (problem,) = check([*usual, "hydra/launcher=joblib", *settings], multirun=True).problems
    assert (problem.where, problem.exit_code) == ("hydra/launcher", 2)
    ours = ["hydra/launcher=local", *(f"hydra.launcher.{one}" for one in instead)]
    assert problem.remedy == f"write {' '.join(ours)}{gone}"
    assert said(*usual, *ours, multirun=True) == []


@pytest.mark.usefixtures("without_plugins")
def test_joblib_hides_nothing_else_that_is_wrong():
    """Problems of the sweep are reported as well, and a single run needs no launcher."""
    problems = said("hydra/launcher=joblib", "lora.r=0", "nonsense=1", multirun=True)
    assert [problem.split(":")[0] for problem in problems] == [
        "nonsense",
        "hydra/launcher",
        "lora.r",
    ]
    (problem,) = said("hydra/launcher=joblib", multirun=False)
    assert "has no effect on a single run" in problem
    secret = f"hf_{'a1' * 17}"
    (problem,) = said("hydra/launcher=joblib", f"hydra.launcher.backend={secret}", multirun=True)
    assert "contains what looks like a credential" in problem
    assert secret not in problem


def test_the_mode_is_told_by_m():
    """Hydra would start a sweep without the checks."""
    (problem,) = said("hydra.mode=MULTIRUN", multirun=False)
    assert "is determined by -m" in problem


def test_a_swept_key_without_effect_in_some_cells_is_dropped_there():
    """backend=full has no adapter; each cell records what it dropped."""
    checked = check(["backend=full,qlora", "lora.r=4,8"], multirun=True)
    assert checked.problems == ()
    assert [cell.dropped for cell in checked.cells] == [("lora.r=4",), ("lora.r=8",), (), ()]
    assert [cell.config.lora.r for cell in checked.cells] == [16, 16, 4, 8]


def test_a_key_given_once_without_effect_in_some_cells_is_an_error():
    """The key is not swept, so nobody expects that some cells ignore it."""
    problems = said("backend=full,qlora", "lora.r=4", multirun=True)
    assert len(problems) == 1
    assert "lora.r: has no effect with backend=full" in problems[0]


def test_faulty_cells_are_known_by_their_number():
    """Problems of the command itself are reported as well."""
    checked = check(["lora.r=8,0", "seed=1,2", "nonsense=1"], multirun=True)
    assert sorted(checked.faulty) == [2, 3]
    assert checked.faulty[2].overrides == ("lora.r=0", "seed=1")
    assert [problem.where for problem in checked.general] == ["nonsense"]


def test_a_search_needs_a_sweep_and_processes_of_its_own():
    """A single run draws nothing, and Hydra's own launcher cannot take trials one by one."""
    (problem,) = said("hydra/sweeper=optuna", multirun=False)
    assert "has no effect on a single run" in problem
    (problem,) = said("hydra/sweeper=optuna", "hydra/launcher=basic", multirun=True)
    assert "has no effect with hydra/launcher=basic" in problem
    assert "local, slurm take trials as they come" in problem
    for launcher in ("local", "slurm", "submitit_slurm"):
        given = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", f"hydra/launcher={launcher}"]
        assert said(*given, multirun=True) == []


def test_an_interval_without_a_search_names_it():
    """The basic sweeper cannot list the values of an interval."""
    (problem,) = said("optim.lr=interval(0,1)", multirun=True)
    assert "a sweep must list its values" in problem
    assert "hydra/sweeper=optuna" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=range(5,5)", "at least one value"),
        ("seed=range(5,2)", "at least one value"),
        ("lora=glob(zz*)", "a pattern that matches an option, such as one of adalora, "),
        ("lora.r=glob(*)", "glob(…) matches options of a group, and this is none"),
    ],
)
def test_a_key_without_a_value_is_refused(text, expected):
    """A sweep over it has no cell; a search has nothing to draw."""
    key = text.partition("=")[0]
    for problems in (
        check([text, "optim.lr=1e-3,1e-4"], multirun=True).problems,
        read_space([text]).problems,
    ):
        (problem,) = problems
        assert (problem.where, problem.found, problem.exit_code) == (key, text, 2)
        assert "has no value to sweep over" in str(problem)
        assert expected in str(problem)


@pytest.mark.parametrize("plus", ["", "+"])
def test_the_mapping_of_swept_keys_is_refused_on_the_command_line(plus):
    """The keys themselves do what it asks for, and other problems are reported with it."""
    given = plus + "hydra.sweeper.params={seed:'1,2',lora.r:4}"
    problem, other = check([given, "lora.alpha=0"], multirun=True).problems
    assert (problem.where, problem.found, problem.exit_code) == ("hydra.sweeper.params", given, 2)
    assert problem.remedy == "write seed=1,2 lora.r=4"
    assert other.where == "lora.alpha"
    assert len(check(problem.remedy.split()[1:], multirun=True).cells) == 2


def test_a_drawn_key_without_effect_is_dropped_from_the_only_cell():
    """A search composes one cell at a time."""
    texts = ["backend=full", "lora.r=4"]
    assert "has no effect" in said(*texts, multirun=True)[0]
    checked = check(texts, multirun=True, drawn={"lora.r"}, first=7)
    assert checked.problems == ()
    assert [(cell.number, cell.dropped) for cell in checked.cells] == [(7, ("lora.r=4",))]


@pytest.mark.parametrize(
    "text", ["/a/b.c", "a b", "it's", "a\\", "x[y]{z}", "ü=1,2", "null", "True", "7", '"q"', "#%"]
)
def test_an_override_that_is_written_for_a_text_means_that_text(text):
    """The text is quoted if Hydra would otherwise read it as something else."""
    (cell,) = check([override_of("sweep.resume", text)], multirun=True).cells
    assert cell.config.sweep.resume == text


def test_a_plain_path_needs_no_quotes():
    """The record stays readable."""
    assert override_of("sweep.resume", "outputs/a-b_1") == "sweep.resume=outputs/a-b_1"
