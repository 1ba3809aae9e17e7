"""What the hub refuses, in our words: the login command, the nearest id, or that it is away."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import yaml

from mens_exp.artifacts.nearest import nearest
from mens_exp.config.compose import config_directory
from mens_exp.errors import ConfigError, MensError, ModelFileError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["client_error", "translated"]

_SEARCHED = 50  # models looked at for the nearest id, by downloads; unverified guess
_LOGIN = "hf auth login"


def client_error() -> type[Exception]:
    """Return what the HTTP client raises that huggingface_hub builds on.

    Which client that is differs from version to version; the hub's own error tells it.
    """
    from huggingface_hub.errors import HfHubHTTPError

    found: type[Exception] = HfHubHTTPError.__bases__[0]
    return found


@contextmanager
def translated(model_id: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises inside the block into an error with a remedy.

    Raises:
        ModelFileError: the model is gated, private or not there.
        ConfigError: there is no such revision, or the id is none.
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
            "is neither a directory nor an id of the hub",
            where="model.id",
            found=model_id,
            expected="a directory that exists, or an id such as Qwen/Qwen2.5-7B-Instruct",
        ) from error
    except RevisionNotFoundError as error:
        raise _no_revision(model_id, revision) from error
    except (LocalEntryNotFoundError, RevisionResolutionError) as error:
        raise _away(model_id, revision, error) from error
    except HfHubHTTPError as error:
        raise _refused(model_id, error) from error
    except (client_error(), ConnectionError) as error:
        raise _away(model_id, revision, error) from error
    except OSError as error:
        raise SetupError(
            "a file of the model cannot be stored",
            where=f"model.id={model_id}",
            found=error.strerror or str(error),
            remedy="free space or permissions in the folder that HF_HOME names",
        ) from error


def _away(model_id: str, revision: str | None, error: Exception) -> MensError:
    from huggingface_hub import constants

    cause = error.__cause__ or error
    reason = f"{constants.ENDPOINT} does not answer ({type(cause).__name__})"
    if constants.is_offline_mode():
        reason = "HF_HUB_OFFLINE is set"
    wanted = f"{model_id} --revision {revision}" if revision else model_id
    return SetupError(
        "the model is not whole in the cache, and the hub cannot be reached",
        where="model.id",
        found=f"{model_id}, {reason}",
        expected=f"its files under {constants.HF_HUB_CACHE}",
        remedy=f"where there is a network, run: hf download {wanted}; or give a directory instead",
    )


def _no_revision(model_id: str, revision: str | None) -> MensError:
    from huggingface_hub import HfApi

    names: list[str] = []
    try:
        refs = HfApi().list_repo_refs(model_id)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
    except Exception:  # noqa: BLE001, S110  # a hint must not replace the error itself
        pass
    close = nearest(revision or "", names)
    hint = f"; the nearest is {close}" if close else ""
    return ConfigError(
        f"{model_id} has no such revision",
        where="model.revision",
        found=revision,
        expected=f"a branch, a tag or a whole commit hash{hint}",
    )


def _refused(model_id: str, error: Exception) -> MensError:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelFileError(
            "the model is gated",
            where="model.id",
            found=model_id,
            expected="terms that you have accepted, and a login",
            remedy=f"accept them at {constants.ENDPOINT}/{model_id}, then run: {_LOGIN}",
        )
    if isinstance(error, RepositoryNotFoundError):
        close = _nearest_id(model_id)
        hint = f"; the nearest is {close}" if close else ""
        return ModelFileError(
            "there is no such model, or it is private",
            where="model.id",
            found=model_id,
            expected=f"a directory that exists, or an id of the hub{hint}",
            remedy=f"correct model.id; for a private model run: {_LOGIN}",
        )
    return SetupError(
        "the hub does not give the model",
        where="model.id",
        found=f"{model_id}: {' '.join(str(error).split())}",
        remedy="try again later, or give a directory instead",
    )


def _nearest_id(model_id: str) -> str | None:
    """Search the presets' ids, and the hub's as far as it answers."""
    owner, _, name = model_id.rpartition("/")
    return nearest(model_id, [*_preset_ids(), *_found(owner=owner), *_found(name=name)])


def _preset_ids() -> list[str]:
    presets = [
        yaml.safe_load(file.read_text("utf-8"))
        for file in sorted((config_directory() / "model").glob("*.yaml"))
    ]
    return [str(preset["id"]) for preset in presets if "id" in preset]


def _found(*, owner: str = "", name: str = "") -> list[str]:
    from huggingface_hub import HfApi

    if not owner and not name:
        return []
    try:
        models = HfApi().list_models(
            author=owner or None, search=name or None, sort="downloads", limit=_SEARCHED
        )
        return [model.id for model in models]
    except Exception:  # noqa: BLE001  # a hint must not replace the error itself
        return []
