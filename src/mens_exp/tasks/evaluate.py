"""task=evaluate: score a run, a merged model, an adapter or the base in a separate run.

The engine is our own model, vLLM (base and tuned from one engine, without our model), or one model
for each condition of a scorecard specification.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v3 import TENSORS_NAME, read_adapter
from mens_exp.artifacts.digest import refuse_changed_adapter, sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.quantizer_record import levels_in
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Condition
from mens_exp.config.evaluation import EngineKind
from mens_exp.config.lora import ADAPTERS, LoraVariant, PassthroughConfig, prompt_tuning
from mens_exp.config.quant import PATTERNS, QUANTIZERS
from mens_exp.corpus.data_contract import heldout_part
from mens_exp.corpus.source import load_rows
from mens_exp.errors import Problems, RequestError
from mens_exp.evals.engines import Served, VllmEngine, open_vllm
from mens_exp.evals.suite import frozen_suite
from mens_exp.export.subject import base_problems, config_of, subject_of
from mens_exp.layout.modules import every_module
from mens_exp.layout.shape import family_for, shape_of
from mens_exp.layout.starting_adapter import find, read
from mens_exp.layout.targets import otherwise_quantized, skipped
from mens_exp.planning.checks.adapter import check_initial_adapter, other_base
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal
from mens_exp.tasks.fit import suite_part
from mens_exp.tasks.inputs import describe, refuse_changed, tokenizer_of
from mens_exp.tasks.lineage import (
    MERGED,
    config_of_merged,
    merge_at,
    merged_model,
    other_weights,
    trained_for,
)
from mens_exp.tasks.rejection_sampling import refuse_evaluations
from mens_exp.tasks.scoring import (
    generation_of,
    score,
    score_by,
    score_served,
    suite_of,
)
from mens_exp.training.wandb_mirror import mirror
from mens_exp.training.wandb_names import id_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mens_exp.artifacts.adapter_v3 import Quant
    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.row_files import Rows
    from mens_exp.errors import MensError
    from mens_exp.evals.engines import Engine
    from mens_exp.layout.shape import Shape
    from mens_exp.layout.starting_adapter import StartingAdapter
    from mens_exp.model.sources import BaseModel
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.load import Tokenizer


def evaluate(config: RunConfig, run: Run) -> None:
    """Load the subject that `path` names and score its conditions (both, or the only one)."""
    if config.suite.spec.brings_models:
        _score_brought(config, run)
        return
    assert config.path is not None, "validation has asked for it"
    if config.eval.keep_passing is not None:
        refuse_evaluations(config)
    subject = subject_named(config.path)
    run.manifest.inputs["subject"] = subject.path
    if subject.merged is not None and subject.run is not None:
        run.manifest.inputs[MERGED] = str(subject.run.path.absolute())
    run.manifest.inputs.update(_evaluated_run(subject))
    mirror(config, run, _uses(subject))
    if config.eval.engine is EngineKind.openai:
        condition = Condition.BASE if subject.is_base else Condition.TUNED
        score_served(config, run, condition)
    else:
        _evaluate_here(config, run, subject)


def _evaluated_run(subject: Subject) -> dict[str, Any]:
    """Return our id and the W&B id of the run that made the subject; empty if no run did."""
    maker = _maker(subject)
    if maker is None or not maker.manifest.is_file():
        return {}
    made = Manifest.read(maker.manifest)
    return {"subject_run": {"run_id": made.run_id, "wandb_run_id": id_of(maker, made)}}


def _maker(subject: Subject) -> RunDir | None:
    """Return the run that made the subject, also if the path names the adapter inside it."""
    if subject.is_base or subject.run is not None:
        return subject.run if subject.merged is None else RunDir(Path(subject.path))
    path = Path(subject.path).absolute()
    above = (RunDir(place) for place in (path, *path.parents)[:3])
    return next((run for run in above if run.manifest.is_file()), None)


def _uses(subject: Subject) -> list[tuple[str, str]]:
    """Return the run that made the subject, as an input of the evaluation."""
    maker = _maker(subject)
    kind = "merged" if subject.merged is not None else "adapter"
    return [] if maker is None else [(kind, str(maker.path.absolute()))]


def _evaluate_here(config: RunConfig, run: Run, subject: Subject) -> None:
    from mens_exp.model.sources import resolve
    from mens_exp.training.build import build_backend, lightning_quiet

    theirs, tensors, adapter = _build_from(config, subject)
    theirs.trainer.accelerator = config.trainer.accelerator
    cache = writable_cache()
    base = resolve(theirs.model, cache)
    if adapter is not None:
        base_of_another(adapter, base)
        run.manifest.inputs["adapter_sha256"] = adapter.sha256
    if subject.merged is not None:
        other_weights(RunDir(Path(subject.path)), base)
    tokenizer = tokenizer_of(theirs.tokenizer, base, subject.run or run.dir)
    with_rows = subject.run is not None or config.suite.spec.from_rows
    rows = load_rows(theirs.data, cache) if with_rows else None
    inputs = describe(base, tokenizer, rows)
    if subject.run is not None:
        recorded = Manifest.read(subject.run.manifest).inputs
        if subject.merged is not None:  # compare its weights with the merge's record
            recorded = recorded | {"base_weights_sha256": None}
        refuse_changed(recorded, inputs)
        run.manifest.inputs["adapter_sha256"] = _adapter_of(subject, subject.run)
    run.manifest.inputs.update(inputs)
    if subject.run is not None and rows is not None:
        _label_known_items(config, run, rows)
    run.save()
    heldout = rows.heldout if rows is not None else ()
    if config.eval.engine is EngineKind.vllm:
        score_by_vllm(config, theirs, run, base, subject, tokenizer, heldout)
        return
    if subject.run is None:  # no run has chosen; an evaluation packs nothing
        theirs = replace(theirs, data=replace(theirs.data, packing=False))
    with lightning_quiet():
        backend = build_backend(theirs, base)
    if tensors is not None:
        backend.load_adapter(tensors)
    conditions = _conditions(subject)
    if config.eval.keep_passing is not None:
        conditions = conditions[-1:]
    score(config, run, backend, heldout, tokenizer, conditions=conditions)


def _label_known_items(config: RunConfig, run: Run, rows: Rows) -> None:
    """Record the suite items that the run was trained on, and print a warning if there are any."""
    part = suite_part(config.suite, rows, calls_functions=True)
    if config.suite.spec.from_rows:
        part = heldout_part(rows)
        part = part if part and part["contained"] else None
    if part is None:
        return
    run.manifest.inputs["overlap"] = part
    if part["sharing"]:
        note = (
            f"{part['sharing']} of {part['items']} items of {part['against']} have text in common "
            f"with rows that the run was trained on, {part['contained']} of them half or more: "
            "its scores on these show memory too"
        )
        run.manifest.notes.append(note)
        terminal.say(f"! {note}", on=terminal.console(stderr=True))


def _adapter_of(subject: Subject, trained: RunDir) -> str:
    """Return the digest of the evaluated adapter, whether loaded or merged into weights."""
    if subject.merged is not None:
        return str(Manifest.read(RunDir(Path(subject.path)).manifest).inputs["adapter_sha256"])
    return sha256_file(trained.adapter / TENSORS_NAME)


def _conditions(subject: Subject) -> tuple[Condition, ...]:
    """Return the available conditions: merged weights no longer contain their base."""
    if subject.is_base:
        return (Condition.BASE,)
    return (Condition.BASE, Condition.TUNED) if subject.merged is None else (Condition.TUNED,)


def _build_from(config: RunConfig, subject: Subject) -> tuple[RunConfig, Any, Any]:
    """Return the configuration to build, the tensors to load, and an adapter without a run."""
    if subject.is_base:
        return config, None, None
    if subject.merged is not None and subject.run is not None:
        return config_of_merged(subject.run, subject.merged), None, None
    if subject.run is not None:
        refuse_changed_adapter(subject.run.adapter)
        return config_of(subject.run), read_adapter(subject.run.adapter)[1], None
    theirs, adapter = with_adapter(config, Path(subject.path))
    return theirs, adapter.tensors, adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The subject that `path` names.

    Attributes:
        path: the run, the adapter's directory, or ``base``.
        run: the training run, if there is one.
        merged: the model written by a task=merge run, if `path` names one.
    """

    path: str
    run: RunDir | None = None
    merged: Path | None = None

    @property
    def is_base(self) -> bool:
        """Whether the subject is only the base."""
        return self.path == "base"


