"""Supervised tokens under published chat templates, for any content of the rows.

Expected texts are written from each template's documentation, not from our own rendering.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_rows import TOOLS, TRL, WITH_TOOLS
from transformers.utils.chat_template_utils import render_jinja_template

from mens_exp.errors import DataError
from mens_exp.rows.answers import answer_of, answer_turn, messages_of
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import TrainingPair

NO_REASONING = "<think>\n\n</think>\n\n"
LEARNED = {
    "chatml": lambda text: f"{text}<|im_end|>",
    "chatml_marked": lambda text: f"{text}<|im_end|>",
    "llama3": lambda text: f"{text.strip()}<|eot_id|>",
    "qwen3": lambda text: NO_REASONING + text.lstrip("\n") + "<|im_end|>",
    "gemma": lambda text: f"{text.strip()}<end_of_turn>",
    "mistral": lambda text: f" {text.strip()}</s>",
    "phi3": lambda text: f"{text}<|end|>",
    "phi4": lambda text: f"{text}<|im_end|>",
}
SPELLED = [
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "</s>",
    "[/INST]",
    "<|end|>",
    "\ufdd0",
    "\n\n",
]
TEXTS = st.lists(
    st.sampled_from(SPELLED) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    min_size=1,
    max_size=3,
).map("".join)
SAID = TEXTS.filter(str.strip)


@st.composite
def weighed(draw, rows):
    """Draw a row in which some of the earlier answers are unsupervised."""
    row = draw(rows)
    given = draw(st.sets(st.integers(0, 3)))
    return replace(row, unlearned=tuple(sorted(n for n in given if n < len(row.history))))


ROWS = weighed(
    st.builds(
        TrainingPair,
        prompt=SAID,
        response=SAID,
        history=st.lists(st.tuples(SAID, SAID), max_size=3).map(tuple),
        system=st.none() | TEXTS,
    )
)
THREE = TrainingPair(
    history=(("u1", "first answer"), ("u2", "second")), prompt="u3", response="third"
)


def runs(documents):
    """Return each run of supervised tokens with the tokens before it in its document."""
    found = []
    for start, end in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
        ids, mask = documents.ids[start:end].tolist(), documents.supervised[start:end].tolist()
        edges = [i for i in range(len(mask)) if mask[i] and (i == 0 or not mask[i - 1])]
        for edge in edges:
            stop = next((i for i in range(edge, len(mask)) if not mask[i]), len(mask))
            found.append((ids[:edge], ids[edge:stop]))
    return found


def encoded(tokenizer, row, **labels):
    return encode([row], tokenizer, Labelling(objective="assistant", seq_len=100_000, **labels))


@pytest.mark.parametrize("name", LEARNED)
@settings(max_examples=60)
@given(row=ROWS)
def test_learned_are_the_answers_and_their_ends_after_their_own_prompts(published, name, row):
    """Each answer occurs once, after exactly the ids from which generation starts."""
    tokenizer = published(name)
    if name == "gemma" and row.system is not None:
        with pytest.raises(DataError, match=rf"row {row.id}.*System role not supported"):
            encoded(tokenizer, row)
        return
    documents = encoded(tokenizer, row)
    found = sorted(runs(documents), key=lambda run: len(run[0]))
    learned = [i for i in range(len(row.exchanges)) if i not in row.unlearned]
    assert [tokenizer.spell(ids) for _, ids in found] == [
        LEARNED[name](row.exchanges[i][1]) for i in learned
    ]
    prompts = [messages_of(row, i) for i in learned]
    assert [before for before, _ in found] == tokenizer.encode_prompts(prompts)
    assert all(ids[-1] in tokenizer.special_ids for _, ids in found)
    assert not any(token in tokenizer.special_ids for _, ids in found for token in ids[:-1])


@pytest.mark.parametrize(
    ("name", "system", "count"),
    [
        ("chatml", None, 1),
        ("chatml", "s", 1),
        ("llama3", "s", 1),
        ("gemma", None, 1),
        ("phi3", "s", 1),
        ("phi4", "s", 1),
        ("mistral", None, 1),
        ("mistral", "s", 3),  # moves the system prompt to the last user turn
        ("qwen3", None, 3),  # drops reasoning from all turns but the last
    ],
)
def test_conversation_is_one_document_unless_the_template_changes_earlier_turns(
    published, name, system, count
):
    """Each changed answer then has a document of its own, which is counted."""
    row = TrainingPair(
        history=THREE.history, prompt=THREE.prompt, response=THREE.response, system=system
    )
    documents = encoded(published(name), row)
    assert (len(documents), documents.unrolled) == (count, count - 1)


@pytest.mark.parametrize("name", LEARNED)
def test_last_turn_alone_is_one_document(published, name):
    """Earlier answers are unsupervised."""
    tokenizer = published(name)
    documents = encoded(tokenizer, THREE, turns="last")
    ((before, ids),) = runs(documents)
    assert tokenizer.spell(ids) == LEARNED[name]("third")
    assert "first answer" in tokenizer.spell(before)
    assert documents.unrolled == 0


def test_reasoning_is_learned_where_it_is_kept(published):
    """Qwen 3 keeps the reasoning of the last answer and drops it from later contexts."""
    row = TrainingPair(
        history=(("u1", "<think>\nfar\n</think>\n\none"),),
        prompt="u2",
        response="<think>near</think>two",
    )
    tokenizer = published("qwen3")
    found = sorted(runs(encoded(tokenizer, row)), key=lambda run: len(run[0]))
    assert [tokenizer.spell(ids) for _, ids in found] == [
        "<think>\nfar\n</think>\n\none<|im_end|>",
        "<think>\nnear\n</think>\n\ntwo<|im_end|>",
    ]
    assert "far" not in tokenizer.spell(found[1][0])
    assert "one" in tokenizer.spell(found[1][0])


def test_control_tokens_that_swallow_white_space_keep_their_way(
    published,
):
    """Phi-3's tokens strip the newline after them, with or without control text in the row."""
    tokenizer = published("phi3", rstrip=True)
    plain = encoded(tokenizer, TrainingPair(prompt="p", response="r"))
    assert (
        tokenizer.spell(plain.ids.tolist()) == "<|user|>p<|end|><|assistant|>r<|end|><|endoftext|>"
    )
    spelled = encoded(tokenizer, TrainingPair(prompt="<|end|>", response="r"))
    assert tokenizer.spell(spelled.ids.tolist()).startswith("<|user|><|end|><|end|><|assistant|>r")
    ends = [t for t in spelled.ids.tolist() if t == tokenizer.core.token_to_id("<|end|>")]
    assert len(ends) == 2


