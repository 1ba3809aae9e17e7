"""Checks of user-defined classes: they import, are of the right kind, and accept their settings.

A user-defined class is imported here, before any weight is read. Its kind is determined from the
names of its base classes, so that the check itself imports nothing heavy. Lightning classes that
would break a promise of the design are refused by name, including their subclasses.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.metrics import METRICS, mistaken
from mens_exp.config.lora import ADAPTERS
from mens_exp.config.optim import OPTIMIZERS
from mens_exp.config.plugins import target_at
from mens_exp.config.quant import QUANTIZERS
from mens_exp.config.suite import SUITES
from mens_exp.config.trainer import Promise, Refusal
from mens_exp.config.untrusted_config import our_targets
from mens_exp.config.user_config import CLASS_GROUPS
from mens_exp.corpus.given_rows import given_in
from mens_exp.errors import ConfigError, MensError, listed, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from mens_exp.config.plugins import Registry
    from mens_exp.config.root import RunConfig

# Settings common to all optimizers that are not arguments of the optimizer's class.
_NOT_ARGUMENTS = {"_target_", "name"}


@dataclass(frozen=True, slots=True)
class _Kind:
    """The required base class, and the arguments passed in addition to the settings."""

    words: str
    ancestor: str | None
    instead: str | None = None  # a base class whose subclasses need not have `methods`
    methods: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_KINDS = {
    "callbacks": _Kind(
        "a subclass of lightning.Callback",
        "lightning.pytorch.callbacks.callback.Callback",
        optional=("run",),
    ),
    "logger": _Kind(
        "a subclass of lightning.pytorch.loggers.Logger",
        "lightning.pytorch.loggers.logger.Logger",
        optional=("run", "save_dir", "version"),
    ),
    "module": _Kind(
        "a subclass of lightning.LightningModule",
        "lightning.pytorch.core.module.LightningModule",
        optional=("backend", "config", "objective", "total_steps"),
    ),
    "schedule": _Kind(
        "a subclass of torch.optim.lr_scheduler.LRScheduler",
        "torch.optim.lr_scheduler.LRScheduler",
        given=("optimizer",),
        optional=("total_steps",),
    ),
    "optim": _Kind(
        "a subclass of torch.optim.Optimizer",
        "torch.optim.optimizer.Optimizer",
        given=("params",),
    ),
    "objective": _Kind(
        "a class whose instances are called, or one that extends "
        "mens_exp.objective.causal.Objective",
        None,
        instead="mens_exp.objective.causal.Objective",
        methods=("__call__",),
        optional=("name",),
    ),
    "data": _Kind("a class with a method rows", None, methods=("rows",)),
    "backend": _Kind(
        "a torch.nn.Module with the methods of backends/protocol.py, such as a QloraBackend",
        "torch.nn.modules.module.Module",
        methods=("head", "begin", "trainable", "base_only", "generate", "adapter", "load_adapter"),
    ),
}


_LIGHTNING = "lightning.pytorch."
_CALLBACKS = "lightning.pytorch.callbacks."
# Callbacks that monitor a metric by name, and the prefix of LearningRateMonitor's metrics.
_WATCHING = {
    f"{_CALLBACKS}early_stopping.EarlyStopping",
    f"{_CALLBACKS}model_checkpoint.ModelCheckpoint",
}
_RATES = "lr-"
_COUNTED = ("epoch", "step")  # Lightning's counters, which ModelCheckpoint can monitor
_PLUGINS = "lightning.pytorch.plugins."
_AVERAGES = Refusal(
    Promise.ARTIFACT,
    "it averages the frozen base too, whose copy then drifts from the weights that were read, and "
    "its state is in no checkpoint",
    "average the adapter alone (docs/how-to/extending.md, Weight averaging)",
)
_OPTIMIZERS = frozenset(OPTIMIZERS.values())  # users' options may name the same classes
_SCHEDULE_FREE = ("AdamW", "RAdam", "SGD")
_REFUSED = {
    f"{_CALLBACKS}batch_size_finder.BatchSizeFinder": Refusal(
        Promise.PLANNED,
        "it changes the micro-batch after plan, contract and data order were made of it",
        "task=plan says what fits; set data.micro_batch_size",
    ),
    f"{_CALLBACKS}lr_finder.LearningRateFinder": Refusal(
        Promise.ASKED,
        "it replaces optim.lr after the contract was made of it",
        "try rates in a sweep: -m optim.lr=1e-3,2e-3,4e-3",
    ),
    f"{_CALLBACKS}gradient_accumulation_scheduler.GradientAccumulationScheduler": Refusal(
        Promise.COMPARISON,
        "a step would have another number of micro-batches than the contract says",
        "set trainer.accumulate_grad_batches",
    ),
    f"{_CALLBACKS}stochastic_weight_avg.StochasticWeightAveraging": Refusal(
        Promise.ARTIFACT,
        "it averages at the end of Lightning's epochs, of which a run has one, and would put the "
        "start in the place of what was trained",
        "average the adapter after steps (docs/how-to/extending.md, Weight averaging)",
    ),
    f"{_CALLBACKS}weight_averaging.WeightAveraging": _AVERAGES,
    f"{_CALLBACKS}pruning.ModelPruning": Refusal(
        Promise.ARTIFACT,
        "it prunes the frozen base too, which no adapter holds",
        "prune the exported model",
    ),
    f"{_CALLBACKS}finetuning.BaseFinetuning": Refusal(
        Promise.ARTIFACT,
        "what it unfreezes is not in the adapter that is written",
        "choose what is trained with lora.targets, or backend=full",
    ),
    "torch.optim.lr_scheduler.ReduceLROnPlateau": Refusal(
        Promise.PLANNED,
        "the rates of all steps are known before the first, and it follows a measurement",
        "use schedule=cosine or another that follows steps, with callbacks.early_stopping",
    ),
    **dict.fromkeys(
        (f"schedulefree.{one.lower()}_schedulefree.{one}ScheduleFree" for one in _SCHEDULE_FREE),
        Refusal(
            Promise.ARTIFACT,
            "the model would hold the point where gradients are taken, and not the average, when "
            "it is validated, saved and written",
            "use optim=schedule_free, which puts the average there",
        ),
    ),
    f"{_CALLBACKS}prediction_writer.BasePredictionWriter": Refusal(
        Promise.ASKED, "a run predicts nothing", "read the answers in events.jsonl"
    ),
    "lightning.fabric.plugins.io.checkpoint_io.CheckpointIO": Refusal(
        Promise.NOTHING_LOST, "checkpoints are written whole, with a digest", "drop it"
    ),
    "lightning.fabric.plugins.environments.cluster_environment.ClusterEnvironment": Refusal(
        Promise.NOTHING_LOST,
        "the run starts its processes itself, or torchrun does",
        "use trainer.devices and trainer.num_nodes (docs/how-to/several_processes.md)",
    ),
}
# Plugins that set the precision: the graph always computes in quant.compute_dtype.
_FORMATS = Refusal(
    Promise.ASKED,
    "the graph computes in quant.compute_dtype, whatever format Lightning puts around it",
    "set quant.compute_dtype, or write a plugin of your own",
)
_OF_TRAINER = {
    "strategy": _Kind(
        "a subclass of lightning.pytorch.strategies.DDPStrategy",
        "lightning.pytorch.strategies.ddp.DDPStrategy",
    ),
    "profiler": _Kind(
        "a subclass of lightning.pytorch.profilers.Profiler",
        "lightning.pytorch.profilers.profiler.Profiler",
    ),
}
_PLUGIN = _Kind(
    "a subclass of Precision or LayerSync, of lightning.pytorch.plugins",
    f"{_PLUGINS}precision.precision.Precision",
)
_LAYER_SYNC = f"{_PLUGINS}layer_sync.LayerSync"


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems of user-defined classes and of refused Lightning classes."""
    for group in CLASS_GROUPS:
        yield from check_group(config, group)
    for group, _, place in _specs_of_conf(config):
        try:
            target_at(group, place)
        except MensError as error:
            yield error
    for place, values in _trainer_nodes(config):
        if place != "trainer.strategy" or not config.trainer.is_single_device:  # has its own rule
            yield from _trainer_problems(place, values)
    yield from _monitor_problems(config)


