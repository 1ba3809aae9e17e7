"""A data source from an installed package: one object, one YAML file and this test."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import pytest

from mens_exp.config.data import MixData, StdlibData
from mens_exp.config.data_sources import SOURCES, GivenData, SourceSpec
from mens_exp.corpus.source import load_rows
from mens_exp.errors import DataError, SetupError

TABLES = ("data=tables", "data.upto=9")


def words(tiny_run, *more):
    """Return the usual overrides with this source in place of the file."""
    theirs = [word for word in tiny_run if not word.startswith(("data=", "data.path="))]
    return [*theirs, *TABLES, "hydra.run.dir=run", *more]


def rows_of_tables(word="times"):
    """Return the rows by definition, as canonical JSON lines."""
    return "".join(
        f'{{"group":"table {a}","prompt":"{a} {word} {b}?","response":"{a * b}"}}\n'
        for a in range(1, 10)
        for b in range(1, 10)
    )


def test_a_run_trains_on_an_installed_source(typed, tiny_run, tmp_path):
    """Rows are as defined and split by table; contract, inputs and provenance name the source."""
    typed(*words(tiny_run))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text("utf-8"))
    sha256 = hashlib.sha256(rows_of_tables().encode()).hexdigest()
    data = manifest["inputs"]["data"]
    assert (data["source"], data["rows_sha256"]) == ("tables", sha256)
    assert data["train_rows"] + data["val_rows"] + data["heldout_rows"] == 81
    assert [data[side] % 9 for side in ("train_rows", "val_rows", "heldout_rows")] == [0, 0, 0]
    assert data["files"] == {
        "toy_source.Tables.rows": {"role": "rows", "form": "pair", "rows": 81, "sha256": sha256}
    }
    assert manifest["contract"]["data"]["generated_from"] == f"rows {sha256}"
    assert manifest["contract"]["settings"]["data.upto"] == 9
    assert manifest["provenance"]["own_classes"]["targets"] == ["toy_source.Tables"]
    typed("resume=run", "trainer.max_steps=6")


def test_a_mix_draws_from_it(typed, tiny_run, rows_file, tmp_path):
    """Its settings are part of its entry, and the contract has the digest of its rows."""
    theirs = [word for word in tiny_run if not word.startswith(("data=", "data.path="))]
    entries = f"[{{path:{rows_file},weight:0.5}},{{source:tables,upto:9,language:de,weight:0.5}}]"
    typed(*theirs, "data=mix", f"data.sources={entries}", "hydra.run.dir=run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text("utf-8"))
    assert set(manifest["inputs"]["data"]["mixed"]["sources"]) == {"rows.jsonl", "tables"}
    second = manifest["contract"]["settings"]["data.sources"][1]
    assert manifest["provenance"]["own_classes"]["targets"] == ["toy_source.Tables"]
    assert second["rows"] == hashlib.sha256(rows_of_tables("mal").encode()).hexdigest()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("data.upto=1", "data.upto"),
        ("data.up_to=3", "upto"),
        ("data.path=x", "data.path"),
        ("data.language=fr", "KeyError: 'fr'"),
        ("data.source=jsonl", "data.source"),
    ],
)
def test_what_it_cannot_give_is_refused(typed, tiny_run, tmp_path, more, said):
    """The schema or the class refuses it, and nothing is written."""
    assert said in typed(*words(tiny_run, more), code=2).stderr
    assert not (tmp_path / "run").exists()


@dataclass(kw_only=True, slots=True)
class Nowhere(GivenData):
    source: str = "nowhere"


@pytest.mark.parametrize(
    "place", ["no_such_module:It", "math:pi", "math:no_such_name", "mens_exp.errors:MensError"]
)
def test_a_source_without_a_class_is_refused(monkeypatch, tmp_path, place):
    """The class is imported when its rows are read, and must have the method."""
    spec = SourceSpec(name="nowhere", schema=Nowhere, rows=place)
    monkeypatch.setattr(SOURCES, "_known", {"nowhere": spec})
    with pytest.raises(SetupError, match="the data source nowhere cannot be used"):
        load_rows(Nowhere(), tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "stdlib", "schema": StdlibData, "rows": "math:pi"}, "rows names a class exactly"),
        ({"name": "nowhere", "schema": Nowhere}, "rows names a class exactly"),
        ({"name": "other", "schema": Nowhere, "rows": "math:pi"}, "source is 'nowhere'"),
    ],
)
def test_a_spec_that_contradicts_its_schema_is_refused(values, said):
    """The error comes when its module is imported, so the message names the package."""
    with pytest.raises(TypeError, match=said):
        SourceSpec(**values)


class Apart:
    """A source that names a validation row."""

    def rows(self):
        return [{"prompt": "a", "response": "b"}]

    def validation_rows(self):
        return [{"prompt": "c", "response": "d"}]


def test_a_source_with_rows_to_validate_on_is_part_of_no_mix(monkeypatch, tmp_path):
    """A mix is split as a whole."""
    place = "mens_exp.config.data_sources:Apart"
    monkeypatch.setattr("mens_exp.config.data_sources.Apart", Apart, raising=False)
    spec = SourceSpec(name="nowhere", schema=Nowhere, rows=place)
    monkeypatch.setattr(SOURCES, "_known", {"nowhere": spec})
    monkeypatch.setattr(SOURCES, "_offers", {"nowhere": []})
    entries = [{"source": "nowhere", "weight": 1}, {"source": "stdlib", "weight": 1}]
    with pytest.raises(DataError, match="provides its own validation rows") as raised:
        load_rows(MixData(sources=entries), tmp_path)
    assert raised.value.where == "data.sources[0].source"
