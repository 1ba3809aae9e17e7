"""A run on the Hugging Face hub: the adapter as PEFT loads it, its card and its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.errors import MensError, RequestError, SetupError
from mens_exp.layout.hub_errors import client_error

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.artifacts.run_dir import RunDir

__all__ = ["Pushed", "hub_files", "login_problems", "push"]

_LOGIN = "log in with: hf auth login (or set HF_TOKEN)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """The contents of the hub after an upload, as it reports them."""

    repo: str
    url: str
    commit: str
    private: bool


def login_problems() -> list[MensError]:
    """Say that nobody is logged in, where that is so; nothing is ever asked for."""
    from huggingface_hub import get_token

    if get_token():
        return []
    return [
        SetupError(
            "nobody is logged in to the Hugging Face hub",
            where="task=push",
            found="no token",
            expected="a token that may write",
            remedy=_LOGIN,
        )
    ]


def hub_files(run: RunDir) -> dict[str, Path]:
    """Return what is uploaded, by its path in the repository.

    The adapter lies at the root, where ``PeftModel.from_pretrained`` looks for it; the card is the
    repository's README; the records lie in a folder of their own.
    """
    files = {
        path.relative_to(run.peft).as_posix(): path
        for path in sorted(run.peft.rglob("*"))
        if path.is_file()
    }
    files["README.md"] = run.model_card
    for record in (run.manifest, run.config, run.scorecard, run.adapter / "adapter_manifest.json"):
        if record.is_file():
            files[f"mens_exp/{record.name}"] = record
    return files


def push(run: RunDir, repo: str, *, private: bool, message: str) -> Pushed:
    """Upload a run in one commit.

    Args:
        run: a training run that has ended.
        repo: ``<user>/<name>``.
        private: whether a repository that is not there yet is made a private one.
        message: of the commit.

    Raises:
        RequestError: the repository is public and a private one was asked for, or the hub
            refuses the upload.
        SetupError: the hub cannot be reached, or does not know the token.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        is_private = _made(api, repo, private=private)
        operations = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
            for name, path in hub_files(run).items()
        ]
        commit = api.create_commit(repo, operations, commit_message=message)
    except HfHubHTTPError as error:
        raise _refused(repo, error) from error
    except (client_error(), OSError) as error:
        raise SetupError(
            "the Hugging Face hub cannot be reached",
            where="repo",
            found=f"{type(error).__name__}: {error}",
            remedy="check the connection, and HF_ENDPOINT where it is set",
        ) from error
    return Pushed(repo=repo, url=f"{api.endpoint}/{repo}", commit=commit.oid, private=is_private)


def _made(api: Any, repo: str, *, private: bool) -> bool:
    """Make the repository unless it is there, and tell whether it is private."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = bool(api.repo_info(repo).private)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private, exist_ok=True)
        return private
    if private and not found:
        raise RequestError(
            "the repository is there already, and public",
            where="repo",
            found=repo,
            expected="a private one, as push.private says",
            remedy="add push.private=false to publish, or name another repository",
        )
    return found


def _refused(repo: str, error: Any) -> MensError:
    status = getattr(error.response, "status_code", None)
    said = (getattr(error, "server_message", None) or str(error)).splitlines()[0]
    if status in {401, 403}:
        return SetupError(
            "the hub does not let this token write there",
            where="repo",
            found=f"{repo}: {said}",
            expected="a token with write access to it",
            remedy=_LOGIN,
        )
    return RequestError("the hub refuses the upload", where="repo", found=f"{repo}: {said}")
