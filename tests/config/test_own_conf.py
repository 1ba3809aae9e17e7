from __future__ import annotations

import shutil

import pytest

from mens_exp.config import option_files
from mens_exp.config.compose import compose, typed
from mens_exp.config.option_files import config_directory, group_options
from mens_exp.config.overrides import check
from mens_exp.errors import ConfigError


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file below ./conf of an otherwise empty working directory."""
    monkeypatch.chdir(tmp_path)

    def written(name, text):
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    return written


@pytest.fixture
def print_every(write):
    write("callbacks/print_every.yaml", "# p\n_target_: my_callbacks.PrintEvery\nevery_n: 5\n")


def only(*overrides):
    (problem,) = check(list(overrides)).problems
    return problem


def test_without_a_conf_folder_the_options_are_ours(write):
    """In an empty directory, no options are added."""
    assert group_options() == option_files.our_options()
    assert option_files.user_directory() is None


def test_our_own_conf_is_not_the_users(monkeypatch):
    """In a checkout, ./conf is mens_exp's own and adds nothing."""
    monkeypatch.chdir(config_directory().parent)
    assert option_files.user_directory() is None


@pytest.mark.usefixtures("print_every")
def test_a_class_is_composed_under_its_files_name_without_any_header():
    """The user's file needs neither a package directive nor a schema."""
    (one,) = compose([["callbacks=[minimal,print_every]", "callbacks.print_every.every_n=2"]])
    assert dict(one.values.callbacks.print_every) == {
        "_target_": "my_callbacks.PrintEvery",
        "every_n": 2,
    }
    assert one.choices["callbacks"] == "minimal,print_every"


@pytest.mark.usefixtures("print_every")
def test_a_list_of_callbacks_has_a_name_of_its_own(write):
    """callbacks=mine combines built-in callbacks with the user's."""
    write("callbacks/mine.yaml", "# m\ndefaults:\n  - default\n  - print_every\n")
    (one,) = compose([["callbacks=mine"]])
    assert list(one.values.callbacks)[-2:] == ["checkpoint", "print_every"]
    assert typed(one.values).callbacks["print_every"].every_n == 5


@pytest.mark.usefixtures("print_every")
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("callbacks.print_every.evry_n=2", "the nearest is callbacks.print_every.every_n"),
        ("callbacks.print_every.every_n=two", "expected a whole number"),
        ("callbacks.print_every._target_=os.system", "is set by the option"),
    ],
)
def test_a_setting_of_theirs_is_checked_like_ours(override, said):
    """The key is checked, and the type that the value in the YAML has."""
    assert said in str(only("callbacks=[default,print_every]", override))


@pytest.mark.usefixtures("print_every")
def test_a_misspelled_option_names_the_nearest_of_ours_and_theirs():
    """Built-in and user options are suggested alike."""
    assert "the nearest is print_every" in str(only("callbacks=print_evry"))


@pytest.mark.usefixtures("print_every")
def test_adding_a_callback_with_a_plus_says_how_to_write_it():
    """This is the usual spelling in Hydra, but not here."""
    assert "write callbacks=[default,print_every]" in str(only("+callbacks=print_every"))


def test_types_follow_the_values(write):
    """An int is accepted for a float, list entries keep their type, and null accepts any value."""
    text = (
        "_target_: m.O\nlr: 0.1\nbeta: 0.9\nnesterov: true\nks: [1, 2]\nextra: null\nmap: {a: 1}\n"
    )
    write("optim/mine.yaml", f"# o\n{text}")
    good = ["optim=mine", "optim.beta=1", "optim.ks=[3]", "optim.extra=x", "optim.lr=1e-3"]
    (one,) = compose([good])
    assert (one.values.optim.beta, one.values.optim.ks, one.values.optim.extra) == (1.0, [3], "x")
    assert "true or false" in str(only("optim=mine", "optim.nesterov=perhaps"))
    assert "optim.eps: is not a key of the chosen optim" in str(only("optim=mine", "optim.eps=1"))
    assert "out of range" in str(only("optim=mine", "optim.lr=0"))