def _monitor_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield metrics that a Lightning callback monitors and that nothing in this run logs.

    User-defined code may log any name, so with such code only likely misspellings are reported.
    """
    known = ["val/loss", "val/bits_per_byte"]
    known += [f"val/{metric.name}" for metric in config.objective.spec.metrics]
    is_theirs = any(any(_own_nodes(config, group)) for group in ("module", "objective", "backend"))
    watching, has_rates = [], False
    for place, node in _own_nodes(config, "callbacks"):
        try:
            ancestors = _ancestors(target_at(place, node._target_))
        except MensError:  # reported by check_group
            continue
        is_theirs = is_theirs or not ancestors or not ancestors[0].startswith(_LIGHTNING)
        has_rates = has_rates or f"{_CALLBACKS}lr_monitor.LearningRateMonitor" in ancestors
        monitor = getattr(node, "monitor", None)
        is_watched = not _WATCHING.isdisjoint(ancestors) and getattr(node, "strict", True)
        if is_watched and isinstance(monitor, str) and monitor not in _COUNTED:
            watching.append((place, monitor))
    for place, monitor in watching:
        if monitor in known or (has_rates and monitor.startswith(_RATES)):
            continue
        near = mistaken(monitor, known)
        if is_theirs and near is None:
            continue
        near = near or nearest(monitor, known)
        yield ConfigError(
            "callbacks cannot monitor this metric: nothing logs it where they read it",
            where=f"{place}.monitor",
            found=monitor,
            expected=listed(known)
            if near is None or monitor in METRICS
            else f"a known name; the nearest is {near}",
            remedy=f"write {place}.monitor={near or known[0]}",
        )


def check_group(config: RunConfig, group: str) -> Iterator[MensError]:
    """Yield the problems of the classes that one config group names."""
    for place, node in _own_nodes(config, group):
        try:
            cls = target_at(place, node._target_)  # Hydra's own spelling
        except MensError as error:
            yield error
            continue
        problem = _refused(place, node._target_, cls)
        problem = problem or _kind_problem(_KINDS[group], place, node._target_, cls)
        if problem is not None:
            yield problem
        elif group != "backend":  # a backend reads its settings from the configuration
            ours = {field.name for field in fields(CLASS_GROUPS[group])}
            settings = {field.name for field in fields(node)}
            settings -= _NOT_ARGUMENTS if group == "optim" else ours
            if group == "objective":
                settings -= node.spec.selects
            yield from _argument_problems(_KINDS[group], place, node._target_, settings, cls)


def _trainer_nodes(config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parts of the Trainer that name a class."""
    trainer = config.trainer
    named = {name: getattr(trainer, name) for name in _OF_TRAINER}
    named |= {f"plugins.{number}": one for number, one in enumerate(trainer.plugins or [])}
    for name, values in named.items():
        if isinstance(values, dict) and isinstance(values.get("_target_"), str):
            yield f"trainer.{name}", values


