from __future__ import annotations

import json
from pathlib import Path

import pytest

from mens_exp.errors import MensError
from mens_exp.export.handoff import (
    HANDOFF_FILE,
    BackendFamily,
    Handoff,
    read_handoff,
    write_handoff,
)

GOLDEN = Path(__file__).parents[1] / "golden" / HANDOFF_FILE


def record(**changes):
    values = {
        "backend_family": BackendFamily.VLLM,
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "adapter_path": "adapter",
        "artifact_dir": ".",
        "tokenizer_source": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "prompt_format": "chatml",
        "openai_base_url": "http://127.0.0.1:8000/v1",
        "notes": "rank 16",
    }
    return Handoff(**values | changes)


def test_the_record_is_the_committed_one(tmp_path):
    """The writer gives the golden bytes, and the reader returns the same values."""
    write_handoff(record(), tmp_path)
    assert (tmp_path / HANDOFF_FILE).read_bytes() == GOLDEN.read_bytes()
    assert read_handoff(GOLDEN) == read_handoff(tmp_path) == record()


# The source system's record as documented there; keys with a question mark are optional.
THEIRS = {
    "schema": "vox_external_serving_handoff_v1",
    "schema_version": 1,
    "backend_family": "vllm",
    "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "artifact_dir": ".",
    "tokenizer_source": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "prompt_format": "chatml",
}
OPTIONAL = {
    "adapter_path": "adapter",
    "openai_base_url": "http://127.0.0.1:8000/v1",
    "notes": "rank 16",
}
FAMILIES = ["vllm", "ollama", "hf-transformers", "openai-compatible", "other"]


def test_the_record_is_the_source_s_key_for_key(tmp_path):
    """File name, schema, every key and every backend family match."""
    write_handoff(record(), tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.name == "external_serving_handoff_v1.json"
    assert json.loads(file.read_text("utf-8")) == THEIRS | OPTIONAL
    assert [str(family) for family in BackendFamily] == FAMILIES
    file.write_text(json.dumps(THEIRS | dict.fromkeys(OPTIONAL)))  # the schema allows null
    assert read_handoff(tmp_path) == record(**dict.fromkeys(OPTIONAL))


def test_a_record_of_an_earlier_export_is_read_under_today_s_name(tmp_path):
    """Only the schema's name differs: it has no prefix and no version."""
    older = THEIRS | OPTIONAL | {"schema": "external_serving_handoff"}
    (tmp_path / HANDOFF_FILE).write_text(json.dumps(older))
    assert read_handoff(tmp_path) == record()


def test_what_is_unknown_is_left_out(tmp_path):
    """Three optional keys are absent rather than null."""
    bare = record(adapter_path=None, openai_base_url=None, notes=None)
    write_handoff(bare, tmp_path)
    written = json.loads((tmp_path / HANDOFF_FILE).read_text("utf-8"))
    assert {"adapter_path", "openai_base_url", "notes"} & written.keys() == set()
    assert read_handoff(tmp_path) == bare


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "other"}, "not this format.*vox_external_serving_handoff_v1"),
        ({"schema_version": 2}, "of an unsupported version"),
        ({"schema_version": True}, "of an unsupported version"),
        ({"backend_family": "olama"}, "backend_family.*ollama"),
        ({"base_model": 3}, "base_model.*a string"),
        ({"tokenizer_source": None}, "tokenizer_source"),
        ({"prompt_format": " "}, "prompt_format: is empty"),
        ({"artifact_dir": "/srv/model"}, "points outside the export"),
        ({"adapter_path": "../adapter"}, "points outside the export"),
        ({"note": "x"}, "unknown key.*notes"),
    ],
)
def test_a_record_that_is_wrong_is_refused(tmp_path, changes, said):
    """Schema and version are checked first, then every key."""
    values = json.loads(GOLDEN.read_text("utf-8")) | changes
    (tmp_path / HANDOFF_FILE).write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(MensError, match=said):
        read_handoff(tmp_path)


def test_a_missing_key_is_named(tmp_path):
    """A file that is not JSON, not an object or not there is named too."""
    values = json.loads(GOLDEN.read_text("utf-8"))
    del values["prompt_format"]
    for text, said in (
        (json.dumps(values), "prompt_format: missing key"),
        ("[]", "an object"),
        ("{", "not JSON"),
    ):
        (tmp_path / HANDOFF_FILE).write_text(text, encoding="utf-8")
        with pytest.raises(MensError, match=said):
            read_handoff(tmp_path)
    with pytest.raises(MensError, match="cannot be read"):
        read_handoff(tmp_path / "absent.json")


def test_a_record_that_could_not_be_read_is_not_written(tmp_path):
    """The writer applies the reader's checks."""
    with pytest.raises(MensError, match="points outside the export"):
        write_handoff(record(artifact_dir="/srv"), tmp_path)
    assert list(tmp_path.iterdir()) == []