def subject_named(path: str) -> Subject:
    """Resolve `path` to the subject that it currently names.

    Args:
        path: ``base``, ``latest``, a run that trained or merged, an adapter's directory, or a
            file in one.

    Raises:
        RequestError: it does not exist, or has no adapter.
    """
    if path == "base":
        return Subject(path=path)
    place = Path(path).expanduser()
    merge = None if path == "latest" else merge_at(place)
    if merge is not None:
        model = merged_model(merge)
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


def evaluation_problems(
    config: RunConfig, subject: Subject, given: Iterable[str]
) -> list[MensError]:
    """List problems that prevent loading a subject, as far as files show them.

    Args:
        config: the command's configuration, which is changed.
        subject: the subject.
        given: the command's own overrides.
    """
    if config.eval.engine is EngineKind.openai:
        return []  # the server has the model
    if config.eval.engine is EngineKind.vllm:
        found = _vllm_problems(subject)
        if found:
            return found
    if subject.run is not None:
        config_of(subject.run)  # refuses classes that are not trusted here
        return []
    found = base_problems(config)
    if subject.is_base or found:
        return found
    theirs, adapter = with_adapter(config, Path(subject.path))
    found = list(check_initial_adapter(theirs))
    groups = {text.lstrip("+~").partition("=")[0].partition(".")[0] for text in given}
    if not groups & {"quant", "backend"}:
        found += _on_another_base(config, adapter)
    return found


