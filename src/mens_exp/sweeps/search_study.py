"""Run a search: an Optuna study in a journal, fed by the results of its jobs.

Only the launcher calls ask and tell on the study. Objectives are read from finished runs, and
validation losses from running ones.
"""

from __future__ import annotations

import json
import math
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.scorecard import Condition, Scorecard, read_item_events
from mens_exp.artifacts.sweep import TrialState
from mens_exp.errors import MensError, MissingExtra
from mens_exp.evals.observations import observations, scores

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    import optuna
    from optuna.storages.journal import BaseJournalBackend

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.sweep import Dimension, SearchRecord


def objective_values(run: RunDir, names: Sequence[str]) -> tuple[list[float] | None, str | None]:
    """Return the KPI values of a successful run, or the reason why one is unknown."""
    try:
        manifest = Manifest.read(run.manifest)
        scorecard = Scorecard.read(run.scorecard) if run.scorecard.exists() else None
        lines = read_item_events(run.events) if run.events.exists() else []
    except MensError as error:
        return None, str(error)
    tuned = Condition.TUNED.value
    found = scores(
        observations("", manifest, tuned, scorecard, lines),
        None if scorecard is None else scorecard.items,
    )
    values = []
    for name in names:
        score = found.get(name)
        if score is None or score.mean is None or not math.isfinite(score.mean):
            why = "the run measured none" if score is None or not score.why else score.why
            return None, f"{name}: {why}"
        values.append(score.mean)
    return values, None


