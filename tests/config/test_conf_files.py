from __future__ import annotations

import dataclasses
import re

import pytest
from omegaconf import OmegaConf

from mens_exp.config.compose import compose, typed
from mens_exp.config.fields import declared, plain, range_of
from mens_exp.config.option_files import config_directory, group_options
from mens_exp.config.root import RunConfig
from mens_exp.config.schemas import DISCRIMINATORS, SCHEMAS, SET_BY_OPTION
from mens_exp.config.validate import TASK_READS, problems_of

ROOT = config_directory()
FILES = sorted(ROOT.rglob("*.yaml"))
OPTIONS = [f"{group}={option}" for group, options in group_options().items() for option in options]


def name(file):
    return file.relative_to(ROOT).as_posix()


def header(file):
    """Return the comment lines at the top, without Hydra's directive."""
    lines = file.read_text("utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [line for line in lines[:end] if not line.startswith("# @package")]


def schemas():
    yield RunConfig
    for group in SCHEMAS.values():
        yield from group.values()


@pytest.mark.parametrize("file", FILES, ids=name)
def test_file_opens_with_one_line_that_says_what_it_is_for(file):
    """It is a sentence; experiments, studies and presets add their command."""
    first, *others = header(file)
    assert re.fullmatch(r"# \S.{10,97}[.?]", first)
    assert bool(others) == (file.parent.name in {"experiment", "preset", "study"})


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group in ("experiment", "study") for name in group_options()[group]],
)
def test_experiment_states_question_command_and_expectation(group, name):
    """The comment has a question, the exact command and the expected result."""
    question, command, expected = header(ROOT / group / f"{name}.yaml")
    assert "?" in question
    assert command.startswith("# Command:  python -m mens_exp ")
    assert f"{group}={name}" in command.split()
    assert re.match(r"# Expected: about .*(s|minutes).* GB.*; metric: ", expected)


@pytest.mark.parametrize("preset", group_options()["preset"])
def test_preset_states_its_command(preset):
    """The comment shows how to use the preset."""
    command = header(ROOT / "preset" / f"{preset}.yaml")[1]
    assert command.startswith(f"# Command: python -m mens_exp preset={preset} ")


@pytest.mark.parametrize("override", OPTIONS)
def test_option_composes_and_is_valid(override, option):
    """Every option gives a complete, typed configuration without problems."""
    composed = option(override)
    group, _, name = override.partition("=")
    assert problems_of(typed(composed.values)) == []
    assert composed.choices[group] == name


def test_root_chooses_an_option_of_every_group():
    """The defaults list has every group and nothing else."""
    composed = compose([[]])[0]
    assert composed.choices.keys() == group_options().keys()
    unset = ("preset", "experiment", "policy", "study")
    assert [composed.choices.pop(group) for group in unset] == [None] * len(unset)
    assert all(option in group_options()[group] for group, option in composed.choices.items())


def test_every_group_has_a_schema():
    """A group without a schema would accept any key; presets and experiments are exempt."""
    assert SCHEMAS.keys() == group_options().keys() - {"preset", "experiment"}


def test_every_setting_is_documented():
    """A field is documented in its class or where a parent class first declares it."""
    silent = []
    for schema in schemas():
        for field in dataclasses.fields(schema):
            is_group = field.name in SCHEMAS
            if not (is_group and schema is RunConfig) and not declared(schema, field.name).doc:
                silent.append(f"{schema.__name__}.{field.name}")
    assert silent == []


def test_numbers_have_a_range():
    """Every integer and float field declares its accepted range."""
    open_ended = [
        f"{schema.__name__}.{field.name}"
        for schema in schemas()
        for field in dataclasses.fields(schema)
        if re.match(r"(int|float)\b", str(field.type)) and range_of(field) is None
    ]
    assert open_ended == []


def test_discriminators_are_fields_that_tell_options_apart():
    """Each schema of a group has a distinct value there, by which stored values find it."""
    for group, field in DISCRIMINATORS.items():
        values = [plain(getattr(schema(), field)) for schema in SCHEMAS[group].values()]
        assert values == list(SCHEMAS[group])


def test_fields_set_by_the_option_exist():
    """Every such key is a field of its group."""
    values = compose([["task=promote", "policy=burn_rnd"]])[0].values
    assert all(OmegaConf.select(values, key) is not None for key in SET_BY_OPTION)


def test_every_task_says_what_it_reads():
    """The table of settings that tasks read has a row for every task."""
    assert TASK_READS.keys() == set(group_options()["task"])


def test_callbacks_are_named_after_their_files(option):
    """A callback's settings are at `callbacks.<file>`."""
    collections = {"default", "minimal"}
    blocks = set(group_options()["callbacks"]) - collections
    assert all(set(option(f"callbacks={name}").values.callbacks) <= blocks for name in collections)
    assert all(list(option(f"callbacks={name}").values.callbacks) == [name] for name in blocks)
