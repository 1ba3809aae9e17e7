"""Translation of Hub errors: the login command, the nearest id, or that the Hub is unreachable."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from mens_exp.config.option_files import config_directory
from mens_exp.errors import ConfigError, DataError, MensError, ModelFileError, SetupError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEARCHED = 50  # repositories searched for the nearest id, by downloads; unverified guess
_LOGIN = "hf auth login"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of repository: its name on the Hub, the settings that name it, and an alternative.

    Attributes:
        name: the Hub's name for it, and ours.
        group: the config group with `id` and `revision`.
        accepted: accepted forms of the id.
        flag: flag of ``hf download``.
        instead: an alternative if the Hub is not available.
    """

    name: str
    group: str
    accepted: str
    flag: str
    instead: str


MODEL = Kind(
    name="model",
    group="model",
    accepted="a directory that exists, or an id of the hub",
    flag="",
    instead="give a directory instead",
)
DATASET = Kind(
    name="dataset",
    group="data",
    accepted="an id of a dataset of the hub",
    flag="--repo-type dataset ",
    instead="give files instead: data=jsonl data.path=<files>",
)
_EXAMPLES = {MODEL: "Qwen/Qwen2.5-7B-Instruct", DATASET: "HuggingFaceH4/no_robots"}


def client_error() -> type[Exception]:
    """Return the base exception of the HTTP client used by huggingface_hub.

    The client differs between versions, so it is derived from the Hub's own error.
    """
    from huggingface_hub.errors import HfHubHTTPError

    found: type[Exception] = HfHubHTTPError.__bases__[0]
    return found


@contextmanager
def translated(repo_id: str, revision: str | None, kind: Kind = MODEL) -> Iterator[None]:
    """Translate exceptions of huggingface_hub within the context to errors with a remedy.

    Raises:
        ModelFileError: the model is gated, private or missing; for a dataset a DataError.
        ConfigError: there is no such revision, or the id is invalid.
        SetupError: the hub cannot be reached and the cache does not hold what is needed.
    """
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RevisionNotFoundError,
        RevisionResolutionError,
    )

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(
            "is neither a directory nor an id of the hub"
            if kind is MODEL
            else "is not an id of the hub",
            where=f"{kind.group}.id",
            found=repo_id,
            expected=f"{kind.accepted}, such as {_EXAMPLES[kind]}",
        ) from error
    except RevisionNotFoundError as error:
        raise _no_revision(repo_id, revision, kind) from error
    except (LocalEntryNotFoundError, RevisionResolutionError) as error:
        raise _away(repo_id, revision, error, kind) from error
    except HfHubHTTPError as error:
        raise _refused(repo_id, error, kind) from error
    except (client_error(), ConnectionError) as error:
        raise _away(repo_id, revision, error, kind) from error
    except OSError as error:
        raise SetupError(
            f"a file of the {kind.name} cannot be stored",
            where=f"{kind.group}.id={repo_id}",
            found=error.strerror or str(error),
            remedy="free space or permissions in the folder that HF_HOME names",
        ) from error


def _away(repo_id: str, revision: str | None, error: Exception, kind: Kind) -> MensError:
    from huggingface_hub import constants

    cause = error.__cause__ or error
    reason = f"{constants.ENDPOINT} does not answer ({type(cause).__name__})"
    if constants.is_offline_mode():
        reason = "HF_HUB_OFFLINE is set"
    wanted = kind.flag + (f"{repo_id} --revision {revision}" if revision else repo_id)
    return SetupError(
        f"the {kind.name} is incomplete in the cache, and the hub cannot be reached",
        where=f"{kind.group}.id",
        found=f"{repo_id}, {reason}",
        expected=f"its files under {constants.HF_HUB_CACHE}",
        remedy=f"where there is a network, run: hf download {wanted}; or {kind.instead}",
    )


def _no_revision(repo_id: str, revision: str | None, kind: Kind) -> MensError:
    from huggingface_hub import HfApi

    names: list[str] = []
    try:
        refs = HfApi().list_repo_refs(repo_id, repo_type=kind.name)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
    except Exception:  # noqa: BLE001, S110  # a hint must not replace the error itself
        pass
    close = nearest(revision or "", names)
    hint = f"; the nearest is {close}" if close else ""
    return ConfigError(
        f"{repo_id} does not have this revision",
        where=f"{kind.group}.revision",
        found=revision,
        expected=f"a branch, a tag or a whole commit hash{hint}",
    )


def _refused(repo_id: str, error: Exception, kind: Kind) -> MensError:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    wrong = ModelFileError if kind is MODEL else DataError
    if isinstance(error, GatedRepoError):
        page = repo_id if kind is MODEL else f"datasets/{repo_id}"
        return wrong(
            f"the {kind.name} is gated",
            where=f"{kind.group}.id",
            found=repo_id,
            expected="terms that you have accepted, and a login",
            remedy=f"accept them at {constants.ENDPOINT}/{page}, then run: {_LOGIN}",
        )
    if isinstance(error, RepositoryNotFoundError):
        close = _nearest_id(repo_id, kind)
        hint = f"; the nearest is {close}" if close else ""
        return wrong(
            f"the {kind.name} does not exist or is private",
            where=f"{kind.group}.id",
            found=repo_id,
            expected=f"{kind.accepted}{hint}",
            remedy=f"correct {kind.group}.id; for a private {kind.name} run: {_LOGIN}",
        )
    return SetupError(
        f"the hub did not provide the {kind.name}",
        where=f"{kind.group}.id",
        found=f"{repo_id}: {' '.join(str(error).split())}",
        remedy=f"try again later, or {kind.instead}",
    )


def _nearest_id(repo_id: str, kind: Kind) -> str | None:
    """Search the presets' ids, and the Hub's if it answers."""
    owner, _, name = repo_id.rpartition("/")
    ours = _preset_ids() if kind is MODEL else []
    return nearest(repo_id, [*ours, *_found(kind, owner=owner), *_found(kind, name=name)])


def _preset_ids() -> list[str]:
    presets = [
        yaml.safe_load(file.read_text("utf-8"))
        for file in sorted((config_directory() / "model").glob("*.yaml"))
    ]
    return [str(preset["id"]) for preset in presets if "id" in preset]


def _found(kind: Kind, *, owner: str = "", name: str = "") -> list[str]:
    from huggingface_hub import HfApi

    if not owner and not name:
        return []
    api = HfApi()
    search: Any = api.list_models if kind is MODEL else api.list_datasets
    try:
        found = search(author=owner or None, search=name or None, sort="downloads", limit=_SEARCHED)
        return [one.id for one in found]
    except Exception:  # noqa: BLE001  # a hint must not replace the error itself
        return []
