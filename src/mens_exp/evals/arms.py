"""Arms and factors of a study, found from the records of its runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import digest
from mens_exp.config.fields import Effect, shown
from mens_exp.config.objective import OBJECTIVES
from mens_exp.config.option_files import group_options
from mens_exp.config.schemas import effect_of
from mens_exp.errors import ConfigError, expected_name
from mens_exp.evals.contrast import without_seed
from mens_exp.planning.contract import recorded_digest
from mens_exp.planning.extension import extension_words, extensions_of, with_extensions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mens_exp.artifacts.data_contract import OverlapPart
    from mens_exp.artifacts.manifest import Manifest

_DIGITS = 8  # of a digest, enough to distinguish the arms of a study
# Generation settings of scorecards of version 1, which do not record them.
_ASKED = {"engine": "hf", "temperature": 0.0, "top_p": 1.0, "samples": 1, "max_retries": 0}
_GRADED = 2  # the grading version before scorecards recorded it
# Settings that determine the shapes of matrix products in generation, and thus their bf16 rounding.
_SIZES = ("batch_size", "max_new_tokens")
_BATCHING = 1  # before scorecards recorded how prompts share batches
_SAYS_FORMAT = frozenset({"hf", "vllm"})  # engines that compute in quant.compute_dtype
_LOSS_TOKENS = "data.val_max_tokens"
_LOSS_LIMIT = "trainer.limit_val_batches"
_ENCODINGS = ("tokenizer_sha256", "chat_template_sha256")
_VALIDATED = ("data.val_sha256",)
# Relative tolerance for the size of the same text: a tokenizer's normalizer and prepended space
# change it by about one byte per turn, and most answers have hundreds. Unverified guess.
_SAME_TEXT = 0.01
_LOSSES = ("val_loss", "val_bits_per_byte")
# Metrics of objectives with a direction, and the settings that they depend on besides the model.
_DEFINED_BY = {
    "divergence": ("teacher", "teacher_revision", "beta", "temperature", "top_k"),
    "hidden_mse": ("teacher", "teacher_revision", "hidden_layers"),
    "reward_margin": ("name", "loss", "beta", "length_normalised"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One training run of a study.

    Attributes:
        manifest: manifest of the run.
        settings: its configuration by dotted path.
        hashes: content hashes of its inputs, by dotted name.
        suite_digest: suite digest of its scorecard; None without a scorecard.
        answering: generation settings of its scorecard; empty without a scorecard.
        overlap: its training rows' overlap with the scored items; None if unknown or without items.
        is_rescored: whether a later evaluation replaces its own scorecard of the same suite.
    """

    manifest: Manifest
    settings: Mapping[str, Any]
    hashes: Mapping[str, str]
    suite_digest: str | None = None
    answering: Mapping[str, Any] = field(default_factory=dict)
    overlap: OverlapPart | None = None
    is_rescored: bool = False

    @property
    def contract(self) -> dict[str, Any]:
        """The run's recorded contract, with extensions that older runs have only in their notes."""
        assert self.manifest.contract is not None, "runs that train nothing are left out"
        return with_extensions(self.manifest.contract, extensions_of(self.manifest))

    @property
    def metrics(self) -> list[str]:
        """Names of its metrics that are not in the table of KPIs."""
        return [*(self.manifest.results.get("metrics") or ())]

    @property
    def answers_in_f32(self) -> bool:
        """Whether all its answers were generated in f32, in which batching does not change them."""
        if self.suite_digest is None:
            return True
        says_format = self.answering.get("engine", _ASKED["engine"]) in _SAYS_FORMAT
        return says_format and self.settings.get("quant.compute_dtype") == "f32"

    def side(self) -> dict[str, Any]:
        """Return the values that the contrast guard compares with another run's."""
        return {
            "contract": self.contract,
            "inputs": dict(self.hashes),
            "provenance": self.manifest.provenance,
            "numerics": self.manifest.facts.get("numerics"),
        }


@dataclass(kw_only=True, slots=True)
class Arm:
    """Runs that differ only in their seeds."""

    name: str
    values: dict[str, str]
    trials: list[Trial] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        """Its distinct seeds in increasing order."""
        return sorted({trial.manifest.seed for trial in self.trials})

    @property
    def backend(self) -> str | None:
        """The option of its `backend` group."""
        return self.trials[0].manifest.choices.get("backend")


def factors_in(trials: Sequence[Trial]) -> list[str]:
    """Return the settings and groups, except the seed, that the runs' command lines vary."""
    given = [_pairs(trial.manifest.overrides) for trial in trials]
    keys = dict.fromkeys(key for pairs in given for key in pairs)
    return sorted(key for key in keys if _varies(key, given) and _may_be_factor(key))


