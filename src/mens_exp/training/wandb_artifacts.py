"""W&B artifacts of a run: base, adapter, merged model, scorecard and comparison.

An artifact's version is its content, so that the same files sent twice, or read by another run, are
the same version: that is what ties runs to one line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.atomic import write_json
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.training.wandb_names import id_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import wandb

    from mens_exp.artifacts.run_dir import RunDir

__all__ = ["artifact_of", "base_of", "made_by"]

_SHOWN = 12  # characters of a hash in a name


def made_by(run_dir: RunDir, manifest: Manifest) -> Iterator[wandb.Artifact]:
    """Yield what a run made, as far as it is there, and its manifest last.

    The files are copied into wandb's staging directory: a resumed run will replace them. Of a
    merged model it is the certificate: weights stay where they are.
    """
    for kind, root, files in _made(run_dir):
        if files:
            yield _artifact(kind, id_of(run_dir, manifest), manifest, root, files)
    files = [run_dir.manifest]
    yield _artifact("manifest", id_of(run_dir, manifest), manifest, run_dir.path, files)


def artifact_of(kind: str, run_dir: RunDir) -> wandb.Artifact | None:
    """Return what another run made, to be read by this one; None where it is not at hand.

    Args:
        kind: ``adapter``, ``merged``, ``scorecard`` or ``comparison``.
        run_dir: of the other run.
    """
    found = {name: (root, files) for name, root, files in _made(run_dir)}
    root, files = found[kind]
    if not files or not run_dir.manifest.is_file():
        return None
    manifest = Manifest.read(run_dir.manifest)
    return _artifact(kind, id_of(run_dir, manifest), manifest, root, files)


def base_of(manifest: Manifest, staging: Path) -> wandb.Artifact | None:
    """Return the base model that a run read: its name and hashes, not its weights.

    Args:
        manifest: of the run.
        staging: a directory of this process, for the one file that describes it.
    """
    import wandb

    inputs = manifest.inputs
    sha256 = inputs.get("base_weights_sha256")
    if not isinstance(sha256, str):
        return None
    names = ("base_model", "base_source", "base_revision", "base_weights_sha256")
    described = {name: inputs[name] for name in names if inputs.get(name) is not None}
    file = staging / f"base_{sha256[:_SHOWN]}.json"
    write_json(file, described)
    artifact = wandb.Artifact(f"base-{sha256[:_SHOWN]}", type="base", metadata=described)
    artifact.add_file(str(file), name="base.json")
    return artifact


def _made(run_dir: RunDir) -> list[tuple[str, Path, list[Path]]]:
    """List what a run may make: kind, where its names begin, and the files that are there."""
    # A dot begins the name of what a dead writer left half-written.
    adapter = [path for path in run_dir.adapter.rglob("[!.]*") if path.is_file()]
    scorecard = [run_dir.scorecard, run_dir.events] if run_dir.scorecard.is_file() else []
    return [
        ("adapter", run_dir.adapter, sorted(adapter)),
        ("merged", run_dir.path, _there([run_dir.parity])),
        ("scorecard", run_dir.path, _there(scorecard)),
        ("comparison", run_dir.path, _there([run_dir.comparison])),
    ]


def _there(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if path.is_file()]


def _artifact(
    kind: str, run_id: str, manifest: Manifest, root: Path, files: Sequence[Path]
) -> wandb.Artifact:
    import wandb

    hashes = {path.relative_to(root).as_posix(): sha256_file(path) for path in files}
    metadata: dict[str, Any] = {"config_digest": manifest.config_digest, "sha256": hashes}
    artifact = wandb.Artifact(f"{kind}-{run_id}", type=kind, metadata=metadata)
    for file in hashes:
        artifact.add_file(str(root / file), name=file)
    return artifact
