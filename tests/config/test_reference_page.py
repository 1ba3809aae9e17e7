from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from mens_exp.config.loader import SCHEMAS
from mens_exp.config.reference_page import page
from mens_exp.config.root import RunConfig
from mens_exp.config.user_config import our_options

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def rows():
    """Return the cells of every row by its first cell, without backquotes."""
    lines = [line for line in page().splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
    return {entry[0].strip("`"): entry[1:] for entry in cells}


def test_the_page_is_current():
    """A change of a schema or of a group changes the page too: make docs."""
    assert PAGE.read_text("utf-8") == page()


def test_every_key_and_option_is_on_the_page():
    """Of every schema of every group, and of the root."""
    text = page()
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            prefix = f"callbacks.{name}" if group == "callbacks" else group
            for field in dataclasses.fields(schema):
                if group != "task" and not field.name.startswith("_"):
                    assert f"`{prefix}.{field.name}`" in text
    for group, options in our_options().items():
        assert all(f"`{option}`" in text for option in options), group
    assert all(
        f"`{field.name}" in text or field.name in SCHEMAS for field in dataclasses.fields(RunConfig)
    )


def test_a_row_tells_type_default_range_and_meaning():
    """As the schema has them."""
    assert rows()["lora.dropout"][:3] == ["number", "`0.05`", "`>= 0 and < 1`"]
    assert rows()["quant.double_quant"][:2] == ["true or false", "`true`"]
    assert rows()["data.path"][1] == "required"
    assert rows()["path"][0] == "text, or null"
    assert "Set by `all_linear`" in rows()["lora.targets"][-1]


def test_a_row_tells_what_is_declared_of_a_key():
    """Whether the contract holds it, what it needs, and what others call it."""
    assert [rows()[key][3] for key in ("optim.lr", "quant.storage_dtype", "seed")] == [
        *("yes", "", "yes"),
    ]
    learned = [key for key, cells in rows().items() if key.startswith("callbacks.") and cells[3]]
    assert learned == ["callbacks.early_stopping.patience", "callbacks.early_stopping.min_delta"]
    said = rows()["quant.double_quant"][-1]
    assert "Needs quant.quant_type=nf4 or fp4." in said
    assert "`double_quantization` in LLaMA-Factory." in said


def test_no_cell_breaks_its_table():
    """Every row has the columns of its head."""
    width = 0
    for line in page().splitlines():
        columns = len(re.findall(r"(?<!\\)\|", line))
        if line.startswith("|---"):
            width = columns
        elif (
            line.startswith("| ") and width and not line.startswith(("| key", "| option", "| task"))
        ):
            assert columns == width, line
