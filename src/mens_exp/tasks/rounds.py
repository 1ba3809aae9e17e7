"""task=rejection_sampling: rounds of sampling, grading, and training on the graded answers.

In each round, the current model answers the tasks of a suite several times, the suite grades the
answers, and a new adapter is trained: on the distinct answers that pass, or with objective=grpo on
all of them by their rewards. The next round samples from that adapter. Every sampling is a run of
task=evaluate and every training a run of task=train, each with its own record, so they can be
inspected, compared and resumed like any other run. The directory `rejection_sampling.output` holds
for each round::

    round_1/sample   the evaluation; passing.jsonl has the answers that passed, or their rewards
    round_1/rows.jsonl   the sampled rows that the round trains on
    round_1/train    the training run

Sources: Zelikman et al. 2022 (STaR, arXiv:2203.14465), Yuan et al. 2023 (RFT, arXiv:2308.01825),
Singh et al. 2023 (ReST-EM, arXiv:2312.06585), Shao et al. 2024 (GRPO, arXiv:2402.03300).
"""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.host import run_lock
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.config.data import JsonlData
from mens_exp.config.overrides import check
from mens_exp.config.task import RoundRows
from mens_exp.corpus.split import response_key
from mens_exp.errors import GateError, Problems, RequestError
from mens_exp.report import sections, terminal
from mens_exp.rows.readers import read_rows
from mens_exp.rows.schema import to_json
from mens_exp.tasks.resolve_references import pin_inputs
from mens_exp.tasks.round_commands import PASSING, ROWS, SECTION, RoundCommands, is_of_bundle
from mens_exp.tasks.run import perform
from mens_exp.tasks.train import prepare_resumption, resume_training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.overrides import Cell
    from mens_exp.config.root import RunConfig
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.run import Run

_HOUR_S = 3600.0
_KPIS = ("task_success", "parse_rate")


class Round(TypedDict):
    """The record of one round.

    Attributes:
        number: number of the round, from 1.
        prompts: tasks that were answered.
        sampled: sampled answers.
        passed: answers that passed.
        kept: distinct passing answers of this round; with rewards, its finished answers.
        new: rows that no earlier round had.
        prompts_of_both: tasks with passing and failing rows, if failing answers are trained on.
        rows: sampled rows that the round's training run read.
        train_rows: rows that it trained on, your own included; the others of the rows that it read
            are for validation or held out. None for streamed rows.
        prompts_without_pass: tasks without a passing answer.
        tuned_val_loss: validation loss after training, on rows of the round's own split.
        kpi: name of the KPI of the scoring suite; None without one.
        base: value of the KPI for the base model.
        tuned: value of the KPI for the round's model.
        wall_s: seconds of sampling and training.
        sample: directory of the sampling.
        train: directory of the training run.
    """

    number: int
    prompts: int
    sampled: int
    passed: int
    kept: int
    new: int
    prompts_of_both: int
    rows: int
    train_rows: int | None
    prompts_without_pass: int
    tuned_val_loss: float | None
    kpi: str | None
    base: float | None
    tuned: float | None
    wall_s: float
    sample: str
    train: str


def rejection_sampling(config: RunConfig, run: Run) -> None:
    """Run the rounds that are not complete yet, and record all of them."""
    settings = config.rejection_sampling
    assert settings.output is not None, "the rules ask for it"
    output = Path(settings.output).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    commands = RoundCommands(config=config, typed=tuple(run.manifest.overrides), output=output)
    done: list[Round] = []
    with run_lock(output / "rounds.lock"):
        stopped = None
        while len(done) < settings.rounds and stopped is None:
            stopped = _spent(done, settings.hours) or _perform(commands, done)
            run.manifest.facts["rounds"] = done
            run.manifest.inputs.update(_inputs(output))
            run.save()
    last = done[-1]
    run.manifest.results.update(
        rounds=len(done), rows=last["rows"], trained=last["train"], stopped=stopped
    )
    if stopped is not None:
        run.manifest.notes.append(f"no further round than round {len(done)}: {stopped}")
    terminal.show(sections.rounds(done, stopped))


def _inputs(output: Path) -> dict[str, Any]:
    """Return the base model and the sampled suite with their hashes, as the first round did."""
    sample = RunDir(output / "round_1" / "sample")
    read = Manifest.read(sample.manifest).inputs
    named = ("base_model", "base_source", "base_weights_sha256", "tokenizer_sha256")
    card = Scorecard.read(sample.scorecard)
    return {
        **{name: read[name] for name in named if name in read},
        "sampled_suite": card.suite,
        "sampled_suite_digest": card.suite_digest,
    }