def arms_of(trials: Sequence[Trial], factors: Sequence[str]) -> list[Arm]:
    """Group runs into arms, in the order of their first runs.

    Runs of one arm have the same factor values and, apart from the seed, the same contract.

    Args:
        trials: the runs.
        factors: dotted settings, or groups.

    Raises:
        ConfigError: a factor is neither a setting nor a group of these runs.
    """
    for factor in factors:
        _refuse_unknown(factor, trials)
    found: dict[tuple[Any, ...], Arm] = {}
    for trial in trials:
        values = {factor: _value(trial, factor) for factor in factors}
        meaning = recorded_digest(without_seed(trial.contract))
        name = ", ".join(f"{factor}={value}" for factor, value in values.items())
        key = (*values.values(), meaning)
        arm = found.setdefault(key, Arm(name=name or meaning[:_DIGITS], values=values))
        arm.trials.append(trial)
    _tell_apart(found)
    return list(found.values())


def inner_differences(arm: Arm) -> list[str]:
    """List differences between the runs of one arm despite their equal contract."""
    names = sorted({name for trial in arm.trials for name in trial.hashes})
    found = [
        f"runs of {arm.name} read different {name}"
        for name in names
        if len({trial.hashes.get(name) for trial in arm.trials}) > 1
    ]
    if len({trial.suite_digest for trial in arm.trials if trial.suite_digest is not None}) > 1:
        found.append(f"runs of {arm.name} were scored by different suites")
    return found + measured_otherwise(arm.trials)


def aliased(arms: Sequence[Arm], factors: Iterable[str]) -> list[str]:
    """List factors that always vary together, so that no difference isolates one of them."""
    together: dict[tuple[int, ...], list[str]] = {}
    for factor in sorted(factors):
        values = [arm.values[factor] for arm in arms]
        names = together.setdefault(tuple(map(values.index, values)), [])
        if not any(factor.startswith(f"{name}.") for name in names):  # the group includes it
            names.append(factor)
    return [
        f"{' and '.join(names)} always vary together, so the difference is of none of them alone; "
        "declare a group that holds them, or vary one at a time"
        for names in together.values()
        if len(names) > 1
    ]


def seed_labels(arm: Arm, seeds: Iterable[int] = ()) -> list[str]:
    """List seeds of an arm that are missing or repeated, and what is unusual about their runs.

    Args:
        arm: the arm.
        seeds: seeds that it should have: those of the other arm.
    """
    missing = sorted(set(seeds) - set(arm.seeds))
    found = [f"seed {seed} is missing from {arm.name}" for seed in missing]
    for seed in arm.seeds:
        runs = [trial for trial in arm.trials if trial.manifest.seed == seed]
        if len(runs) > 1:
            found.append(f"seed {seed} of {arm.name} was run {len(runs)} times")
        found += [f"seed {seed} of {arm.name} was {how}" for run in runs for how in _resumed(run)]
        found += [f"seed {seed} of {arm.name} was {how}" for run in runs for how in _knowing(run)]
    return found


def overlap_with_items(run: Manifest, scorer: Manifest | None) -> OverlapPart | None:
    """Return the overlap of a run's training rows with the items that it was scored on.

    Args:
        run: the training run.
        scorer: the evaluation that scored it; None means the run itself.
    """
    if scorer is not None:
        return scorer.inputs.get("overlap")
    parts: list[OverlapPart] = (run.data_contract or {}).get("overlap") or []
    of_items = [part for part in parts if part["against"].startswith("suite=")]
    return max(of_items or parts, key=lambda part: part["contained_frac"], default=None)


def trained_on(part: OverlapPart) -> str:
    """Describe how many items of a suite training rows contain."""
    return f"trained on {part['contained']} of {part['items']} items of {part['against']}"


def _knowing(trial: Trial) -> list[str]:
    part = trial.overlap
    found = [trained_on(part)] if part is not None and part["contained"] else []
    return found + ["scored again by a later evaluation"] * trial.is_rescored


def _resumed(trial: Trial) -> list[str]:
    """Describe each resumption and extension of a run, with its step."""
    extended = {one.step for one in extensions_of(trial.manifest)}
    steps = [one["resumed_from_step"] for one in trial.manifest.attempts]
    found = [f"resumed from step {step}" for step in steps if step not in {None, *extended}]
    return found + [
        f"{how}, so its schedule differs from that of a run started with as many steps"
        for how in extension_words(trial.contract)
    ]


