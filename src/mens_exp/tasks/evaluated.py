"""The subject of task=evaluate: a run, a merged model, an adapter by itself, or the base alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.evaluation import EngineKind
from mens_exp.config.lora import LoraVariant
from mens_exp.errors import Problems, RequestError
from mens_exp.layout.shape import family_for, shape_of
from mens_exp.layout.starting_adapter import find, read
from mens_exp.layout.targets import linear_modules
from mens_exp.plan.checks.adapter import check, other_base
from mens_exp.tasks.evaluated_merge import merge_at, trained_for, written_by
from mens_exp.tasks.subject import base_problems, config_of, subject_of

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.layout.starting_adapter import StartingAdapter
    from mens_exp.model.resolve import BaseModel

__all__ = ["Subject", "base_of_another", "problems", "subject_named", "with_adapter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The subject that `path` names.

    Attributes:
        path: the run, the adapter's directory, or ``base``.
        run: the run that trained, where one did.
        merged: the model that a run of task=merge wrote, where `path` names one.
    """

    path: str
    run: RunDir | None = None
    merged: Path | None = None

    @property
    def is_base(self) -> bool:
        """Whether the base answers alone."""
        return self.path == "base"


def subject_named(path: str) -> Subject:
    """Return what `path` means now.

    Args:
        path: ``base``, ``latest``, a run that trained or merged, an adapter's directory, or a
            file in one.

    Raises:
        RequestError: there is no such thing, or it has no adapter.
    """
    if path == "base":
        return Subject(path=path)
    place = Path(path).expanduser()
    merge = None if path == "latest" else merge_at(place)
    if merge is not None:
        model = written_by(merge)
        return Subject(path=str(merge.path), run=trained_for(merge), merged=model)
    if path == "latest" or RunDir(place).manifest.is_file() or not place.exists():
        run = subject_of(path)
        return Subject(path=str(run.path), run=run)
    try:
        directory = find(str(place.parent if place.is_file() else place))
    except RequestError as error:
        raise RequestError(
            "there is no adapter",
            where="path",
            found=path,
            expected="a run that trained or merged, an adapter (schema v3 or PEFT), or base",
            remedy="name another path, or wait for the run to end where it is still training",
        ) from error
    return Subject(path=str(directory))


def problems(config: RunConfig, subject: Subject) -> list[MensError]:
    """List what keeps a subject from being loaded, as far as files tell."""
    if config.eval.engine is EngineKind.openai:
        return []  # the server has the model
    if config.eval.engine is EngineKind.vllm:
        found = _vllm_problems(subject)
        if found:
            return found
    if subject.run is not None:
        config_of(subject.run)  # it builds what that names
        return []
    found = base_problems(config)
    if subject.is_base or found:
        return found
    theirs, _ = with_adapter(config, Path(subject.path))
    return list(check(theirs))


def _vllm_problems(subject: Subject) -> list[MensError]:
    """List what keeps vLLM from answering here, or with this adapter as it was trained."""
    from mens_exp.evals.vllm_engine import problems as of_machine
    from mens_exp.export.vllm import vllm_problems
    from mens_exp.tasks.vllm_scoring import peft_directory

    found: list[MensError] = list(of_machine())
    if subject.merged is not None:
        what = RequestError(
            "vLLM is given a base and an adapter here, and this is merged",
            where="path",
            found=subject.path,
            expected="a run, with eval.engine=vllm",
            remedy="choose eval.engine=hf, or serve the merged model and eval.engine=openai",
        )
        return [*found, what]
    try:
        adapter = peft_directory(subject)
    except RequestError as error:
        return [*found, error]
    return found if adapter is None else [*found, *vllm_problems(adapter)]


def with_adapter(config: RunConfig, directory: Path) -> tuple[RunConfig, StartingAdapter]:
    """Return the command's configuration with the layers and ranks of an adapter, and that.

    Raises:
        MensError: the adapter cannot be read.
    """
    adapter = read(directory, family_for(config.model))
    modules = {one.logical: one for one in linear_modules(shape_of(config.model))}
    ranks = {
        name.rpartition(".")[0]: tensor.shape[-2]
        for name, tensor in adapter.tensors.items()
        if name.endswith(".lora_a")
    }
    unknown = sorted(ranks.keys() - modules.keys())
    if unknown:
        raise RequestError(
            "the adapter has layers that the model has not",
            where="path",
            found=", ".join(unknown[:8]),
            expected=f"layers of {config.model.name}",
            remedy="choose the model that the adapter was trained on",
        )
    lora = config.lora
    found = (modules[name] for name in modules if name in ranks)
    lora.targets = list(dict.fromkeys(one.stack or one.path for one in found))
    lora.r, lora.alpha, lora.dropout = adapter.rank, adapter.alpha, 0.0
    lora.variant = LoraVariant(adapter.variant)
    lora.rank_pattern = {modules[n].path: r for n, r in ranks.items() if r != adapter.rank}
    lora.alpha_pattern = {modules[name].path: one for name, one in adapter.alphas.items()}
    lora.init_from = str(directory)
    return config, adapter


def base_of_another(adapter: StartingAdapter, base: BaseModel) -> None:
    """Refuse an adapter that was trained on other weights than these.

    Raises:
        ConfigError: it was.
    """
    Problems.raise_if(list(other_base(adapter, base.weights_sha256, base.name)))