def _on_another_base(config: RunConfig, adapter: StartingAdapter) -> Iterator[RequestError]:
    """Yield a problem if the command's base is not quantized as in the adapter's training."""
    if adapter.quant is None:
        return
    needed = _quantization(config, adapter.quant, adapter.quantizer)
    if needed:
        yield RequestError(
            "the adapter was trained on a base with another quantization",
            where="path",
            found=f"{adapter.directory}: {adapter.quant['base_quant']}",
            expected=f"{config.quant.quant_type.value}, this command's",
            remedy=f"add {' '.join(needed)} to score the model that was trained, or a `quant` or "
            "`backend` of your own to score the adapter on another base",
        )


def _quantization(config: RunConfig, quant: Quant, recorded: Quantizer | None) -> list[str]:
    """Return the overrides that quantize the command's base as recorded."""
    spec, ours = QUANTIZERS.known(quant["base_quant"]), config.quant
    if spec is None or spec.name == ours.quant_type.value == "none":
        return []  # no override can build an unknown quantizer
    if not spec.is_quantized:
        return ["backend=lora"]
    is_ours = spec.name == ours.quant_type.value
    found = [] if is_ours else [f"quant={spec.name}"]
    double_quant, block = (
        (ours.double_quant, ours.block) if is_ours else (spec.usual_double_quant, spec.usual_block)
    )
    if "double_quant" in spec.settings and quant["double_quant"] != double_quant:
        found.append(f"quant.double_quant={str(quant['double_quant']).lower()}")
    if recorded is None or spec.keeps_codes:
        return found
    levels = levels_in(recorded)
    if levels != ours.levels:
        found.append(f"quant.levels=[{','.join(map(str, levels))}]")
    if spec.in_blocks and recorded["block_size"] != block:
        found.append(f"quant.block_size={recorded['block_size']}")
    left = {one.path for one in skipped(ours.skip, shape_of(config.model))}
    if left != set(recorded["skip"]):
        found.append(f"quant.skip=[{','.join(recorded['skip'])}]")
    return found + _module_patterns(ours, shape_of(config.model), recorded)


def _module_patterns(ours: QuantConfig, shape: Shape, recorded: Quantizer) -> list[str]:
    """Return the overrides for modules that are recorded with another quantizer."""
    modules = recorded.get("modules", {})
    theirs = {
        path: (one["quant_type"], one["block_size"], one["double_quant"])
        for path, one in modules.items()
    }
    built = otherwise_quantized(ours, shape)
    if theirs == {
        path: (one.quant_type.value, one.block, one.double_quant) for path, one in built.items()
    }:
        return []
    patterns: dict[str, dict[str, Any]] = {name: {} for name in PATTERNS}
    for path, one in modules.items():
        spec = QUANTIZERS.known(one["quant_type"])
        reads = frozenset() if spec is None else spec.settings
        if one["quant_type"] != recorded["quant_type"]:
            patterns["type_pattern"][path] = one["quant_type"]
        if one["block_size"] != recorded["block_size"] and "block_size" in reads:
            patterns["block_size_pattern"][path] = one["block_size"]
        follows = one["quant_type"] == recorded["quant_type"] or (spec and spec.usual_double_quant)
        usual = bool(recorded["double_quant"] and follows)
        if one["double_quant"] != usual and "double_quant" in reads:
            patterns["double_quant_pattern"][path] = str(one["double_quant"]).lower()
    found = []
    for setting, values in patterns.items():
        if values or getattr(ours, setting):
            listed = ",".join(f"{path}:{value}" for path, value in values.items())
            found.append(f"'quant.{setting}={{{listed}}}'")
    return found