def _spent(done: Sequence[Round], hours: float | None) -> str | None:
    """Return a message if the time budget is spent, else None."""
    spent = sum(one["wall_s"] for one in done)
    if hours is None or spent < hours * _HOUR_S:
        return None
    return f"the budget of {hours:g} hours is spent: {spent / _HOUR_S:.2f}"


def _composed(texts: Sequence[str]) -> Cell:
    """Compose the command of one step, and resolve its references.

    Raises:
        MensError: the command is wrong; several problems are raised together.
    """
    checked = check(texts)
    problems = [one for one in checked.problems if not is_of_bundle(one)]
    for cell in checked.cells:
        problems += pin_inputs(cell)
    Problems.raise_if(problems)
    return checked.cells[0]


def _perform(commands: RoundCommands, done: list[Round]) -> str | None:
    """Run the next round; return the reason to stop without training, if there is one.

    Raises:
        MensError: a step failed; its directory has the record.
    """
    number = len(done) + 1
    place = commands.place(number)
    sampled = _step(place / "sample", commands.sampling(number), f"round {number}, sampling")
    rows, new = _rows(commands, number)
    if (reason := _nothing_to_learn(commands, done, sampled.facts[SECTION], rows, new)) is not None:
        return reason
    if rows:
        _write_rows(place / ROWS, rows)
    texts = commands.training(number, has_rows=bool(rows))
    trained = _step(place / "train", texts, f"round {number}, training")
    done.append(_round(number, place, (sampled, trained), (len(rows), new)))
    return None


def _nothing_to_learn(
    commands: RoundCommands,
    done: Sequence[Round],
    counts: dict[str, Any],
    rows: Sequence[TrainingPair],
    new: int,
) -> str | None:
    """Print the counts of a round's answers; return the reason not to train on them, if any.

    Raises:
        GateError: there is a reason in the first round.
    """
    number = len(done) + 1
    said = f"Round {number}: {counts['passed']} of {counts['sampled']} answers passed, "
    if commands.compares_answers:
        of_both = counts["prompts_of_both"]
        terminal.say(said + f"{of_both} of {counts['prompts']} tasks have both kinds of answers")
        return None if of_both else _without_groups(done, counts)
    terminal.say(said + f"{counts['kept']} distinct, {new} of them new")
    has_own = isinstance(commands.config.data, JsonlData)
    if not rows and not (has_own and number == 1):
        return _without_rows(done, counts)
    if number > 1 and not new:
        return f"round {number} kept no answer that earlier rounds lack"
    return None


def _without_groups(done: Sequence[Round], counts: dict[str, Any]) -> str:
    if done:
        return f"in round {len(done) + 1} no task had both answers that pass and answers that fail"
    raise GateError(
        "no task has both answers that pass and answers that fail, so there is nothing to compare",
        where=f"{SECTION}.sample",
        found=f"{counts['passed']} of {counts['sampled']} answers passed, {counts['unfinished']} "
        "were cut at suite.max_new_tokens and left out",
        expected="a task that is solved by some of its finished answers, and not by others",
        remedy="give easier or harder tasks, more eval.samples, or a larger suite.max_new_tokens",
    )


def _without_rows(done: Sequence[Round], counts: dict[str, Any]) -> str:
    if done:
        return f"round {len(done) + 1} kept no answer"
    raise GateError(
        "no answer was kept, so there is nothing to train on",
        where=f"{SECTION}.sample",
        found=f"{counts['passed']} of {counts['sampled']} answers passed, "
        f"{counts['unfinished']} of them cut at suite.max_new_tokens",
        expected="a distinct, finished answer that passes",
        remedy="give easier tasks, more eval.samples, a higher eval.temperature, a larger "
        "suite.max_new_tokens, or rows of your own to begin with (data=jsonl data.path=…)",
    )


def _rows(commands: RoundCommands, number: int) -> tuple[list[TrainingPair], int]:
    """Return the training rows of a round, and the number of its new ones.

    Raises:
        RequestError: a file of passing answers has changed since it was written.
    """
    each = [_passing(commands.place(one) / "sample") for one in range(1, number + 1)]
    known = {_identity(row) for rows in each[:-1] for row in rows}
    new = {_identity(row) for row in each[-1]} - known
    if commands.config.rejection_sampling.rows is RoundRows.newest:
        return each[-1], len(new)
    distinct: dict[tuple[str | None, str], TrainingPair] = {}
    for row in itertools.chain(*each):  # of duplicates, the first is kept
        distinct.setdefault(_identity(row), row)
    return list(distinct.values()), len(new)


