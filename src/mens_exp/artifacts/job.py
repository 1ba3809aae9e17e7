"""job.json: what a job of a sweep was launched with, beside its frozen config.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mens_exp.artifacts.record import StoredRecord

if TYPE_CHECKING:
    from mens_exp.errors import DataError

__all__ = ["Job"]


@dataclass(kw_only=True, slots=True)
class Job(StoredRecord):
    """One job, frozen at launch.

    Attributes:
        format: always ``mens_exp_job``.
        version: of this layout.
        number: its place in the sweep.
        overrides: what its configuration was composed from.
        choices: the option chosen in each config group.
        config_digest: of the configuration in config.yaml.
        code_sha256: of the code that composed it.
        own_files: the user's own modules that it names, relative path -> SHA-256.
        contract: digest of what it means; None for a task that trains nothing.
    """

    format: str = "mens_exp_job"
    version: int = 1
    number: int
    overrides: list[str]
    choices: dict[str, str | None]
    config_digest: str
    code_sha256: str
    own_files: dict[str, str] = field(default_factory=dict)
    contract: str | None = None

    def problems(self, where: str) -> list[DataError]:
        """Return nothing: its hashes are compared where it is used."""
        del where
        return []
