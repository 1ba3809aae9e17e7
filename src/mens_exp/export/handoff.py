"""external_serving_handoff_v1.json: what another program needs to serve an export.

The record's keys are those of the systems that read it, so it has `schema` and `schema_version`
where our own records have `format` and `version`. Its paths are relative to its directory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, get_type_hints

from mens_exp.artifacts import atomic
from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.typed_json import check_keys, parse_json
from mens_exp.errors import DataError, MensError, Problems

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FILE", "BackendFamily", "Handoff", "read_handoff", "write_handoff"]

FILE = "external_serving_handoff_v1.json"
_SCHEMA = "vox_external_serving_handoff_v1"
_OLDER_SCHEMAS = ("external_serving_handoff",)  # of our own earlier exports
_VERSION = 1
_OPTIONAL = frozenset({"adapter_path", "openai_base_url", "notes"})


class BackendFamily(StrEnum):
    """The program that is to serve."""

    VLLM = "vllm"
    OLLAMA = "ollama"
    TRANSFORMERS = "hf-transformers"
    OPENAI = "openai-compatible"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class Handoff:
    """The record.

    Attributes:
        backend_family: the program that is to serve.
        base_model: id or name of the model.
        artifact_dir: directory of what is served.
        tokenizer_source: directory or file that holds the tokenizer, or the id of a model.
        prompt_format: how a conversation becomes a prompt, such as ``chatml``.
        adapter_path: directory of the adapter, where one is served beside the base.
        openai_base_url: address of a server that runs already.
        notes: what a reader should know.
        schema: always ``vox_external_serving_handoff_v1``.
        schema_version: of this layout.
    """

    backend_family: BackendFamily
    base_model: str
    artifact_dir: str
    tokenizer_source: str
    prompt_format: str
    adapter_path: str | None = None
    openai_base_url: str | None = None
    notes: str | None = None
    schema: str = _SCHEMA
    schema_version: int = _VERSION


def write_handoff(record: Handoff, directory: Path) -> None:
    """Write the record into an export's directory, atomically; what is null is left out.

    Raises:
        MensError: it could not be read back; nothing is written.
    """
    path = directory / FILE
    value = {name: item for name, item in asdict(record).items() if item is not None}
    found = _problems(value, str(path))
    if found:
        raise MensError(
            "a record could not be read back, so it is not written",
            found="; ".join(str(problem) for problem in found),
        )
    atomic.write_json(path, value)


def read_handoff(path: Path) -> Handoff:
    """Read a record.

    Args:
        path: the file, or the directory that it lies in.

    Raises:
        DataError: it is missing, is not JSON, or breaks one rule.
        Problems: it breaks several.
    """
    file = path / FILE if path.is_dir() else path
    value = parse_json(read_bytes(file), str(file))
    if isinstance(value, dict) and value.get("schema") in _OLDER_SCHEMAS:
        value = {**value, "schema": _SCHEMA}
    Problems.raise_if(_problems(value, str(file)))
    return Handoff(**{**value, "backend_family": BackendFamily(value["backend_family"])})


def _problems(value: Any, where: str) -> list[DataError]:
    if not isinstance(value, dict):
        return check_keys(value, {}, (), where)
    if value.get("schema") != _SCHEMA:
        found = value.get("schema", "no such key")
        return [
            DataError("not this format", where=f"{where}: schema", found=found, expected=_SCHEMA)
        ]
    version = value.get("schema_version")
    if version != _VERSION or isinstance(version, bool):
        return [
            DataError(
                "of a version that this program does not read",
                where=f"{where}: schema_version",
                found=version,
                expected=str(_VERSION),
                remedy="upgrade mens-exp if it is newer",
            )
        ]
    hints = get_type_hints(Handoff)
    required = {field.name for field in fields(Handoff)} - _OPTIONAL
    return check_keys(value, hints, required, where) or [
        *_empty(value, where),
        *_leading_out(value, where),
    ]


def _empty(value: dict[str, Any], where: str) -> list[DataError]:
    return [
        DataError("is empty", where=f"{where}: {name}", expected="a text")
        for name, item in sorted(value.items())
        if isinstance(item, str) and not item.strip()
    ]


def _leading_out(value: dict[str, Any], where: str) -> list[DataError]:
    """List paths that mean nothing elsewhere."""
    found = []
    for name in ("artifact_dir", "adapter_path"):
        path = PurePosixPath(value.get(name) or ".")
        if path.is_absolute() or ".." in path.parts:
            found.append(
                DataError(
                    "leads out of the export",
                    where=f"{where}: {name}",
                    found=str(path),
                    expected="a path relative to the record's directory",
                )
            )
    return found
