"""Only the table of quantizers asks which quantizer is in use."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mens_exp.config.quant import (
    BUILT_IN,
    QUANTIZERS,
    QuantConfig,
    QuantType,
)

SOURCE = Path(__file__).parents[2] / "src" / "mens_exp"
NAMES = set(BUILT_IN) - {"none"}

# The exempt files, with the reason.
MAY_ASK = {
    "config/quant.py": "declares the names",
    "quant": "is what the quantizers do",
    "backends/reference.py": "an oracle, which shares no code with what it judges",
}


def may_ask(file):
    return file in MAY_ASK or file.split("/", maxsplit=1)[0] in MAY_ASK


def is_member(node):
    """Tell whether an expression is a member of QuantType, by name."""
    owner = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "QuantType" and not node.attr.startswith("_")


def questions(source):
    """Return the lines that use a member of QuantType or compare with a quantizer's name."""
    found = set()
    if not any(word in source for word in ("QuantType", *NAMES)):
        return []  # parsing every file takes seconds
    for node in ast.walk(ast.parse(source)):
        if is_member(node):
            found.add(node.lineno)
        if isinstance(node, ast.Compare):
            inside = [one for side in (node.left, *node.comparators) for one in ast.walk(side)]
            named = {one.value for one in inside if isinstance(one, ast.Constant)}
            dtypes = {one.attr for one in inside if isinstance(one, ast.Attribute)}
            if (named | dtypes) & NAMES:
                found.add(node.lineno)
    return sorted(found)


def test_nothing_outside_asks_which_quantizer_it_is():
    """Anything that depends on the quantizer is an attribute or a method of it."""
    asked = {
        f"{file}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not may_ask(file := path.relative_to(SOURCE).as_posix())
        for line in questions(path.read_text("utf-8"))
    }
    assert asked == set()


def test_every_exemption_is_in_use():
    """A file that no longer asks must be removed from the list."""
    asking = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if questions(path.read_text("utf-8"))
    }
    assert {name for name in MAY_ASK if any(f"{file}/".startswith(f"{name}/") for file in asking)}
    unused = {name for name in MAY_ASK if not any(f.startswith(name) for f in asking)}
    assert unused == set()


@pytest.mark.parametrize(
    "question",
    [
        "a = config.quant.quant_type is QuantType.int8",
        "a = kind in {QuantType.nf4, QuantType.fp4}",
        "a = quant_type.value == 'int8'",
        "a = base in ('nf4', 'fp4')",
        "a = weight.dtype == torch.int8",
        "table = {QuantType.nf4: 1}",
    ],
)
def test_a_question_is_found(question):
    """The check finds enum members, and comparisons with names and number formats."""
    assert questions(question) == [1]


@pytest.mark.parametrize(
    "answer",
    ["a = quant.spec.code_bits == 8", "a = QuantType(name)", "say = 'choose quant=nf4'"],
)
def test_an_answer_is_no_question(answer):
    """Calling the quantizer, choosing from its names, and messages are allowed."""
    assert questions(answer) == []


def test_the_schema_accepts_what_the_table_has():
    """A mismatch between schema and table would otherwise show only in a run."""
    assert {one.value for one in QuantType} == BUILT_IN.keys()
    assert all(one.spec.name == one.value for one in QuantType)


def test_a_record_of_another_quantizer_is_unknown():
    """Records may come from other programs, with names that do not exist here."""
    assert QUANTIZERS.known("hqq") is None
    assert QUANTIZERS.known("fp4") is QUANTIZERS.named("fp4")


def test_a_weight_takes_the_bits_of_the_papers():
    """Scales take 0.5 or 0.127 bits (QLoRA, section 3), or a float32 per row (LLM.int8)."""

    def bits(name, *, double_quant=False):
        return BUILT_IN[name].bits_per_weight(
            compute_bits=16, block=64, double_quant=double_quant, rows_per_weight=1 / 512
        )

    assert bits("nf4") == bits("fp4") == 4.5
    assert bits("nf4", double_quant=True) == pytest.approx(4.127, abs=5e-4)
    assert bits("int8") == 8 + 32 / 512
    assert bits("none") == 16
    assert (bits("nf2"), bits("nf3"), bits("int4")) == (2.5, 3.5, 4.5)
    assert (bits("uint2"), bits("uint4"), bits("uint8")) == (3, 5, 9)  # with a zero point


def test_a_format_with_its_own_block_has_no_other():
    """32 for OCP's formats and 16 for NVIDIA's; only NormalFloat takes the setting."""
    assert QuantConfig(quant_type=QuantType.mxfp4).block == 32
    assert QuantConfig(quant_type=QuantType.nvfp4).block == 16
    assert QuantConfig(quant_type=QuantType.nf3, block_size=128).block == 128


def test_a_configuration_hands_on_to_its_quantizer():
    """The config group has the settings; the quantizer interprets them."""
    assert QuantConfig(quant_type=QuantType.int8).spec.keeps_inputs
    assert not QuantConfig(quant_type=QuantType.nf4).spec.keeps_inputs
    assert QuantConfig(quant_type=QuantType.none).is_quantized is False