def _vllm_problems(subject: Subject) -> list[MensError]:
    """List problems that prevent vLLM from running here, or from serving this adapter exactly."""
    from mens_exp.evals.engines import vllm_problems_here as of_machine
    from mens_exp.export.handoff import vllm_problems

    found: list[MensError] = list(of_machine())
    if subject.merged is not None:
        what = RequestError(
            "vLLM needs a base and an adapter here, but this model is merged",
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
    """Return the command's configuration with an adapter's layers and ranks, and the adapter.

    Raises:
        MensError: the adapter cannot be read.
    """
    adapter = read(directory, family_for(config.model))
    modules = {one.logical: one for one in every_module(shape_of(config.model))}
    ranks = adapter.ranks
    unknown = sorted(ranks.keys() - modules.keys())
    if unknown:
        raise RequestError(
            "the adapter has layers that the model does not have",
            where="path",
            found=", ".join(unknown[:8]),
            expected=f"layers of {config.model.name}",
            remedy="choose the model that the adapter was trained on",
        )
    spec = ADAPTERS.known(adapter.variant)
    if spec is not None and spec.on_embedding:
        config.lora = prompt_tuning(adapter.rank)
        config.lora.init_from = str(directory)
        return config, adapter
    if adapter.peft_config and not isinstance(config.lora, PassthroughConfig):
        config.lora = PassthroughConfig(name=config.lora.name)
    lora = config.lora
    if isinstance(lora, PassthroughConfig):
        lora.config = adapter.peft_config
    found = (modules[name] for name in modules if name in ranks)
    lora.targets = list(dict.fromkeys(one.stack or one.path for one in found))
    lora.r, lora.alpha, lora.dropout = adapter.rank, adapter.alpha, 0.0
    if spec is None:
        raise RequestError(
            "unknown adapter method",
            where=str(directory),
            found=adapter.variant,
            expected=f"one of {', '.join(ADAPTERS.built_in)}, or an installed one",
            remedy="install the package that provides the method",
        )
    lora.variant = LoraVariant(adapter.variant)
    lora.rank_pattern = {modules[n].path: r for n, r in ranks.items() if r != adapter.rank}
    lora.alpha_pattern = {modules[name].path: one for name, one in adapter.alphas.items()}
    lora.init_from = str(directory)
    return config, adapter


def base_of_another(adapter: StartingAdapter, base: BaseModel) -> None:
    """Refuse an adapter that was trained on different base weights.

    Raises:
        ConfigError: it was.
    """
    Problems.raise_if(list(other_base(adapter, base.weights_sha256, base.name)))


_UNQUANTIZED = (
    "vLLM answered with the published base weights, not with the quantized ones of training"
)


def peft_directory(subject: Subject) -> Path | None:
    """Return the PEFT directory of the subject; None for the base.

    Raises:
        RequestError: it has none.
    """
    if subject.is_base:
        return None
    directory = Path(subject.path) if subject.run is None else subject.run.peft
    if not (directory / "adapter_config.json").is_file():
        raise RequestError(
            "vLLM loads PEFT adapters, but this run has none",
            where="path",
            found=subject.path,
            expected="a run of backend=qlora or lora, or a PEFT directory",
            remedy="write one by task=export export.format=peft, or choose eval.engine=hf",
        )
    return directory


def score_by_vllm(
    config: RunConfig,
    theirs: RunConfig,
    run: Run,
    base: BaseModel,
    subject: Subject,
    tokenizer: Tokenizer,
    heldout: Sequence[TrainingPair],
) -> None:
    """Run the suite on vLLM, and write the same records as any engine.

    Args:
        config: the command's configuration.
        theirs: the model's configuration: its run's, or the command's.
        run: the open run.
        base: the resolved base model.
        subject: the subject to score.
        tokenizer: the tokenizer, with the chat template of training.
        heldout: held-out rows, for a suite built from them.

    Raises:
        SetupError: vLLM cannot load the model.
    """
    from mens_exp.export.handoff import rank_of, room_for

    positions = shape_of(theirs.model).max_position_embeddings
    suite = suite_of(config, heldout, tokenizer, positions)
    if isinstance(suite, str):
        run.unknown("scorecard", suite)
        return
    adapter = peft_directory(subject)
    run.manifest.notes.append(_UNQUANTIZED)
    engine = open_vllm(
        Served(
            base=base.directory,
            max_lora_rank=None if adapter is None else room_for(rank_of(adapter)),
            dtype=theirs.quant.compute_dtype,
            max_positions=positions,
            trust_remote_code=getattr(theirs.model, "trust_remote_code", False),
        )
    )
    generation = generation_of(config.suite, config.eval)
    by: dict[str, Engine] = {}
    by[Condition.BASE] = VllmEngine(engine, tokenizer, generation, positions, None)
    if adapter is not None:
        by[Condition.TUNED] = VllmEngine(engine, tokenizer, generation, positions, adapter)
    score_by(config, run, suite, by)


def _score_brought(config: RunConfig, run: Run) -> None:
    """Score the models that the suite's file names, and write one scorecard.

    Raises:
        DataError: the specification or a fixture is invalid.
        SetupError: a server does not answer.
    """
    settings: Any = config.suite
    path = Path(settings.path).expanduser()
    run.manifest.inputs["specification"] = str(settings.path)
    mirror(config, run)
    suite = frozen_suite(settings)
    run.manifest.inputs.update(specification=str(path), specification_sha256=sha256_file(path))
    score_by(config, run, suite, suite.engines(settings, config.eval))
