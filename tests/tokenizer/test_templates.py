from __future__ import annotations

import functools
from datetime import datetime

import pytest

from mens_exp.errors import DataError
from mens_exp.tokenizer.templates import (
    CHATML,
    check_syntax,
    generated_spans,
    is_dated,
    render,
)

SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
    "Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama-3.2's template, reduced to plain conversations: date, tools, white space control.
LLAMA3 = """{{- bos_token }}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}

{#- The system message may come first. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# As Mistral-7B-Instruct-v0.3's: refusals, a namespace, tools, the system in the last turn.
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" + (tools | tojson) + "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
GENERATION = """{% for message in messages %}
  {% if message['role'] == 'assistant' %}
    {% generation %}
    {% set inside = "leak" %}
    {{ message['content'] }}{{ eos_token }}
    {% endgeneration %}
  {% else %}
    {{ message['role'] }}: {{ message['content'] }}
  {% endif %}
  {{ inside }}
{% endfor %}
"""
FILTERS = (
    "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|"
    "{{ messages[0].content | tojson(ensure_ascii=true) }}|"
    "{{ {'b': 1, 'a': '<&>'} | tojson(sort_keys=true, separators=(',', ':')) }}|"
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% if loop.index0 == 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}|"
    "{{ tools }}{{ documents }}{{ nothing }}|{{ unk_token }}|{{ pad_token }}"
)
TEMPLATES = {
    "smollm2": SMOLLM2,
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "generation": GENERATION,
    "filters": FILTERS,
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

USER = {"role": "user", "content": ' Grüße, "<b>" & {{ braces }}\n'}
ANSWER = {"role": "assistant", "content": "def f():\n    return 1\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {
    "prompt": [USER],
    "answered": [USER, ANSWER],
    "system": [SYSTEM, USER, ANSWER],
    "turns": [USER, ANSWER, {"role": "user", "content": "More?"}, ANSWER],
    "twice": [USER, USER],
}


@functools.cache
def reference():
    """Return a transformers tokenizer, which renders any template."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)


class Fixed(datetime):
    """A clock that stops at a fixed day."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, tzinfo=tz)


@pytest.fixture(autouse=True)
def same_day(monkeypatch):
    """Make transformers use the fixed date that we render with."""
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


def outcome_there(source, messages, *, opened):
    """Return the text that transformers renders, or the template's error."""
    from jinja2 import TemplateError

    try:
        text = reference().apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=opened
        )
    except TemplateError as refused:
        return "", str(refused)
    return str(text), None


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "opened"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_is_that_of_transformers(template, conversation, opened):
    """The texts are equal, and conversations that a template refuses are refused by both."""
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    expected, refusal = outcome_there(source, messages, opened=opened)
    if refusal is None:
        assert render(source, messages, add_generation_prompt=opened, **TOKENS) == expected
    else:
        with pytest.raises(DataError) as caught:
            render(source, messages, add_generation_prompt=opened, **TOKENS)
        assert caught.value.found == refusal


def test_comparison_reaches_text_and_refusals():
    """Mistral's template renders some and refuses others; the date is fixed."""
    text = render(MISTRAL, CONVERSATIONS["turns"], add_generation_prompt=False, **TOKENS)
    assert text.count("[INST]") == 2
    assert "AVAILABLE_TOOLS" not in text
    with pytest.raises(DataError, match="roles must alternate"):
        render(MISTRAL, CONVERSATIONS["twice"], add_generation_prompt=False, **TOKENS)
    dated = render(LLAMA3, [USER], add_generation_prompt=True, **TOKENS)
    assert "Today Date: 26 Jul 2024" in dated


def test_chatml_is_spelled_exactly():
    """The strings are those of REFERENCE, section 8: no newline after the last end marker."""
    system, user, assistant = "S", "U", "A"
    turns = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant},
    ]
    prompt = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(CHATML, turns[:2], add_generation_prompt=True) == prompt
    assert render(CHATML, turns, add_generation_prompt=False) == f"{prompt}{assistant}<|im_end|>"


def test_chatml_without_system_begins_with_the_user():
    """There is no default system prompt."""
    text = render(CHATML, [{"role": "user", "content": "U"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% generation %}without end",
        "{{ raise_exception('no') }}",
        "{{ messages[9].content.upper() }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages[0].content.nothing.more() }}",
        "{{ '%*d' % (2 ** 62, 1) }}",
    ],
)
def test_template_that_fails_is_refused(source):
    """Templates come with models, so their errors and attacks become our refusals."""
    with pytest.raises(DataError, match="refuses a conversation") as caught:
        render(source, [USER], add_generation_prompt=False)
    assert caught.value.exit_code == 2


def test_blocks_of_generation_are_located():
    """Spans are characters of the text rendered without the markers."""
    messages = CONVERSATIONS["turns"]
    text = render(GENERATION, messages, add_generation_prompt=False, **TOKENS)
    spans = generated_spans(GENERATION, messages, **TOKENS)
    assert spans is not None
    assert [text[start:end].strip() for start, end in spans] == ["def f():\n    return 1\n</s>"] * 2


def test_template_without_blocks_has_no_spans():
    """The result is None and not an empty list."""
    assert generated_spans(LLAMA3, CONVERSATIONS["turns"], **TOKENS) is None
    assert generated_spans(GENERATION, CONVERSATIONS["prompt"], **TOKENS) == []


def test_dated_template_is_told():
    """The date in its prompts is recorded."""
    assert is_dated(LLAMA3)
    assert not is_dated(CHATML)


def test_a_template_gets_the_date_that_is_set():
    """It is passed as strftime_now and, for Llama 3.1, as date_string."""
    text = render(LLAMA3, [USER], add_generation_prompt=False, today="2026-01-05", **TOKENS)
    assert "Today Date: 05 Jan 2026" in text
    asking = "{{ strftime_now('%Y/%m/%d') }} {{ date_string }}"
    assert render(asking, [USER], add_generation_prompt=False, today="2026-01-05") == (
        "2026/01/05 05 Jan 2026"
    )


def test_syntax_can_be_checked_without_a_conversation():
    """A template is compiled without being rendered."""
    check_syntax("{{ raise_exception('only when rendered') }}")
    with pytest.raises(DataError, match="is not a chat template"):
        check_syntax("{% for m in messages %}")
