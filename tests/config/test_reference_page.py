from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest

from mens_exp.config import reference_page
from mens_exp.config.option_files import our_options
from mens_exp.config.overrides import check
from mens_exp.config.root import RunConfig
from mens_exp.config.schemas import SCHEMAS

DIRECTORY = Path(__file__).parents[2] / "docs" / "reference" / "configuration"
ENTRY = re.compile(
    r"^### `(?P<key>[\w.]+)`\n\n\*(?P<facts>[^\n]*)\*\n\n(?P<meaning>.*?)"
    r"^Example: `(?P<example>[^`]*)`"
    r"(?: · Refused: `(?P<refused>[^`]*)`\n\n    (?P<error>[^\n]*))?$",
    re.MULTILINE | re.DOTALL,
)


@pytest.fixture(scope="module")
def pages():
    """The reference pages by name."""
    return reference_page.pages()


@pytest.fixture(scope="module")
def entries(pages):
    """The parts of every entry, by its key."""
    return {
        found["key"]: found.groupdict() for text in pages.values() for found in ENTRY.finditer(text)
    }


def test_the_pages_are_current(pages):
    """If a schema or a group changed, run `make docs`."""
    assert {file.name: file.read_text("utf-8") for file in DIRECTORY.iterdir()} == pages


def test_every_key_stands_once_and_every_option_is_listed(pages, entries):
    """The reference has the keys of all schemas of all groups, and those of the root."""
    text = "\n".join(pages.values())
    keys = re.findall(r"^### `(.*)`$", text, re.MULTILINE)
    assert len(keys) == len(set(keys)) == len(entries)
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            prefix = f"callbacks.{name}" if group == "callbacks" else group
            for field in dataclasses.fields(schema):
                if group != "task" and not field.name.startswith("_"):
                    path = f"{prefix}.{field.name}"
                    assert any(key == path or key.startswith(f"{path}.") for key in keys), path
    for group, options in our_options().items():
        assert all(f"`{option}`" in text for option in options), group
    for field in dataclasses.fields(RunConfig):
        assert f"`{field.name}`" in text or field.name in SCHEMAS


def test_an_entry_states_type_range_default_and_contract(entries):
    """They agree with the declaration in the schema."""
    assert entries["lora.dropout"]["facts"].split(" · ") == [
        "number",
        "`>= 0 and < 1`",
        "default `0.05`",
        "part of the contract",
    ]
    assert entries["quant.double_quant"]["facts"].startswith("true or false · default `true`")
    assert "required · only with `data=jsonl`" in entries["data.path"]["facts"]
    assert "`0.0002` with `optim=lion`" in entries["optim.lr"]["facts"]
    assert "part of the contract" not in entries["quant.storage_dtype"]["facts"]
    learned = [
        key
        for key, entry in entries.items()
        if key.startswith("callbacks.") and "part of the contract" in entry["facts"]
    ]
    assert learned == ["callbacks.early_stopping.patience", "callbacks.early_stopping.min_delta"]


def test_an_entry_states_conditions_and_the_names_of_others(entries):
    """They follow the meaning of the key."""
    meaning = entries["quant.double_quant"]["meaning"]
    assert "Needs quant.quant_type=nf4, fp4, codebook, nf2 to nf8 or int2 to int7." in meaning
    assert "`double_quantization` in LLaMA-Factory" in meaning


def test_every_entry_has_an_example_that_is_no_default(entries):
    """If the type gives no example, the key declares one with example=."""
    shown = {key: entry["example"].partition("=")[2] for key, entry in entries.items()}
    assert {
        key for key, value in shown.items() if value in {"", "null", "[]", "{}", "???"}
    } == set()


def test_declared_examples_have_the_type_of_their_key():
    """Every declared example is accepted for its key."""
    for group in our_options():
        for key in reference_page._group_keys(group):
            if key.about.example:
                assert reference_page._problems(key, f"{key.path}={key.about.example}") == []


def test_refusals_are_those_of_commands(entries):
    """A random sample of four keys that need no particular option, checked against real errors."""
    drawn = random.sample(
        [
            entry
            for key, entry in sorted(entries.items())
            if entry["error"] and "only with" not in entry["facts"]
            if not key.startswith(("hydra.", "callbacks.", "policy.", "study.", "sweep."))
        ],
        4,
    )
    for entry in drawn:
        errors = [str(problem) for problem in check([entry["refused"]]).problems]
        assert any(entry["error"] in error for error in errors), (entry["refused"], errors)


def test_no_row_breaks_its_table(pages):
    """Every row has as many columns as the header."""
    for text in pages.values():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, table
