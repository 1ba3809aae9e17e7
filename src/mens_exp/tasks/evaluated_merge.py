"""A model written by task=merge, to be scored: the trained run's answers, from merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.backend import LoraGraphConfig
from mens_exp.config.lora import LoraInit, LoraVariant
from mens_exp.config.model import HfModel
from mens_exp.config.quant import QuantType
from mens_exp.errors import RequestError
from mens_exp.tasks.lineage import trained_by
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.model.resolve import BaseModel

__all__ = ["MERGED", "config_of_merged", "merge_at", "other_weights", "trained_for", "written_by"]

MERGED = "trained"  # in an evaluation's inputs: the run whose merged weights were scored
_CAUSAL = frozenset({"qlora", "lora"})


def merge_at(place: Path) -> RunDir | None:
    """Return the run of task=merge that a path names, itself or the model in it."""
    for directory in (place, place.parent):
        run = RunDir(directory)
        if run.manifest.is_file():
            return run if Manifest.read(run.manifest).task == "merge" else None
    return None


def written_by(merge: RunDir) -> Path:
    """Return the model that a merge wrote.

    Raises:
        RequestError: it has not ended well, wrote no whole model, or that is no longer there.
    """
    manifest = Manifest.read(merge.manifest)
    out = Path(str(manifest.results.get("out"))).expanduser()  # in the run, or where it was asked
    places = (merge.path / out, out)
    model = next((one for one in places if (one / "config.json").is_file()), None)
    if manifest.status is not Status.SUCCEEDED or model is None:
        raise RequestError(
            "the merge left no model that answers",
            where="path",
            found=f"{merge.path} ({manifest.status})",
            expected="a merge that has succeeded, of a whole model, which is still there",
            remedy="merge it anew without base_shard, or evaluate the run that was trained",
        )
    return model


def trained_for(merge: RunDir) -> RunDir:
    """Return the run that trained what was merged.

    Raises:
        RequestError: it is not at hand, or its graph is no causal model.
    """
    inputs = Manifest.read(merge.manifest).inputs
    adapter = Path(str(inputs.get("adapter")))
    beside = next((one for one in map(RunDir, adapter.parents) if one.manifest.is_file()), None)
    run = beside or trained_by(inputs.get("adapter_sha256"), merge.path)
    if run is None or Manifest.read(run.manifest).task != "train":
        raise RequestError(
            "the run that trained what was merged is not at hand",
            where="path",
            found=f"{merge.path}, of {adapter}",
            expected="that run, where it was or below outputs",
            remedy="put it back, or score the weights alone: path=base model=hf model.id=<model>",
        )
    backend = config_of(run).backend.name
    if backend not in _CAUSAL:
        raise RequestError(
            "only a whole causal model answers once it is merged",
            where="path",
            found=f"{merge.path}, of backend={backend}",
            expected="a merge of backend=qlora or lora",
            remedy=f"evaluate the run itself: path={run.path}",
        )
    return run


def config_of_merged(trained: RunDir, model: Path) -> RunConfig:
    """Return a run's own configuration, but for its graph: the merged weights as they are stored.

    The adapter that the graph has is a fresh one, which adds nothing.
    """
    config = config_of(trained)
    config.model = HfModel(id=str(model))
    config.backend = LoraGraphConfig(_target_="mens_exp.backends.lora.LoraBackend")
    config.quant.quant_type, config.quant.double_quant = QuantType.none, False
    config.lora.variant, config.lora.init = LoraVariant.lora, LoraInit.default
    config.lora.init_from = None
    return config


def other_weights(merge: RunDir, base: BaseModel) -> None:
    """Refuse weights that are not those that the merge wrote.

    Raises:
        RequestError: they are others.
    """
    files: dict[str, str] = Manifest.read(merge.manifest).results.get("out_sha256") or {}
    shards = {Path(name).name: one for name, one in files.items() if name.endswith(".safetensors")}
    if digest(shards) != base.weights_sha256:
        raise RequestError(
            "is not what was merged",
            where="path",
            found=str(base.directory),
            expected=f"the weights that {merge.path} wrote",
            remedy="merge it anew",
        )