def test_context_that_the_template_changes_is_the_one_generation_sees(
    published,
):
    """Mistral's system prompt leaves an answered turn; training follows generation."""
    tokenizer = published("mistral")
    documents = encoded(tokenizer, TrainingPair(prompt="u", response="a", system="Be brief."))
    assert tokenizer.spell(documents.ids.tolist()) == "<s>[INST] Be brief.\n\nu[/INST] a</s>"


MARKED = (
    "{{% for m in messages %}}{{% if m.role == 'assistant' %}}<|im_start|>assistant\n{}"
    "{{% else %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{{% endif %}}"
    "{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{{{ '' }}}}{{% endif %}}"
)


@pytest.mark.parametrize(
    "inside",
    [
        "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n",
        "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}",
    ],
    ids=["without the end marker", "with it, and a newline"],
)
def test_markers_around_the_answer_are_accepted(published, inside):
    """The end marker is supervised either way, and the newline after it is not."""
    tokenizer = published("chatml", template=MARKED.format(inside))
    ((_, ids),) = runs(encoded(tokenizer, TrainingPair(prompt="p", response="ans")))
    assert tokenizer.spell(ids) == "ans<|im_end|>"


@pytest.mark.parametrize(
    "inside",
    [
        "{{ m.content }}{% generation %}<|im_end|>{% endgeneration %}\n",
        "{% generation %}{{ m.content[:1] }}{% endgeneration %}{{ m.content[1:] }}<|im_end|>\n",
        "{{ m.content }}<|im_end|>\n{% if false %}{% generation %}{% endgeneration %}{% endif %}",
    ],
    ids=["behind it", "around a part", "nowhere"],
)
def test_markers_elsewhere_are_refused(published, inside):
    """Template and text then disagree on the answer; the error names the row."""
    row = TrainingPair(prompt="p", response="ans")
    with pytest.raises(DataError, match="markers are not around the answer") as caught:
        encoded(published("chatml", template=MARKED.format(inside)), row)
    assert caught.value.where == row.name


def test_rows_that_a_template_refuses_are_told_together(
    published,
):
    """All rows are reported together, each with its place."""
    rows = [
        TrainingPair(prompt="p", response="r", system="s", place=f"rows.jsonl:{n}") for n in (4, 9)
    ]
    with pytest.raises(DataError) as one:
        encode(rows[:1], published("gemma"), Labelling(objective="assistant", seq_len=99))
    assert "rows.jsonl:4" in str(one.value)
    with pytest.raises(Exception, match=r"rows\.jsonl:4.*in 1 more row \(9\)"):
        encode(rows, published("gemma"), Labelling(objective="assistant", seq_len=99))


def test_control_text_is_control_where_it_is_allowed(
    published,
):
    """With `tokenizer.allow_control_text` a marker in the row becomes the token."""
    import dataclasses

    row = TrainingPair(prompt="p", response="a<|im_end|>b")
    end = published("chatml").core.token_to_id("<|im_end|>")
    as_text = encoded(published("chatml"), row).ids.tolist()
    as_token = encoded(dataclasses.replace(published("chatml"), allow_control_text=True), row)
    assert (as_text.count(end), as_token.ids.tolist().count(end)) == (2, 3)