def measured_otherwise(trials: Sequence[Trial]) -> list[str]:
    """List differences in how runs were measured, other than the suite's items."""
    tokens = _distinct(trial.settings.get(_LOSS_TOKENS) for trial in trials)
    found = [f"losses are over other text: {_LOSS_TOKENS} is {tokens}"] if tokens else []
    limits = {str(trial.settings.get(_LOSS_LIMIT)) for trial in trials}
    if len(limits) > 1:
        told = " and ".join(sorted(limits))
        found.append(f"losses are over other text: {_LOSS_LIMIT} is {told}")
    found += _asked_otherwise(trials)
    made = [trial.answering for trial in trials if trial.suite_digest is not None]
    graded = _distinct(one.get("grading", _GRADED) for one in made)
    found += [f"answers were graded by different versions: {graded}"] if graded else []
    if not all(trial.answers_in_f32 for trial in trials):
        found += [f"{size}, and answers in bf16 depend on it" for size in unlike_sizes(trials)]
    return found


def unlike_sizes(trials: Iterable[Trial]) -> list[str]:
    """List differences in the batches and caches used for generation."""
    made = [trial.answering for trial in trials if trial.suite_digest is not None]
    told = {name: _distinct(one.get(name) for one in made) for name in _SIZES}
    found = [f"suite.{name} is {values}" for name, values in told.items() if values]
    here = [one for one in made if one.get("engine", _ASKED["engine"]) == _ASKED["engine"]]
    if len({one.get("batching", _BATCHING) for one in here}) > 1:
        found.append("prompts were batched by two releases, which do it differently")
    return found


def _distinct(values: Iterable[Any]) -> str:
    """Join distinct numbers; return an empty text if there is only one."""
    known = sorted({int(value) for value in values if value is not None})
    return " and ".join(map(str, known)) if len(known) > 1 else ""


def _asked_otherwise(trials: Sequence[Trial]) -> list[str]:
    made = [trial.answering for trial in trials if trial.suite_digest is not None]
    draws = any(one.get("temperature", 0.0) for one in made)
    found = []
    for name, usual in _ASKED.items():
        values = sorted({str(one.get(name, usual)) for one in made})
        if len(values) > 1 and (draws or name != "top_p"):
            told = " and ".join(values)
            found.append(f"answers were generated with other settings: eval.{name} is {told}")
    return found + (_drawn_otherwise(trials) if draws else [])


def _drawn_otherwise(trials: Sequence[Trial]) -> list[str]:
    """List seeds whose answers were drawn with different values of eval.seed.

    Otherwise, the best of several draws of one arm could be compared with a single draw of another.
    """
    drawn: dict[int, set[int]] = {}
    for trial in trials:
        if trial.suite_digest is not None and trial.manifest.seed is not None:
            drawn.setdefault(trial.manifest.seed, set()).add(trial.answering.get("seed", 0))
    return [
        f"answers of seed {seed} were drawn with other numbers: eval.seed is {_distinct(values)}"
        for seed, values in sorted(drawn.items())
        if len(values) > 1
    ]


def unlike_losses(arm: Arm, reference: Arm) -> dict[str, str]:
    """Return the losses and validation metrics that two arms cannot be compared on, with reasons.

    A loss in nats per token requires the same tokenizer and the same supervised tokens of a text.
    Bits per byte require only the latter. Both require validation on the same text. A loss that is
    not a likelihood requires the same objective with the same settings.
    """
    sides = (arm.trials, reference.trials)
    tokenizers, learned = (
        [{str(of(trial)) for trial in side} for side in sides]
        for of in (lambda one: one.hashes.get("tokenizer_sha256"), _learned)
    )
    found = _otherwise_defined(*sides)
    if tokenizers[0] != tokenizers[1]:
        found["val_loss"] = "the arms have different tokens; val_bits_per_byte compares them"
    if learned[0] != learned[1]:
        why = "the arms' losses are over different tokens of a text, or different losses"
        found |= dict.fromkeys(_LOSSES, why)
    if (other := _other_text(*sides)) is not None:
        every = [name for side in sides for trial in side for name in trial.metrics]
        of_validation = [name for name in every if name.startswith("val/")]
        found |= dict.fromkeys([*_LOSSES, *of_validation], other)
    return found