def _step(directory: Path, texts: list[str], what: str) -> Manifest:
    """Run one step unless it is complete; return its manifest.

    Raises:
        RequestError: a different command has run it.
        MensError: the step failed.
    """
    run = RunDir(directory)
    before = Manifest.read(run.manifest) if run.manifest.is_file() else None
    if before is not None and before.overrides != texts:
        raise RequestError(
            "this round was made by another command",
            where=str(directory),
            found=_difference(before.overrides, texts),
            expected="the same settings; only rounds and hours may change",
            remedy=f"restore the command, or choose another {SECTION}.output",
        )
    if before is not None and before.status is Status.SUCCEEDED:
        terminal.say(f"{what}: already done")
        return before
    if before is not None and before.task == "train":
        terminal.say(f"{what}: continued")
        resume_training(prepare_resumption(str(directory), {}))
        return Manifest.read(run.manifest)
    if directory.exists():
        _archive(directory)
    terminal.say(f"{what} …")
    perform(directory, _composed(texts), prints=False)
    return Manifest.read(run.manifest)


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    gone = [text for text in before if text not in now]
    come = [text for text in now if text not in before]
    return f"without {' '.join(gone) or 'nothing'}, with {' '.join(come) or 'nothing'}"


def _archive(directory: Path) -> None:
    """Rename the directory of an interrupted step, so that the step can run again."""
    number = 1
    while (aside := directory.with_name(f"{directory.name}.interrupted_{number}")).exists():
        number += 1
    directory.rename(aside)


def _passing(sample: Path) -> list[TrainingPair]:
    """Read the passing answers of a round.

    Raises:
        RequestError: the file is not the one that the sampling wrote.
    """
    file, recorded = sample / PASSING, Manifest.read(RunDir(sample).manifest).facts[SECTION]
    if not file.is_file() or sha256_file(file) != recorded["sha256"]:
        raise RequestError(
            "is not the file that the sampling wrote",
            where=str(file),
            expected=f"SHA-256 {recorded['sha256']}",
            remedy=f"restore it, or choose another {SECTION}.output",
        )
    return list(read_rows(file).pairs) if file.stat().st_size else []


def _identity(row: TrainingPair) -> tuple[str | None, str]:
    """Return a key that equal answers share: the task, and the answer's syntax tree or words."""
    return row.group, response_key(row.response)


def _write_rows(path: Path, rows: Sequence[TrainingPair]) -> None:
    """Write the rows of a round; the content is deterministic.

    Raises:
        RequestError: the file exists with other content.
    """
    content = io.BytesIO()
    for row in rows:
        content.write(atomic.json_line(to_json(row), str(path)))
    if path.is_file() and path.read_bytes() != content.getvalue():
        raise RequestError(
            "these rows were changed",
            where=str(path),
            expected="the passing answers of this round and those before",
            remedy="delete the file; it is written again",
        )
    atomic.write_bytes(path, content.getvalue())


def _round(
    number: int, place: Path, steps: tuple[Manifest, Manifest], rows: tuple[int, int]
) -> Round:
    sampled, trained = steps
    counts = sampled.facts[SECTION]
    card = RunDir(place / "train").scorecard
    conditions = Scorecard.read(card).conditions if card.is_file() else {}
    tuned, base = conditions.get("tuned", {}), conditions.get("base", {})
    kpi = next((name for name in _KPIS if tuned.get(name) is not None), None)
    return {
        "number": number,
        "prompts": counts["prompts"],
        "sampled": counts["sampled"],
        "passed": counts["passed"],
        "kept": counts["kept"],
        "new": rows[1],
        "prompts_of_both": counts.get("prompts_of_both", 0),  # absent in earlier releases
        "rows": rows[0],
        "train_rows": trained.inputs["data"].get("train_rows"),
        "prompts_without_pass": counts["prompts_without_pass"],
        "tuned_val_loss": trained.results.get("tuned_val_loss"),
        "kpi": kpi,
        "base": None if kpi is None else base.get(kpi),
        "tuned": None if kpi is None else tuned.get(kpi),
        "wall_s": sum(one.results.get("wall_s") or 0.0 for one in steps),
        "sample": str(place / "sample"),
        "train": str(place / "train"),
    }