OF_PICTURES = {"idefics3", "llava_next", "smolvlm"}  # their turns are lists and not strings
MARKED_BY_TRL = sorted(
    file.stem.removesuffix("_training")
    for file in TRL.glob("*_training.jinja")
    if file.stem.removesuffix("_training") not in OF_PICTURES
)
# Earlier turns lack the tag that the generation prompt opens; our answers close it.
CLOSES = {"deepseek_r1_distill", "deepseekv3", *(n for n in MARKED_BY_TRL if "nemotron" in n)}
PLAIN = TrainingPair(
    history=(("first question", "first answer"),), prompt="question", response="the answer"
)
REASONED = dataclasses.replace(PLAIN, response="<think>\nwhy\n</think>\n\nthe answer")


def marked_by_trl(name, row, exchange=-1):
    """Return the text that transformers masks as generated with TRL's markers."""
    messages = [*messages_of(row, exchange), answer_turn(row, exchange)]
    tools = messages[0].get("tools")
    messages[0] = {key: value for key, value in messages[0].items() if key != "tools"}
    (text,), (spans,) = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=(TRL / f"{name}_training.jinja").read_text("utf-8"),
        return_assistant_tokens_mask=True,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
    )
    told = max(text.rfind(one["content"]) for one in messages if one["role"] != "assistant")
    begins, ends = zip(*(span for span in spans if span[0] > told), strict=True)
    return text[min(begins) : max(ends)]


def in_both():
    """Yield templates and rows for which TRL and this package train the same text."""
    for name in MARKED_BY_TRL:
        if name not in CLOSES:
            yield pytest.param(name, PLAIN, id=f"{name}-plain")
        # DeepSeek-V3's drops reasoning, one prompt has closed it, and Qwen 3.8's puts it behind an
        # empty one.
        if name not in {"deepseekv3", "qwen3_5_nothink", "qwen3_8"}:
            yield pytest.param(name, REASONED, id=f"{name}-reasoned")


@pytest.mark.parametrize(("name", "row"), [*in_both()])
def test_answers_are_those_that_trl_marks_in_the_same_template(published, name, row):
    """Text that the generation prompt has already opened is excepted."""
    tokenizer = published("chatml", template=(TRL / f"{name}.jinja").read_text("utf-8"))
    assert_same(answer_of(row, -1, tokenizer), marked_by_trl(name, row))


def assert_same(answer, theirs):
    """Assert that TRL's mask is the answer, except for text that opens or closes it."""
    opened, found, closing = theirs.partition(answer.body)
    assert found
    assert answer.prompt.endswith(opened)
    assert closing.startswith(answer.closing.strip()) or answer.closing.startswith(closing)


@pytest.mark.parametrize("name", [*sorted(CLOSES), "qwen3_8"])
@pytest.mark.parametrize(
    ("row", "learned"),
    [(PLAIN, "\n</think>\n\nthe answer"), (REASONED, "why\n</think>\n\nthe answer")],
    ids=["plain", "reasoned"],
)
def test_a_tag_that_the_prompt_opens_is_closed_by_the_answer(published, name, row, learned):
    """As in generation, the answer closes it; without reasoning it does so at once."""
    tokenizer = published("chatml", template=(TRL / f"{name}.jinja").read_text("utf-8"))
    answer = answer_of(row, -1, tokenizer)
    assert answer.body == learned
    assert answer.prompt.endswith("<think>\n")
    assert answer.prompt == tokenizer.render(messages_of(row), add_generation_prompt=True)


def test_reasoning_behind_a_prompt_that_has_closed_it_is_refused(published):
    """Generation could not produce such reasoning."""
    template = (TRL / "qwen3_5_nothink.jinja").read_text("utf-8")
    with pytest.raises(DataError, match="does not keep prompt and answer"):
        encoded(published("chatml", template=template), REASONED)


def test_a_template_that_drops_the_system_prompt_is_refused(published):
    """Training would silently omit it; the error names the row."""
    template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = published("chatml", template=template)
    with pytest.raises(DataError, match="drops the row's system prompt") as caught:
        encoded(tokenizer, TrainingPair(prompt="p", response="r", system="Be brief."))
    assert "Be brief." in str(caught.value)
    assert "tokenizer.chat_template" in str(caught.value)
    for system in (None, ""):
        assert encoded(tokenizer, TrainingPair(prompt="p", response="r", system=system))


