from __future__ import annotations

import re

import pytest

from mens_exp.errors import RequestError
from mens_exp.export.gguf import default_system, is_chatml, modelfile
from mens_exp.tokenizer.implementations import HfTokenizer
from mens_exp.tokenizer.templates import CHATML

# Like SmolLM2's template: a default system turn, and a newline after every end marker.
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = CHATML.replace("message['content']", "message['content'].strip()")
NO_SYSTEM = "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}" + CHATML
BEFORE = "<|endoftext|>" + CHATML
QUOTED = SMOLLM.replace("Be kind.", 'Be """kind""".')


@pytest.fixture
def tokenizer_with(tiny_base, tmp_path):
    """A byte-level tokenizer with a chat template."""
    import shutil

    def made(template):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_base.directory / name, tmp_path / name)
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        return HfTokenizer.from_directory(tmp_path)

    return made


def go(template, turns):
    """Expand the only Go syntax in use: a range over messages and two fields of each."""
    found = re.fullmatch(
        r"\{\{- range \.Messages \}\}(.*)\{\{ end \}\}([^{]*)", template, re.DOTALL
    )
    assert found is not None
    said = [
        found[1].replace("{{ .Role }}", turn["role"]).replace("{{ .Content }}", turn["content"])
        for turn in turns
    ]
    return "".join(said) + found[2]


@pytest.mark.parametrize(("template", "system"), [(CHATML, ""), (SMOLLM, "Be kind.")])
def test_chatml_is_the_same_text_in_go(tokenizer_with, template, system):
    """The default system turn becomes SYSTEM, which Ollama puts before the others."""
    tokenizer = tokenizer_with(template)
    text = modelfile(tokenizer, base=".")
    found = re.search(r'^TEMPLATE """(.*?)"""$', text, re.DOTALL | re.MULTILINE)
    assert found is not None
    assert ('SYSTEM """Be kind."""' in text) is bool(system)
    turns = [
        {"role": "user", "content": " one \n"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    wanted = tokenizer.render(turns, add_generation_prompt=True)
    first = [{"role": "system", "content": system}] if system else []
    assert go(found[1], [*first, *turns]) == tokenizer.unguard(wanted)


@pytest.mark.parametrize("template", [TRIMMED, NO_SYSTEM, BEFORE, QUOTED, "{{ messages }}"])
def test_a_template_that_is_not_chatml_is_left_out_and_said(tokenizer_with, template):
    """Trimmed content, a refused role, a text in front, an unquotable text, another format."""
    tokenizer = tokenizer_with(template)
    text = modelfile(tokenizer, base=".")
    assert not is_chatml(tokenizer)
    assert 'TEMPLATE """' not in text
    assert "# No TEMPLATE: this chat template is not ChatML" in text


THINKING = CHATML.replace(
    "message['content']", "message['content'].split('</think>')[-1].lstrip('\\n')"
)
NO_EMPTY = "{% set messages = messages | selectattr('content') | list %}" + CHATML


@pytest.mark.parametrize(
    ("template", "name"),
    [(THINKING, "an earlier answer's <think> part"), (NO_EMPTY, "an empty system turn")],
)
def test_turns_that_the_template_renders_otherwise_are_named(tokenizer_with, template, name):
    """As Qwen 3's does with reasoning; the TEMPLATE is right for all other conversations."""
    text = modelfile(tokenizer_with(template), base=".")
    assert f"# The model's own template renders otherwise: {name}.\n" in text
    assert 'TEMPLATE """' in text
    assert "renders otherwise" not in modelfile(tokenizer_with(CHATML), base=".")


def test_the_three_forms_are_these_bytes(tokenizer_with):
    """The forms are a directory, a GGUF file, and a base with an adapter."""
    tokenizer = tokenizer_with(None)
    assert default_system(tokenizer) == ""
    rest = (
        'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}\n'
        "{{ .Content }}<|im_end|>\n"
        '{{ end }}<|im_start|>assistant\n"""\n'
        'PARAMETER stop "<|im_end|>"\n'
    )
    assert modelfile(tokenizer, base=".") == f"FROM .\n{rest}"
    assert modelfile(tokenizer, base="./model.gguf") == f"FROM ./model.gguf\n{rest}"
    with_adapter = modelfile(tokenizer, base="smollm2:135m", adapter="./peft")
    assert with_adapter == f"FROM smollm2:135m\nADAPTER ./peft\n{rest}"


def test_a_name_with_a_line_break_is_refused(
    tokenizer_with,
):
    """It could inject another Modelfile instruction."""
    with pytest.raises(RequestError, match="no line break"):
        modelfile(tokenizer_with(None), base=".\nADAPTER x")
