"""Send a run elsewhere: export.format=bundle, and uploads to the Hugging Face hub.

A bundle is a reproducible archive with one folder named after the run; ``bundle.json`` in it lists
every other file with its SHA-256. When unpacked, it is a run directory again, and is verified
before it is read. Files are scanned for credentials and absolute paths first.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.credentials import of_known_form
from mens_exp.artifacts.digest import CHECKPOINT_DIGESTS, sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.record import check_type, parse_json
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.errors import DataError, MensError, Problems, RequestError, SetupError
from mens_exp.layout.hub_errors import client_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.artifacts.run_dir import RunDir

_TEXT = {".json", ".jsonl", ".yaml", ".md", ".html", ".jinja"}
_ABSOLUTE = re.compile(r"(?:^|=)(/[^/\s'\"]+/[^\s'\"]*|[A-Za-z]:[\\/][^\s'\"]+|~/[^\s'\"]+)$")


def run_files(run: RunDir, *, checkpoints: bool = False) -> dict[str, Path]:
    """Return the files that make a run complete, by their path relative to its directory."""
    files = [
        run.manifest,
        run.config,
        run.plan,
        run.chat_template,
        run.telemetry,
        run.scorecard,
        run.events,
        run.samples,
        run.validation,
        run.report,
        run.model_card,
        run.run_summary,
        run.skip_stats,
        *run.scorecards.glob("step_*.jsonl"),
        *run.adapter.rglob("*"),
    ]
    if checkpoints:
        files += [*run.checkpoints.glob("*.ckpt"), run.checkpoints / CHECKPOINT_DIGESTS]
    whole = {path.relative_to(run.path): path for path in files if path.is_file()}
    return {
        name.as_posix(): whole[name]
        for name in sorted(whole)
        if not any(part.startswith(".") for part in name.parts)
    }


def changed_files(run: RunDir) -> Iterator[MensError]:
    """Yield every output that no longer matches the manifest."""
    for name, expected in Manifest.read(run.manifest).outputs.items():
        path = run.path / name
        found = sha256_file(path) if path.is_file() else "no such file"
        if found != expected:
            yield DataError(
                "has changed since the run ended",
                where=str(path),
                found=found,
                expected=expected,
                remedy="restore it, or train again",
            )


def secret_problems(files: Iterable[tuple[str, Path]]) -> Iterator[MensError]:
    """Yield every file that seems to contain a credential, without quoting the credential."""
    for name, path in files:
        if path.suffix in _TEXT and (found := of_known_form(path.read_text("utf-8"))):
            yield RequestError(
                "contains what looks like a credential",
                where=name,
                found=found,
                expected="none",
                remedy="revoke it, and run again with it in an environment variable",
            )


def path_problems(files: Iterable[tuple[str, Path]]) -> Iterator[MensError]:
    """Yield every absolute path of this machine that a record contains, once each."""
    seen = set()
    for name, path in files:
        for place, text in _texts(path):
            found = _ABSOLUTE.search(text)
            if found and found[1] not in seen:
                seen.add(found[1])
                yield RequestError(
                    "names an absolute path of this machine",
                    where=f"{name}: {place}",
                    found=found[1],
                    expected="relative paths, which mean something elsewhere",
                    remedy="run with relative paths, or add export.allow_absolute_paths=true",
                )


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every text value of a structured file with its location."""
    if path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            yield from _strings(json.loads(line), str(number))
    elif path.suffix == ".json":
        yield from _strings(json.loads(path.read_text("utf-8")), "")
    elif path.suffix == ".yaml":
        yield from _strings(parse_yaml(path.read_bytes(), str(path)), "")


def _strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in pairs:
            yield from _strings(entry, f"{place}.{key}" if place else str(key))


_VERSION = 1


def packing_problems(
    run: RunDir, *, checkpoints: bool, allow_absolute_paths: bool
) -> list[MensError]:
    """List problems that prevent packing a run."""
    files = run_files(run, checkpoints=checkpoints).items()
    problems = [*changed_files(run), *secret_problems(files)]
    if not allow_absolute_paths:
        problems += path_problems(files)
    return problems


def archive_problems(out: str | None) -> list[MensError]:
    """Report a path for the archive that holds something other than an earlier bundle."""
    archive = Path(out or "").expanduser()
    if out is None or _may_be_written(archive):
        return []
    return [
        RequestError(
            "already exists and is not an earlier bundle"
            if archive.exists()
            else "is inside a file",
            where="out",
            found=out,
            expected="a new file, or a bundle, which is replaced",
        )
    ]


def _may_be_written(archive: Path) -> bool:
    if not archive.exists():
        return next(one for one in archive.absolute().parents if one.exists()).is_dir()
    try:
        with tarfile.open(archive, "r:gz") as tar:
            first = tar.next()
    except (OSError, EOFError, tarfile.TarError, zlib.error):  # a directory too
        return False
    return first is not None and first.name.endswith("/bundle.json")