def _otherwise_defined(ours: Sequence[Trial], theirs: Sequence[Trial]) -> dict[str, str]:
    """Return the metrics of an objective that its settings define differently for two arms."""
    measured = {name for trial in (*ours, *theirs) for name in trial.metrics}
    found: dict[str, str] = {}
    for metric, names in _DEFINED_BY.items():
        values = [
            {str([trial.settings.get(f"objective.{name}") for name in names]) for trial in side}
            for side in (ours, theirs)
        ]
        if values[0] != values[1]:
            why = f"it depends on objective.{', '.join(names)}, which the arms do not share"
            found |= dict.fromkeys(measured & {f"train/{metric}", f"val/{metric}"}, why)
    return found


def _other_text(ours: Sequence[Trial], theirs: Sequence[Trial]) -> str | None:
    """Return a message if two arms validated on different text, else None.

    The encoded documents are compared, or the size of their text if the arms encode text
    differently.
    """
    encodings, documents = (
        [
            {tuple(trial.hashes.get(name) for name in names) for trial in side}
            for side in (ours, theirs)
        ]
        for names in (_ENCODINGS, _VALIDATED)
    )
    if encodings[0] == encodings[1]:
        if documents[0] == documents[1]:
            return None
        found = "other documents (data.val_sha256 differs)"
    else:
        sizes = [trial.manifest.results.get("val_text_bytes") for trial in (*ours, *theirs)]
        known = [int(size) for size in sizes if size is not None]
        if not known or max(known) <= (1 + _SAME_TEXT) * min(known):
            return None
        found = f"{min(known):,} and {max(known):,} bytes of text"
    return (
        f"the arms validated on {found}; give all arms the same rows in data.val_path, and a "
        "data.seq_len and a data.val_max_tokens that leave none of them out"
    )


def loss_unit(arm: Arm) -> str | None:
    """Return the unit of an arm's losses if they are not token likelihoods."""
    learned = arm.trials[0].settings
    spec = OBJECTIVES.known(str(learned.get("objective.name")))
    return None if spec is None or spec.is_likelihood else spec.loss_unit(learned)


_CHUNK = "objective.chunk_tokens"  # affects only memory


def _learned(trial: Trial) -> list[Any]:
    """Describe the tokens over which a run's losses are computed."""
    spec = OBJECTIVES.known(str(trial.settings.get("objective.labels")))
    if spec is not None and not spec.is_likelihood:
        own = (path for path in trial.settings if path.startswith("objective."))
        return [(path, trial.settings[path]) for path in sorted({*own} - {_CHUNK})]
    selects = sorted(spec.selects) if spec is not None else ()
    # Objectives that validate on the likelihood of the same tokens differ only in training.
    named = OBJECTIVES.known(str(trial.settings.get("objective.name")))
    is_likelihood = named is not None and named.is_likelihood
    names = ("labels", *selects) if is_likelihood else ("name", "labels", *selects)
    return [trial.settings.get(f"objective.{name}") for name in names]


def _pairs(overrides: Iterable[str]) -> dict[str, str]:
    parts = (text.lstrip("+~").partition("=") for text in overrides)
    return {key: value for key, _, value in parts}


def _varies(key: str, given: Sequence[Mapping[str, str]]) -> bool:
    return len({pairs.get(key) for pairs in given}) > 1


def _may_be_factor(key: str) -> bool:
    group = re.split(r"[.@]", key, maxsplit=1)[0]
    if key == "seed" or group in {"hydra", "logger", "task"}:
        return False
    return key in group_options() or effect_of(key) is Effect.TRAINING


def _refuse_unknown(factor: str, trials: Sequence[Trial]) -> None:
    known = {path for trial in trials for path in trial.settings}
    known |= {path.partition(".")[0] for path in known}
    if factor not in known or factor == "seed":
        why = "the seed is what arms are paired by" if factor == "seed" else "is not a setting"
        raise ConfigError(
            f"{why} of these runs" if factor != "seed" else why,
            where="compare.factors",
            found=factor,
            expected=expected_name(factor, known - {"seed"}),
        )


def _value(trial: Trial, factor: str) -> str:
    if factor in trial.settings:
        return shown(trial.settings[factor])
    choice = trial.manifest.choices.get(factor)
    inside = {p: v for p, v in trial.settings.items() if p.startswith(f"{factor}.")}
    if choice is not None:
        return str(choice)
    return digest(inside)[:_DIGITS] if inside else _UNSET


_UNSET = "unset"  # a setting that the chosen options do not have


def _tell_apart(found: Mapping[tuple[Any, ...], Arm]) -> None:
    """Give distinct names to arms of the same name that differ in undeclared settings."""
    names = [arm.name for arm in found.values()]
    for key, arm in found.items():
        if names.count(arm.name) > 1:
            arm.name += f" ({str(key[-1])[:_DIGITS]})"
