from __future__ import annotations

import ast
import re

import pytest
import yaml

from mens_exp.report import write
from mens_exp.report.summary import load


def _front_matter(text):
    opening, head, _ = text.split("---\n", 2)
    assert opening == ""
    return yaml.safe_load(head)


def test_front_matter_is_what_hubs_read(write_run):
    """The bundled base is SmolLM2, licensed under Apache 2.0."""
    assert _front_matter(write.render_card(load(write_run()))) == {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["mens_exp", "qlora", "bundled-base"],
    }


def test_front_matter_survives_hostile_names(write_run):
    """A model's name cannot add a key or end the block."""
    name = 'x: "y"\n---\nevil: 1 # \x00'
    head = _front_matter(write.render_card(load(write_run(inputs={"base_model": name}))))
    assert head["base_model"] == 'x: "y" --- evil: 1 # \\x00'
    assert "license" not in head
    assert "evil" not in head


def test_random_base_is_not_named_to_hubs(write_run):
    """No hub has it, and the card says what it is for."""
    text = write.render_card(
        load(write_run(inputs={"base_model": "tiny_llama", "base_source": "random"}))
    )
    assert "base_model" not in _front_matter(text)
    assert "random weights" in text


def test_bundled_base_is_called_four_bit(write_run):
    """Only the GGUF file is itself quantized, and not a base from the hub."""
    assert "4-bit (Q4_1)" in write.render_card(load(write_run()))
    hub = {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "base_source": "hub"}
    assert "Q4_1" not in write.render_card(load(write_run(inputs=hub)))


@pytest.mark.parametrize(
    ("quant", "present", "missing"),
    [
        ("nf4", 'bnb_4bit_quant_type="nf4"', "load_in_8bit"),
        ("int8", "load_in_8bit=True", "bnb_4bit"),
        ("none", "dtype=torch.bfloat16", "BitsAndBytesConfig"),
        ("prequantized", "needs the package of its format", "does not load"),
    ],
)
def test_loading_code_quantizes_as_the_run_did(write_run, quant, present, missing):
    """The code parses and uses the run's quantization."""
    text = write.render_card(load(write_run(facts={"quant": quant, "double_quant": True})))
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ast.parse(code)
    assert present in code
    assert missing not in code


def test_card_has_results_and_how_to_repeat_them(write_run):
    """It has one row per KPI, the command and the digests."""
    text = write.render_card(load(write_run()))
    row = "| Validation loss (nats per token) | 2.0000 | 1.5000 | \N{MINUS SIGN}25.0% better "
    assert row in text
    assert "python -m mens_exp optim.lr=2e-4 'data.path=my rows.jsonl'" in text
    assert f"| config digest | `{'ab' * 32}` |" in text


def test_card_of_a_failed_run_offers_nothing_to_load(failed_run):
    """The card says that it is no result, and why."""
    text = write.render_card(load(failed_run))
    assert "This run is not a result." in text
    assert "rows.jsonl:3: not JSON" in text
    assert "```python" not in text


def test_hostile_text_adds_no_markup(write_run):
    """Text cannot add a heading, a table cell or a tag."""
    hostile = "a | b\n# c <script> [x](y)"
    text = write.render_card(load(write_run(experiment=hostile, facts={"attention": hostile})))
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert "\n# c" not in text
    assert "| attention | a \\| b \\# c " in text


def test_rendering_twice_gives_the_same_bytes(write_run):
    """The card depends only on the records."""
    run = write_run()
    assert write.render_card(load(run)) == write.render_card(load(run))


FROM_SCRATCH = {"artifact": "weights", "quant": "none", "train_base": True, "lane": "research"}


@pytest.mark.parametrize(
    ("facts", "says", "silent"),
    [
        ({"artifact": "weights", "quant": "none"}, 'from_pretrained("weights")', "peft"),
        ({"artifact": "weights", "quant": "none"}, "A full fine-tuning model", "LoRA"),
        (FROM_SCRATCH, "A LoRA model", "fine-tuning"),
        (FROM_SCRATCH, "The base's own weights were trained too. Lane: research.", "peft"),
        (FROM_SCRATCH | {"train_base": False, "artifact": "adapter"}, "A LoRA adapter", "own weig"),
        (
            {"artifact": "adapter", "candle_qlora_graph_id": "proxy_stack_v1_residual"},
            "proxy_stack_v1_residual",
            "PeftModel",
        ),
        ({"artifact": "adapter and PEFT view", "lane": "research"}, "Lane: research.", "no such"),
    ],
)
def test_card_says_what_the_run_left(write_run, facts, says, silent):
    """The loading code matches the files written; a research lane is named."""
    text = write.render_card(load(write_run(facts=facts)))
    assert says in text
    assert silent not in text