def pack(run: RunDir, archive: Path, *, checkpoints: bool) -> dict[str, str]:
    """Write the archive atomically.

    Returns:
        Path relative to the run's folder -> SHA-256 of every packed file.
    """
    files = run_files(run, checkpoints=checkpoints)
    hashes = {name: sha256_file(path) for name, path in files.items()}
    listing = {
        "format": "mens_exp_bundle",
        "version": _VERSION,
        "run_id": run.path.resolve().name,
        "files": hashes,
    }
    folder = run.path.resolve().name
    buffer = io.BytesIO()
    # No timestamp and no owner, so that packing a run twice gives the same bytes.
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        _add(tar, f"{folder}/{run.bundle.name}", _json(listing))
        for name, path in files.items():
            _add(tar, f"{folder}/{name}", path.read_bytes())
    atomic.write_bytes(archive, buffer.getvalue())
    return hashes


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(content), 0o644, 0
    tar.addfile(entry, io.BytesIO(content))


def verify(run: RunDir) -> None:
    """Compare an unpacked bundle with its list; a directory without a list passes.

    Raises:
        DataError: a file is missing, was added or has changed since packing, or the list cannot be
            read.
        Problems: several of these.
    """
    if run.bundle.is_file():
        Problems.raise_if(list(_differences(run)))


def _differences(run: RunDir) -> Iterator[MensError]:
    listing = parse_json(run.bundle.read_bytes(), str(run.bundle))
    if not isinstance(listing, dict) or listing.get("format") != "mens_exp_bundle":
        yield DataError("is not a list of a bundle", where=str(run.bundle))
        return
    if listing.get("version") != _VERSION:
        yield DataError(
            "is of another version",
            where=str(run.bundle),
            found=listing.get("version"),
            expected=str(_VERSION),
            remedy="read it with the mens_exp that wrote it, or a newer one",
        )
        return
    problems = check_type(listing.get("files"), dict[str, str], f"{run.bundle}: files")
    yield from problems
    for name, expected in () if problems else sorted(listing["files"].items()):
        relative = Path(name)
        if relative.is_absolute() or ".." in relative.parts:
            yield DataError("points outside the bundle", where=str(run.bundle), found=name)
            continue
        path = run.path / relative
        found = _hash(path, inside=run.path)
        if found != expected:
            yield DataError(
                "has changed since it was packed",
                where=str(path),
                found=found,
                expected=expected,
                remedy="unpack the bundle again",
            )
    for path in () if problems else sorted(run.path.rglob("*")):
        name = path.relative_to(run.path).as_posix()
        is_ours = path in (run.bundle, run.sync) or name in listing["files"]
        if not is_ours and (path.is_symlink() or not path.is_dir()):
            yield DataError(
                "was not packed",
                where=str(path),
                found="a file that the bundle does not list",
                expected="the files of the list alone",
                remedy="move it out of the directory",
            )


def _hash(path: Path, *, inside: Path) -> str:
    try:
        if not path.resolve().is_relative_to(inside.resolve()):
            return "a link that points outside the bundle"
        return sha256_file(path) if path.is_file() else "no such file"
    except ValueError:  # a null byte in a name
        return "no such file"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "no such file"
        raise


_LOGIN = "log in with: hf auth login (or set HF_TOKEN)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """The hub's report of the repository after an upload."""

    repo: str
    url: str
    commit: str
    private: bool


def login_problems() -> list[MensError]:
    """Report a missing hub login, without ever prompting."""
    from huggingface_hub import get_token

    if get_token():
        return []
    return [
        SetupError(
            "no account is logged in to the Hugging Face hub",
            where="task=push",
            found="no token",
            expected="a token that may write",
            remedy=_LOGIN,
        )
    ]


def hub_files(run: RunDir) -> dict[str, Path]:
    """Return the files to upload, by their path in the repository.

    The adapter is at the root, where ``PeftModel.from_pretrained`` looks for it. The card is the
    repository's README, and the records are in a separate folder.
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
        private: whether to create a new repository as private.
        message: the commit message.

    Raises:
        RequestError: the repository is public although a private one was requested, or the hub
            refuses the upload.
        SetupError: the hub cannot be reached, or rejects the token.
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
            where="push.repo",
            found=f"{type(error).__name__}: {error}",
            remedy="check the connection, and HF_ENDPOINT where it is set",
        ) from error
    return Pushed(repo=repo, url=f"{api.endpoint}/{repo}", commit=commit.oid, private=is_private)


def _made(api: Any, repo: str, *, private: bool) -> bool:
    """Create the repository unless it exists, and return whether it is private."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = bool(api.repo_info(repo).private)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private, exist_ok=True)
        return private
    if private and not found:
        raise RequestError(
            "the repository already exists and is public",
            where="push.repo",
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
            where="push.repo",
            found=f"{repo}: {said}",
            expected="a token with write access to it",
            remedy=_LOGIN,
        )
    return RequestError("the hub refuses the upload", where="push.repo", found=f"{repo}: {said}")
