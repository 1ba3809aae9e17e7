from __future__ import annotations

from mens_exp.corpus.generator.family import Case, Draft, Draw, Noun, Repair
from mens_exp.corpus.generator.generate import (
    assert_statement,
    examples,
    instruction,
    prompt,
    repair_prompt,
)

DRAFT = Draft(
    signature="double(x)",
    does=("returns twice `x`", "gives `x` times two"),
    solution="def double(x):\n    return 2 * x",
    cases=[Case("double(1)")],
    difficulty=1,
    note="It works on text too.",
)
REPAIR = Repair(
    operator="off_by_one",
    program="def double(x):\n    return 3 * x",
    failing_test="assert double(1) == 2",
    error="AssertionError",
)


def test_instructions_differ_in_wording_and_agree_in_content():
    """Two wordings in six frames all state the signature, the kind and the note."""
    found = {instruction(DRAFT, Draw(str(n))) for n in range(200)}
    assert len(found) == 12
    for text in found:
        assert "`double(x)`" in text
        assert "function" in text
        assert ("returns twice `x`" in text) != ("gives `x` times two" in text)
        assert text.endswith("It works on text too.")
        assert "{" not in text


def test_a_class_is_asked_for_as_a_class():
    """The prompt asks for a class, so that the answer is not a function."""
    draft = Draft(
        signature="Box()", does=("is empty",), solution="", cases=[], difficulty=1, noun=Noun.CLASS
    )
    assert all("class" in instruction(draft, Draw(str(n))) for n in range(20))


def test_examples_are_calls_with_their_values_or_none():
    """Half of the prompts show one or two distinct examples."""
    results = [("f(1)", "2"), ("f(2)", "4"), ("f(3)", "6")]
    found = [examples(results, Draw(str(n))) for n in range(100)]
    assert 30 < found.count("") < 70
    shown = {text for text in found if text}
    assert "For example, `f(1)` gives `2`" in shown
    assert "For example, `f(3)` gives `6` and `f(1)` gives `2`" in shown
    assert {text.count("gives") for text in shown} == {1, 2}
    assert not any(examples([], Draw(str(n))) for n in range(20))


def test_prompt_ends_by_asking_for_code_alone():
    """Prompts with examples, without them and for repairs all end the same way."""
    assert prompt("Do it.", "") == "Do it. Answer with the code only."
    assert prompt("Do it.", "See") == "Do it. See. Answer with the code only."
    assert repair_prompt("Do it.", REPAIR, Draw("")).endswith("Answer with the code only.")


def test_repair_shows_program_test_and_error():
    """The order is program, test, error; code is fenced, and the frame varies."""
    texts = {repair_prompt("Do it.", REPAIR, Draw(str(n))) for n in range(40)}
    assert len(texts) == 4
    for text in texts:
        assert "The task was: Do it.\n" in text
        _, program, between, test, after = text.split("```")
        assert program == f"python\n{REPAIR.program}\n"
        assert "This test fails" in between
        assert test == "python\nassert double(1) == 2\n"
        assert after.startswith("\n\nAssertionError\n")


def test_program_that_does_not_parse_has_no_test_to_show():
    """For a program that does not parse, only the error is shown."""
    broken = Repair(
        operator="missing_colon", program="def f()", failing_test="", error="SyntaxError: x"
    )
    text = repair_prompt("Do it.", broken, Draw(""))
    assert "It does not run:\n\nSyntaxError: x\n" in text
    assert text.count("```") == 2


def test_tests_compare_or_wait_for_an_exception():
    """The setup comes first both in comparisons and in expected exceptions."""
    assert assert_statement(["a = 1"], "f(a)", "2", "") == "a = 1\nassert f(a) == 2"
    waiting = assert_statement(["a = 1"], "f(a)", "", "ValueError")
    assert waiting.splitlines() == [
        "a = 1",
        "try:",
        "    f(a)",
        "except ValueError:",
        "    pass",
        "else:",
        "    raise AssertionError('f(a) must raise ValueError')",
    ]