def test_a_turn_that_the_generation_prompt_does_not_open_is_refused(published):
    """The model would have to generate the template's header itself."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(DataError, match="does not keep prompt and answer"):
        encoded(published("chatml", template=template), TrainingPair(prompt="p", response="r"))


WRITE_CALLS = [
    *("glm4moe", "gptoss", "lfm2_v2", "muse_glimmer", "qwen2_5", "qwen3", "qwen3_5_nothink"),
    *("qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
]


@pytest.mark.parametrize("name", WRITE_CALLS)
def test_calls_of_tools_are_those_that_trl_marks(published, name):
    """Calls and answers are supervised; results of tools are not."""
    tokenizer = published("chatml", template=(TRL / f"{name}.jinja").read_text("utf-8"))
    for exchange in range(4):
        answer = answer_of(WITH_TOOLS, exchange, tokenizer)
        assert_same(answer, marked_by_trl(name, WITH_TOOLS, exchange))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano"])
def test_reasoning_before_a_call_is_learned_with_it(published, name):
    """This holds whatever white space the template writes around reasoning."""
    turns = json.loads(WITH_TOOLS.conversation)["messages"][:2]
    turns[1]["content"] = "<think>I must look.</think>Let me look."
    row = parse_row({"messages": turns, "tools": TOOLS}, "rows.jsonl:1")
    tokenizer = published("chatml", template=(TRL / f"{name}.jinja").read_text("utf-8"))
    ((_, ids),) = runs(encoded(tokenizer, row))
    learned = tokenizer.spell(ids)
    places = [learned.index(text) for text in ("I must look.", "</think>", "Let me", "weather")]
    assert places == sorted(places)
    assert learned.count("</think>") == 1


NO_TOOLS = {
    "gemma3": "drops the row's tools",
    "llama3": "drops the row's tools",
    "deepseekv3": "drops the row's tools",
    "lfm2": "does not write the calls of an answer",
}


@pytest.mark.parametrize("name", NO_TOOLS)
def test_a_template_without_tools_is_refused(published, name):
    """Answers would be trained without the questions they belong to."""
    tokenizer = published("chatml", template=(TRL / f"{name}.jinja").read_text("utf-8"))
    with pytest.raises(DataError, match=NO_TOOLS[name]):
        encoded(tokenizer, WITH_TOOLS)


@pytest.mark.parametrize("name", [*WRITE_CALLS, "llama3_1", "llama3_2", "gemma4"])
def test_every_answer_with_calls_is_learned_after_its_own_prompt(published, name):
    """Each occurs once and ends with the template's end marker for calls."""
    source = (TRL / f"{name}.jinja").read_text("utf-8")
    tokenizer = published("chatml", template=source)
    found = sorted(runs(encoded(tokenizer, WITH_TOOLS)), key=lambda run: len(run[0]))
    prompts = [messages_of(WITH_TOOLS, exchange) for exchange in range(4)]
    assert [before for before, _ in found] == tokenizer.encode_prompts(prompts)
    said = [tokenizer.spell(ids) for _, ids in found]
    for text, needed in zip(said, ["Zü", "It is grey.", "CET", "Noon."], strict=True):
        assert needed in text
    assert not any("noon" in text or "sky" in text for text in said)


def test_text_of_tools_that_spells_control_tokens_is_text(published):
    """This holds for names, descriptions, results and arguments."""
    text = json.dumps(json.loads(WITH_TOOLS.conversation)).replace("noon", "<|im_end|>")
    text = text.replace("Tells", "<|im_start|>").replace("CET", "<|im_end|>")
    row = dataclasses.replace(WITH_TOOLS, conversation=text)
    tokenizer = published("chatml", template=(TRL / "qwen2_5.jinja").read_text("utf-8"))
    ends = tokenizer.core.token_to_id("<|im_end|>")
    plain, spelled = (encoded(tokenizer, one).ids.tolist() for one in (WITH_TOOLS, row))
    assert plain.count(ends) == spelled.count(ends)
    assert tokenizer.spell(spelled).count("<|im_end|>") == plain.count(ends) + 2


@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_template_that_drops_calls_of_the_context_is_refused(published, turns):
    """LFM2's renders no calls, so the last answer would follow a result that nothing asked for."""
    tokenizer = published("chatml", template=(TRL / "lfm2.jinja").read_text("utf-8"))
    labelling = Labelling(objective="assistant", seq_len=4096, turns=turns)
    with pytest.raises(DataError, match="call"):
        encode([WITH_TOOLS], tokenizer, labelling)


def test_a_header_that_looks_like_a_tag_is_not_closed(published):
    """Only reasoning that the template itself closes is closed."""
    template = (
        "{% for m in messages %}<{{ m.role }}>\n"
        "{% if m.role == 'assistant' %}to user: {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}"
    )
    tokenizer = published("chatml", template=template)
    ((_, ids),) = runs(encoded(tokenizer, TrainingPair(prompt="p", response="r")))
    assert tokenizer.spell(ids) == "to user: r<|im_end|>"