def test_names_of_an_objective_and_a_backend_are_their_files(
    write,
):
    """An objective trains on the assistant's tokens unless it says otherwise."""
    write("objective/focal.yaml", "# f\n_target_: m.Focal\ngamma: 2.0\n")
    write("backend/mine.yaml", "# b\n_target_: m.B\n")
    config = typed(compose([["objective=focal", "backend=mine"]])[0].values)
    assert (config.objective.name, config.objective.labels) == ("focal", "assistant")
    assert config.backend.name == "mine"


def test_an_experiment_of_ones_own_sets_what_it_likes(write):
    """Options that only set values need no class."""
    write(
        "experiment/mine.yaml",
        "# @package _global_\n# e\ndefaults: [override /model: tiny_llama, _self_]\nseed: 7\n",
    )
    (cell,) = check(["experiment=mine"]).cells
    assert (cell.config.seed, cell.config.model.name) == (7, "tiny_llama")


def test_an_option_can_build_on_one_of_ours(write):
    """The option then has the schema of the built-in one."""
    write("optim/slow.yaml", "# s\ndefaults:\n  - adamw\n  - _self_\nlr: 1e-5\n")
    (cell,) = check(["optim=slow"]).cells
    assert cell.config.optim.lr == 1e-5


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("optim/adamw.yaml", "_target_: m.O\n", "has the name of a built-in option"),
        ("config.yaml", "seed: 3\n", "has the name of a built-in option"),
        ("callbacks/mine.yml", "x: 1\n", "rename it to mine.yaml"),
        ("callback/mine.yaml", "x: 1\n", "such as callbacks"),
        ("callbacks/mine.yaml", "- a\n", "is not a YAML mapping"),
        ("callbacks/mine.yaml", "a: [\n", "is not a YAML mapping"),
    ],
)
def test_a_file_that_would_do_nothing_is_refused(write, file, text, said):
    """The message has the file's path, whatever the command is."""
    write(file, text)
    problem = only("seed=1")
    assert said in str(problem)
    assert problem.where == f"conf/{file}"
    assert problem.exit_code == 2


def test_a_misspelled_key_in_an_experiment_names_the_nearest(write):
    """The message names the file to correct."""
    write("experiment/xbad.yaml", "# @package _global_\ntrainer: {max_stepps: 2}\n")
    with pytest.raises(ConfigError) as raised:
        check(["experiment=xbad"])
    problem = raised.value
    assert str(problem).startswith("conf/experiment/xbad.yaml: trainer.max_stepps: unknown key")
    assert "the nearest is max_steps" in problem.expected


@pytest.mark.parametrize("group", ["suite", "quant", "lora"])
def test_a_file_that_names_a_spec_inherits_from_no_other(write, group):
    """The schema comes from the spec; inherited values would belong to another schema."""
    write(f"{group}/mine.yaml", "defaults: [other, _self_]\n_target_: mine.SPEC\n")
    problem = only("seed=1")
    assert str(problem).startswith(f"conf/{group}/mine.yaml: defaults: a file that names a spec")
    assert "extending.md" in problem.remedy


def test_a_copy_of_ours_and_a_folder_of_somebody_else_are_let_be(
    write,
):
    """Neither one changes the meaning of a command."""
    copy = write("optim/adamw.yaml", "")
    shutil.copy(config_directory() / "optim/adamw.yaml", copy)
    write("zzz_db/mysql.yaml", "x: 1\n")
    assert check(["seed=1"]).problems == ()


@pytest.mark.parametrize("key", ["_partial_", "_args_", "not a name"])
def test_keys_that_are_no_arguments_are_refused(write, key):
    """Hydra would interpret some of these keys itself."""
    write("optim/mine.yaml", f"_target_: m.O\n{key}: true\n")
    assert "is not a setting of a class" in str(only("optim=mine"))


def test_a_frozen_copy_is_read_whatever_becomes_of_the_folder(write, tmp_path):
    """A sweep needs the copy, because it composes each cell only when its turn comes."""
    file = write("optim/mine.yaml", "# o\n_target_: m.O\nlr: 0.25\n")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "conf", copy)
    file.write_text("# o\n_target_: m.O\nlr: 0.75\n", encoding="utf-8")
    with option_files.frozen_as([copy]):
        assert compose([["optim=mine"]])[0].values.optim.lr == 0.25
    assert compose([["optim=mine"]])[0].values.optim.lr == 0.75
    assert option_files.user_directory() == tmp_path / "conf"