class Curve:
    """The validation losses of a running job, read incrementally from its telemetry."""

    def __init__(self, telemetry: Path) -> None:
        """Start at the beginning of a file that may not exist yet."""
        self._path = telemetry
        self._restart()

    def _restart(self) -> None:
        self._place = 0
        self._last_step: int | None = None
        self._is_over = False
        self.points: list[tuple[int, float]] = []

    def read(self) -> bool:
        """Read new events; return whether the run still has steps to take."""
        try:
            size = self._path.stat().st_size
            if size < self._place:  # truncated to a checkpoint
                self._restart()
            with self._path.open("rb") as file:
                file.seek(self._place)
                new = file.read()
        except OSError:
            return False
        whole = new[: new.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            if b'"validation"' in line or b'"train_' in line:
                self._take(line)
        return not self._is_over and self._last_step is not None

    def _take(self, line: bytes) -> None:
        event = json.loads(line)
        name, payload = event["event"], event["payload"]
        if name == "train_start":
            self._last_step, self._is_over = payload["max_steps"], False
        elif name == "train_complete":
            self._is_over = True
        elif name == "validation" and payload["condition"] == Condition.TUNED.value:
            step, loss = payload["step"], payload.get("val/loss")
            if step > 0 and loss is not None:
                self.points.append((step, loss))
            self._is_over = self._is_over or step == self._last_step


_NAME = "search"
_ENOUGH = 10  # complete trials; its best tenth is then one trial (PED-ANOVA, arXiv:2304.10255)
_STATES = {TrialState.PRUNED: "PRUNED", TrialState.FAILED: "FAIL", TrialState.COMPLETE: "COMPLETE"}


def need_optuna() -> None:
    """Import Optuna.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingExtra(
            "Optuna is not installed",
            where="hydra/sweeper",
            found="optuna",
            remedy="pip install 'mens-exp[search]'",
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


class Study:
    """The Optuna study of a search, as seen by sampler and pruner."""

    def __init__(self, journal: Path, search: SearchRecord) -> None:
        """Open or create the study; the caller holds the lock of the sweep.

        Raises:
            MissingExtra: Optuna is not installed.
        """
        need_optuna()
        _mend(journal)
        self._journal, self._search = journal, search
        self._study = self._opened()

    def _opened(self) -> optuna.Study:
        from optuna.storages.journal import JournalFileBackend

        return _study(JournalFileBackend(str(self._journal)), self._search)

    def __len__(self) -> int:
        """Return the number of drawn trials."""
        return len(self._study.get_trials(deepcopy=False))

    def go_back(self, drawn: int, again: Collection[int]) -> None:
        """Drop the trials from a number on, and the outcomes of some earlier ones.

        The journal is append-only, so it is rewritten. The sampler then draws the same values as
        before these trials existed or had ended.

        Args:
            drawn: number of trials to keep.
            again: numbers of kept trials that run again.
        """
        import optuna

        trials = self._study.get_trials()
        ended = [one for one in trials if one.number in again and one.state.is_finished()]
        if len(trials) <= drawn and not ended:
            return
        for one in ended:
            one.state = optuna.trial.TrialState.RUNNING
            one.values = one.datetime_complete = None
        lines = _lines()
        kept = _study(lines, self._search)
        with _quiet():
            for one in trials[:drawn]:
                kept.add_trial(one)
        texts = [json.dumps(one, separators=(",", ":")) for one in lines.read_logs(0)]
        atomic.write_text(self._journal, "".join(f"{text}\n" for text in texts))
        self._study = self._opened()

    def ask(self, number: int) -> optuna.Trial:
        """Start the trial with that number.

        Each trial has a separate sampler, so that a resumed search draws the same values.
        """
        with _quiet():
            self._study.sampler = _sampler(self._search, number)
            trial = self._study.ask()
        assert trial.number == number, "the launcher is the only one who asks"
        return trial

    def suggest(self, trial: optuna.Trial, dimension: Dimension) -> str | float:
        """Draw a value."""
        key, step = dimension["key"], dimension["step"]
        if dimension["kind"] in {"group", "choice"}:
            return str(trial.suggest_categorical(key, dimension["values"]))
        low, high = dimension["low"], dimension["high"]
        assert low is not None, "a number has two ends"
        assert high is not None, "a number has two ends"
        if dimension["kind"] == "float":
            return trial.suggest_float(key, low, high, step=step, log=dimension["log"])
        whole = 1 if step is None else int(step)
        return trial.suggest_int(key, int(low), int(high), step=whole, log=dimension["log"])

    def should_end(self, number: int, points: Sequence[tuple[int, float]]) -> bool:
        """Report validation losses by step; return whether to prune the trial at the last."""
        import optuna

        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = optuna.Trial(self._study, frozen._trial_id)  # noqa: SLF001  # a stored trial
        known = frozen.intermediate_values
        # A step that accumulates micro-batches may be validated several times.
        new = {step: loss for step, loss in points if step not in known}
        for step, loss in new.items():
            trial.report(loss, step)
        return bool(new) and trial.should_prune()

    def tell(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        """End a trial; a finished trial stays unchanged."""
        import optuna

        with _quiet():
            self._study.tell(
                number,
                values,
                state=optuna.trial.TrialState[_STATES[state]],
                skip_if_finished=True,
            )

    def importance(self) -> dict[str, dict[str, float]]:
        """Return the importance of each key for each objective by PED-ANOVA; shares sum to 1.

        Returns:
            Objective -> key -> share; empty if there are too few complete trials.
        """
        import optuna
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        done = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        if len(done) < _ENOUGH:
            return {}
        found = {}
        pairs = zip(self._search["objectives"], self._search["directions"], strict=True)
        for place, (name, direction) in enumerate(pairs):
            sign = -1.0 if direction == "maximize" else 1.0

            def lower_is_better(
                trial: optuna.trial.FrozenTrial, place: int = place, sign: float = sign
            ) -> float:
                return sign * float(trial.values[place])

            with _quiet():
                found[name] = get_param_importances(
                    self._study, evaluator=PedAnovaImportanceEvaluator(), target=lower_is_better
                )
        return found

    def why_no_importance(self) -> str:
        """Return the reason why importance is unknown."""
        return f"fewer than {_ENOUGH} trials are complete"


def _study(journal: BaseJournalBackend, search: SearchRecord) -> optuna.Study:
    import optuna

    return optuna.create_study(
        storage=optuna.storages.JournalStorage(journal),
        study_name=_NAME,
        directions=[optuna.study.StudyDirection[d.upper()] for d in search["directions"]],
        pruner=_pruner(search),
        load_if_exists=True,
    )


def _lines() -> BaseJournalBackend:
    """Return a journal in memory."""
    from optuna.storages.journal import BaseJournalBackend

    class Lines(BaseJournalBackend):
        def __init__(self) -> None:
            self._logs: list[dict[str, Any]] = []

        def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
            yield from self._logs[log_number_from:]

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            self._logs += logs

    return Lines()


def _sampler(search: SearchRecord, number: int) -> optuna.samplers.BaseSampler:
    import optuna

    seed = int(digest({"seed": search["seed"], "trial": number})[:8], 16)
    if search["sampler"] == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=search["startup_trials"], constant_liar=True
    )


def _pruner(search: SearchRecord) -> optuna.pruners.BasePruner:
    import optuna

    if search["pruner"] == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=search["pruner_startup_trials"] or 0,
            n_warmup_steps=search["pruner_min_steps"],
        )
    if search["pruner"] == "hyperband":
        return optuna.pruners.HyperbandPruner(
            min_resource=search["pruner_min_steps"], max_resource="auto"
        )
    return optuna.pruners.NopPruner()


def _mend(journal: Path) -> None:
    """Repair the journal after a killed launcher: a partial line, and Optuna's lock."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):  # or its renamed form
        lock.unlink(missing_ok=True)
    if not journal.exists():
        return
    data = journal.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with journal.open("rb+") as file:
            file.truncate(whole)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Optuna's warnings about its experimental features."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="optuna")
        yield