def _trainer_problems(place: str, values: dict[str, Any]) -> Iterator[MensError]:
    target = values["_target_"]
    try:
        cls = target_at(place, target)
    except MensError as error:
        yield error
        return
    kind = _OF_TRAINER.get(place.rpartition(".")[2], _PLUGIN)
    problem = _refused(place, target, cls)
    if kind is _PLUGIN and problem is None:
        is_theirs = getattr(cls, "__module__", "").startswith(f"{_PLUGINS}precision")
        problem = _FORMATS.error(f"{place}._target_", target) if is_theirs else None
    if problem is None and not (kind is _PLUGIN and _LAYER_SYNC in _ancestors(cls)):
        problem = _kind_problem(kind, place, target, cls)
    if problem is not None:
        yield problem
    else:
        yield from _argument_problems(kind, place, target, values.keys() - {"_target_"}, cls)


def _refused(place: str, target: str, cls: Any) -> ConfigError | None:
    """Return the error for a class that breaks a promise or inherits from one that does."""
    found = next((_REFUSED[name] for name in _ancestors(cls) if name in _REFUSED), None)
    return None if found is None else found.error(f"{place}._target_", target)


def _ancestors(cls: Any) -> list[str]:
    if not isinstance(cls, type):
        return []
    return [f"{one.__module__}.{one.__qualname__}" for one in cls.__mro__]


