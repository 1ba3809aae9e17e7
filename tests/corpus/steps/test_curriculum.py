from __future__ import annotations

from mens_exp.config.corpus import CurriculumConfig, DifficultyOrder
from mens_exp.corpus.steps import arrange
from mens_exp.corpus.steps.arrange import curriculum, estimated, sorted_lines
from mens_exp.rows.schema import TrainingPair


def row(prompt, size, difficulty=None):
    return TrainingPair(prompt=prompt, response="x" * size, difficulty=difficulty)


ROWS = [row("hard", 10, 9), row("easy long", 20, 2), row("easy", 10, 2), row("easy too", 10, 2)]


def prompts(work, name="rows.jsonl"):
    return [each["prompt"] for each in work.lines(name)]


def test_easy_rows_come_first(work):
    """Rows are sorted by difficulty and then by length; ties keep their order."""
    result = work.do(curriculum, [work.file("a.jsonl", ROWS)])
    assert prompts(work) == ["easy", "easy too", "easy long", "hard"]
    assert result.facts == {"rows_by_difficulty": {"02": 3, "09": 1}, "estimated": 0}


def test_hard_rows_can_come_first(work):
    """The order is reversed, but ties keep their order."""
    config = CurriculumConfig(order=DifficultyOrder.hardest_first)
    work.do(curriculum, [work.file("a.jsonl", ROWS)], curriculum=config)
    assert prompts(work) == ["hard", "easy long", "easy", "easy too"]


def test_after_a_split_train_alone_is_ordered(work):
    """Only the training file is sorted."""
    work.do(curriculum, [work.file("train.jsonl", ROWS), work.file("val.jsonl", ROWS)])
    assert prompts(work, "train.jsonl")[0] == "easy"
    assert prompts(work, "val.jsonl") == [pair.prompt for pair in ROWS]


def test_a_row_without_a_difficulty_is_estimated(work):
    """By hand: 32 characters are difficulty 1, and each doubling adds one."""
    by_size = {1: 1, 32: 1, 64: 2, 65: 3, 128: 3, 10**6: 10}
    assert {size: estimated(row("p", size)) for size in by_size} == by_size
    result = work.do(curriculum, [work.file("a.jsonl", [row("p", 64), ROWS[0]])])
    assert result.facts == {"rows_by_difficulty": {"02": 1, "09": 1}, "estimated": 1}


def test_in_python_the_depth_of_the_tree_counts():
    """By hand: module, assignment, name or number are three levels, difficulty 1."""
    flat = TrainingPair(prompt="p", response="x = 1", language="python")
    # Module, If (five), Expr, Name are eight levels: (8 - 3) / 2 more than 1 is 3.5.
    # Its 96 characters are log2(96 / 32) more than 1: 2.58. The mean is 3.04.
    lines = ["    " * level + f"if a{level}:" for level in range(5)]
    nested = "\n".join([*lines, "    " * 5 + "b"])
    assert len(nested) == 96
    deep = TrainingPair(prompt="p", response=nested, language="python")
    assert (estimated(flat), estimated(deep)) == (1, 4)


def test_lines_are_sorted_over_many_runs(tmp_path, monkeypatch):
    """Merging runs of a few lines, two at a time, equals a sort in memory."""
    monkeypatch.setattr(arrange, "_MOST_RUNS", 2)
    lines = [b"%06d x\n" % number for number in range(300)]
    lines = lines[::2] + lines[::-2]
    assert list(sorted_lines(iter(lines), tmp_path, run_bytes=100)) == sorted(lines)
    assert list(tmp_path.iterdir()) == []
