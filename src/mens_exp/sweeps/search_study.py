"""Optuna behind a search: one study in a journal, asked and told by the launcher alone."""

from __future__ import annotations

import json
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.search import TrialState
from mens_exp.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    import optuna
    from optuna.storages.journal import BaseJournalBackend

    from mens_exp.artifacts.search import Dimension, SearchRecord

__all__ = ["Study", "need_optuna"]

_NAME = "search"
_ENOUGH = 10  # complete trials; its best tenth is then one trial (PED-ANOVA, arXiv:2304.10255)
_STATES = {TrialState.PRUNED: "PRUNED", TrialState.FAILED: "FAIL", TrialState.COMPLETE: "COMPLETE"}


def need_optuna() -> None:
    """Load Optuna.

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
    """The trials of a search, as the sampler and the pruner know them."""

    def __init__(self, journal: Path, search: SearchRecord) -> None:
        """Open the study, made where there is none; the lock of the sweep is held by the caller.

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
        """Return how many trials were drawn."""
        return len(self._study.get_trials(deepcopy=False))

    def go_back(self, drawn: int, again: Collection[int]) -> None:
        """Forget the trials from a number on, and how some of those before it ended.

        The journal only grows, so it is written anew; the sampler then draws what it would have
        drawn before these trials were there, or had ended.

        Args:
            drawn: how many trials are kept.
            again: numbers of those among them that run again.
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
        """Begin the trial of that number.

        Each has a sampler of its own, so that a search that goes on draws what it would have.
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
        """Report validation losses by step, and tell whether the trial is to end at the last."""
        import optuna

        frozen = self._study.get_trials(deepcopy=False)[number]
        trial = optuna.Trial(self._study, frozen._trial_id)  # noqa: SLF001  # of a stored trial
        known = frozen.intermediate_values
        new = [(step, loss) for step, loss in points if step not in known]
        for step, loss in new:
            trial.report(loss, step)
        return bool(new) and trial.should_prune()

    def tell(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        """End a trial; one that has ended stays as it is."""
        import optuna

        with _quiet():
            self._study.tell(
                number,
                values,
                state=optuna.trial.TrialState[_STATES[state]],
                skip_if_finished=True,
            )

    def importance(self) -> dict[str, dict[str, float]]:
        """Return how much each key decides of each objective, by PED-ANOVA; the shares sum to 1.

        Returns:
            Objective -> key -> share; empty where there are too few complete trials.
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
        """Say why it is unknown."""
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
    """Put right what a killed launcher left: half a line, and Optuna's own lock."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):  # or what it is renamed to
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
    """Keep Optuna's remarks on its own experimental parts from the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="optuna")
        yield