def record(config: RunConfig) -> dict[str, Any] | None:
    """Describe the user's classes by the SHA-256 hashes of their modules.

    Returns:
        ``targets``, and ``files``: path relative to the working directory -> SHA-256, for every
        module loaded from there. None if every class is built in.
    """
    named = {node._target_ for group in CLASS_GROUPS for _, node in _own_nodes(config, group)}
    named |= {source.target for source in given_in(config.data)}  # installed ones too
    named |= {target for _, target, _ in _specs_of_conf(config)}
    targets = sorted(named | {values["_target_"] for _, values in _trainer_nodes(config)})
    if not targets:
        return None
    here = Path.cwd().resolve()
    files = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        path = Path(file).resolve() if file else None
        if path is None or not path.is_relative_to(here) or "site-packages" in path.parts:
            continue
        if not module.__name__.startswith("mens_exp") and path.is_file():
            files[path.relative_to(here).as_posix()] = sha256_file(path)
    return {"targets": targets, "files": dict(sorted(files.items()))}


def _specs_of_conf(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the used specs of ``./conf``: group, location, and the import path of the object."""
    quantizers = dict.fromkeys([config.quant.quant_type, *config.quant.type_pattern.values()])
    used: list[tuple[Registry[Any], str, str | None]] = [
        *((QUANTIZERS, one.value, one.spec.binding) for one in quantizers),
        (ADAPTERS, config.lora.variant.value, config.lora.variant.spec.method),
        (SUITES, config.suite.name, config.suite.spec.suite),
    ]
    for registry, name, place in used:
        named = registry.named_in_conf().get(name)
        if named is not None and place is not None:
            yield str(registry.options), named[1], place.replace(":", ".")


def _own_nodes(config: RunConfig, group: str) -> Iterator[tuple[str, Any]]:
    node: Any = getattr(config, group)
    named = node.items() if isinstance(node, dict) else [(None, node)]
    for name, one in named:
        target = getattr(one, "_target_", None)  # our own loggers name no class
        is_ours = target in our_targets() and (group != "optim" or type(one) in _OPTIMIZERS)
        if target is not None and not is_ours:
            yield f"{group}.{name}" if name else group, one


def _kind_problem(kind: _Kind, place: str, target: str, cls: Any) -> ConfigError | None:
    ancestors = _ancestors(cls)
    if kind.instead is not None and kind.instead in ancestors:
        return None
    missing = [name for name in kind.methods if not callable(_own_attribute(cls, name))]
    if isinstance(cls, type) and (kind.ancestor is None or kind.ancestor in ancestors):
        if not missing:
            return None
        found = f"{target}, which lacks {', '.join(missing)}"
    else:
        found = f"{target}, {_what(cls)}"
    return ConfigError(
        "has the wrong type", where=f"{place}._target_", found=found, expected=kind.words
    )


def _own_attribute(cls: Any, name: str) -> Any:
    """Look up an instance method; ``getattr`` would find type's ``__call__`` on every class."""
    return next((vars(one)[name] for one in getattr(cls, "__mro__", ()) if name in vars(one)), None)


def _what(cls: Any) -> str:
    if not isinstance(cls, type):
        return f"a {type(cls).__name__}"
    bases = ", ".join(f"{base.__module__}.{base.__qualname__}" for base in cls.__bases__)
    return f"a class of {bases}"


def _argument_problems(
    kind: _Kind, place: str, target: str, settings: AbstractSet[str], cls: Any
) -> Iterator[ConfigError]:
    """Yield settings that the class does not accept, and missing required arguments."""
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class written in C has no signature
        return
    names = [name for name, one in parameters.items() if one.kind is not one.VAR_POSITIONAL]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in sorted(settings):
        if name not in parameters and not takes_any:
            close = nearest(name, names)
            yield ConfigError(
                f"{target} takes no such argument",
                where=f"{place}.{name}",
                expected=f"one of {', '.join(names) or 'none'}"
                + (f"; the nearest is {close}" if close else ""),
            )
    given = settings | {*kind.given, *kind.optional}
    for name, one in parameters.items():
        is_needed = one.default is one.empty and one.kind not in {
            one.VAR_POSITIONAL,
            one.VAR_KEYWORD,
        }
        if is_needed and name not in given:
            yield ConfigError(
                f"{target} needs an argument that nothing sets",
                where=f"{place}.{name}",
                remedy=f"write {name} into its file in ./conf",
            )
