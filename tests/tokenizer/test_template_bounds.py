"""Chat templates that come with a model cannot hang or exhaust the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks import attack
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mens_exp.errors import DataError
from mens_exp.tokenizer import template_steps
from mens_exp.tokenizer.templates import CHATML, check_syntax, generated_spans, render

USER = {"role": "user", "content": "Grüße"}
NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TWICE = "{% set ns = namespace(x='xxxxxxxxxxxxxxxx') %}{% for i in range(60) %}"
SHARED = "{% set ns = namespace(x=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
OTHER = "{% set other = namespace(x=['x']) %}{% for i in range(60) %}"
OTHER += "{% set other.x = [other.x, other.x] %}{% endfor %}"
SHARED += "{% endfor %}"
PAIRS = SHARED.replace("[", "(").replace("]", ")").replace("('x')", "('x',)")
LONG = "{% set long = 'x' * 100000 %}{% set many = range(9999)|list %}"
BILLION = "1000000000"
ATTACKS = {
    "nested loops": NESTED,
    "nested loops without a body": NESTED.replace("99999", "9999999"),
    "a loop whose condition never holds": "{% for a in range(99999) %}{% for b in range(99999)"
    " if b < 0 %}{% endfor %}{% endfor %}",
    "a loop over a product": "{% for a in range(99999)|list * 99999 %}{% endfor %}",
    "a loop that calls itself": "{% for a in [1, 2] recursive %}"
    "{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "the width of a number": f"{{{{ '%{BILLION}d' % 1 }}}}",
    "the precision of a number": f"{{{{ '%.{BILLION}d' % 1 }}}}",
    "a width among the arguments": f"{{{{ '%*d' % ({BILLION}, 1) }}}}",
    "many widths": "{{ ('%(a)9999999d' * 99) % {'a': 1} }}",
    "a width in the filter": f"{{{{ '%{BILLION}d'|format(1) }}}}",
    "a width through format": f"{{{{ '{{:{BILLION}d}}'.format(1) }}}}",
    "a width through a nested field": f"{{{{ '{{:{{}}d}}'.format(1, {BILLION}) }}}}",
    "a width through format_map": f"{{{{ '{{x:{BILLION}d}}'.format_map({{'x': 1}}) }}}}",
    "one field many times": LONG + "{{ ('{0}' * 99999).format(long) }}",
    "one name many times": LONG + "{{ ('%(a)s' * 99999) % {'a': long} }}",
    "a multiplied text": f"{{{{ 'x' * {BILLION} }}}}",
    "a number times a text": f"{{{{ {BILLION} * 'x' }}}}",
    "a multiplied list": f"{{{{ ([1] * {BILLION})|length }}}}",
    "a multiplied tuple": f"{{{{ ((1,) * {BILLION})|length }}}}",
    "text that doubles by +": TWICE + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "text that doubles by ~": TWICE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "text that doubles in a block": TWICE
    + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "text that doubles in a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}"
    + TWICE
    + "{% set ns.x = m(ns.x) %}{% endfor %}",
    "a long text in a loop": LONG + "{% for i in many %}{{ long }}{% endfor %}",
    "center": f"{{{{ 'x'|center({BILLION}) }}}}",
    "center of a constant": "{% set x = 'x'|center(1000000000) %}",
    "center, called": f"{{{{ 'x'.center({BILLION}) }}}}",
    "ljust": f"{{{{ 'x'.ljust({BILLION}) }}}}",
    "zfill": f"{{{{ 'x'.zfill({BILLION}) }}}}",
    "expandtabs": f"{{{{ '\\t'.expandtabs({BILLION}) }}}}",
    "indent": f"{{{{ 'x'|indent({BILLION}, true) }}}}",
    "indent of many lines": "{{ ('x\n' * 99999)|indent(99999) }}",
    "join of multiplied lists": LONG + "{{ many|join(long) }}",
    "join, called": LONG + "{{ long.join(['x'] * 99999) }}",
    "replace": LONG + "{{ long|replace('x', long) }}",
    "replace, called": LONG + "{{ long.replace('x', long) }}",
    "replace of nothing": LONG + "{{ long.replace('', long) }}",
    "translate": LONG + "{{ long.translate({120: long}) }}",
    "wordwrap": LONG + "{{ long|wordwrap(1, wrapstring=long) }}",
    "pprint": SHARED + "{{ ns.x|pprint }}",
    "tojson": SHARED + "{{ ns.x|tojson }}",
    "tojson, indented": f"{{{{ [1]|tojson(indent={BILLION}) }}}}",
    "tojson, separated": LONG + "{{ many|tojson(separators=(long, long)) }}",
    "shared lists, shown": SHARED + "{{ ns.x }}",
    "shared lists, joined": SHARED + "{{ ns.x ~ '' }}",
    "shared lists, as text": SHARED + "{{ ns.x|string|length }}",
    "shared lists, in a format": SHARED + "{{ '%s' % ns.x }}",
    "shared lists, in a tuple of a format": SHARED + "{{ '%s' % (ns.x,) }}",
    "shared lists, in str.format": SHARED + "{{ '{}'.format(ns.x) }}",
    "shared lists, in a namespace": SHARED + "{{ ns }}",
    "shared lists, among values": SHARED + "{{ {'x': ns.x}.values() }}",
    "shared lists, trimmed": SHARED + "{{ ns.x|trim }}",
    "shared lists, compared": SHARED + OTHER + "{{ ns.x == other.x }}",
    "shared lists, tested": SHARED + OTHER + "{{ ns.x is eq(other.x) }}",
    "shared lists, sought": SHARED + OTHER + "{{ ns.x in [other.x] }}",
    "shared lists, indexed": SHARED + OTHER + "{{ [other.x].index(ns.x) }}",
    "shared lists, counted": SHARED + OTHER + "{{ [other.x].count(ns.x) }}",
    "shared lists, sorted": SHARED + OTHER + "{{ [ns.x, other.x]|sort|length }}",
    "shared lists, compared by a filter": SHARED
    + OTHER
    + "{{ [{'a': ns.x}]|selectattr('a', 'equalto', other.x)|list|length }}",
    "shared lists, the greatest": SHARED + OTHER + "{{ [ns.x, other.x]|max|length }}",
    "shared lists, refused with": SHARED + "{{ raise_exception(ns.x) }}",
    "shared pairs, as a key": PAIRS + "{{ {ns.x: 1}|length }}",
    "shared pairs, looked up": PAIRS + "{{ {}[ns.x] }}",
    "shared pairs, got": PAIRS + "{{ {}.get(ns.x) }}",
    "shared pairs, unique": PAIRS + "{{ [ns.x]|unique|list|length }}",
    "shared pairs, sought in an object": PAIRS + "{{ ns.x in {} }}",
    "shared pairs in dict()": PAIRS + "{{ dict([(ns.x, 1)])|length }}",
    "macros that call themselves": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}"
    "{% endif %}{% endmacro %}{{ m(60) }}",
    "blocks that call themselves": "{% set ns = namespace(n=0) %}{% block b %}"
    "{% set ns = namespace(n=0) %}{{ self.c() }}{{ self.c() }}{% endblock %}"
    "{% block c %}{% for i in range(9999) %}{{ self.d() }}{% endfor %}{% endblock %}"
    "{% block d %}{% for i in range(9999) %}x{% endfor %}{% endblock %}",
    "callers that call themselves": "{% macro w() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro m(n) %}{% if n %}{% call w() %}{{ m(n - 1) }}{% endcall %}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a namespace that grows": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a power": "{{ 10 ** 1000000000 }}",
    "a power of a power": "{{ 9 ** (9 ** 9) }}",
    "a large number, shown": "{{ (10 ** 3000000) % 7 }}",
    "numbers that double": "{% set ns = namespace(x=3) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "bytes of a number": "{{ (5).to_bytes(1000000000, 'big')|length }}",
    "slices": LONG + "{% set ns = namespace(n=0) %}{% for i in many %}"
    "{% set x = many[1:] %}{% set y = long[::-1] %}{% endfor %}",
    "slice": "{{ [1]|slice(1000000000)|list|length }}",
    "batch": "{{ ([1]|batch(1000000000, 'x')|list)[0]|length }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "lipsum of long paragraphs": "{{ lipsum(n=1, min=99999999, max=999999999) }}",
    "sums": "{{ [[1] * 9999]|sum(start=[])|length }}{{ ([[1] * 9999] * 99999)|sum(start=[]) }}",
    "map of a map": LONG + "{% for i in many %}{{ many|map('string')|list|length }}{% endfor %}",
    "select": LONG + "{% for i in many %}{{ many|select('odd')|list|length }}{% endfor %}",
    "membership": LONG + "{% for i in many %}{{ -1 in many }}{{ 'y' in long }}{% endfor %}",
    "length of a generator": LONG + "{% for i in many %}{{ many|map('abs')|join|length }}"
    "{% endfor %}",
    "ranges, joined": LONG + "{% for i in many %}{{ range(99999)|join|length }}{% endfor %}",
    "ranges, summed": LONG + "{% for i in many %}{{ range(99999)|sum }}{% endfor %}",
    "ranges, sought in": LONG + "{% for i in many %}{{ 'x' in range(99999) }}{% endfor %}",
    "items, sought in": LONG + "{% set d = {}.fromkeys(many) %}"
    "{% for i in many %}{{ 'x' in (d|items) }}{% endfor %}",
    "a macro of many arguments": LONG + "{% macro m() %}{{ varargs|length }}{% endmacro %}"
    "{% for i in many %}{{ m(*many) }}{% endfor %}",
    "a macro of many names": "{% macro m() %}{{ kwargs|length }}{% endmacro %}"
    "{% set d = dict((range(9998)|map('string')|list)|batch(2)|list) %}"
    "{% for i in range(99999) %}{{ m(**d) }}{% endfor %}",
    "dates": LONG + "{{ strftime_now('%A' * 9999999) }}",
    "urlize": "{{ ('http://' * 99999)|urlize }}",
    "striptags": "{{ ('<' * 999999)|striptags }}",
    "truncate": LONG + "{% for i in many %}{{ long|truncate(999999) }}{% endfor %}",
    "a comparison of long texts": "{% set a = 'x' * 100000 %}{% set b = 'x' * 100000 %}"
    "{% for i in range(99999) %}{% if a ~ '' == b ~ '' %}{% endif %}{% endfor %}",
    "xmlattr": LONG + "{% for i in many %}{{ {'a': long}|xmlattr }}{% endfor %}",
    "a search from the end": "{{ ('a' * 99999).rfind('ab' + 'a' * 50000) }}",
    "a split from the end": "{{ ('a' * 99999).rsplit(maxsplit=1, sep='ab' + 'a' * 50000)|length }}",
    "characters to strip": "{{ ('a' * 99999).strip('b' * 99999 + 'a')|length }}",
    "characters to trim": "{{ ('a' * 99999)|trim('b' * 99999 + 'a')|length }}",
    **{
        f"a search of a short text: {name}": "{% set a = 'a' * 2499 %}"
        "{% set b = 'a' * 1200 ~ 'ba' %}{% for i in range(99999) %}"
        f"{{{{ ({search})|string|length }}}}{{% endfor %}}"
        for name, search in {
            "in": "b in a",
            "is in": "b is in(a)",
            "in, chained": "b in a != 0",
            "find": "a.find(b)",
            "replace": "a|replace(b, '')",
        }.items()
    },
    "a long text sought in a list": "{% set many = ['x' * 199999 ~ 'y'] * 99999 %}"
    "{% for i in range(9999) %}{{ '" + "x" * 200_000 + "' in many }}{% endfor %}",
    "keys without others": LONG + "{% set d = {}.fromkeys(many) %}"
    "{% for i in many %}{% set x = d.keys() - [] %}{% endfor %}",
    "lists of characters": "{% set ns = namespace(x=[]) %}{% set wide = 'ሴ' * 9999 %}"
    "{% for i in range(999) %}{% set ns.x = ns.x + [wide|list] %}{% endfor %}",
    "objects of characters": "{% set ns = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set ns.x = ns.x + [{}.fromkeys('" + "".join(map(chr, range(44_032, 55_000))) + "')] %}"
    "{% endfor %}",
    "shared pairs, as an attribute": PAIRS + "{{ messages|attr(ns.x) }}",
    "shared pairs, as the attribute of a map": PAIRS + "{{ [{}]|map(attribute=ns.x)|list }}",
    "a wide body": "{% for i in range(99999) %}"
    + "{% set a = [i, i, i] %}" * 20_000
    + "{% endfor %}",
}


def rendered(source):
    return render(source, [USER], add_generation_prompt=False)


@pytest.fixture
def fewer(monkeypatch):
    """Limit templates to a tenth of the steps."""
    monkeypatch.setattr(template_steps, "MOST_STEPS", template_steps.MOST_STEPS // 10)


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_a_template_that_does_too_much_is_refused(source, fewer):
    """With a tenth of the steps an attack has a second of CPU time and 102 MiB."""
    end = attack(rendered, source, cpu_s=1, memory_mib=102)
    assert end.how == "refused", end
    assert "the chat template refuses a conversation" in end.message
    assert "MemoryError" not in end.message


@pytest.mark.parametrize(
    "begun", [LONG, SHARED + OTHER, PAIRS, ATTACKS["a comparison of long texts"].split("{% for")[0]]
)
def test_what_attacks_begin_with_is_not_what_is_refused(begun, fewer):
    """Control: the setup of an attack alone leaves most of its steps."""
    assert rendered(begun + "{% for i in range(9999) %}{% endfor %}") == ""


@pytest.mark.parametrize("name", ["nested loops", "shared lists, compared"])
def test_a_template_that_does_too_much_is_refused_at_the_real_limit(name):
    """The refusal comes within seconds and a gigabyte."""
    end = attack(rendered, ATTACKS[name])
    assert end.how == "refused", end
    assert "more text, than 2,000,000 and" in end.message
    assert "the chat template refuses a conversation" in end.message
    assert "MemoryError" not in end.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,  # Python allows 20 nested blocks
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{{ 1" + " + 1" * 20_000 + " }}",
        "{{ " + "[" * 500 + "]" * 500 + " }}",
        "{{ " + "9" * 5_000 + " }}",
        "x" * 2**21,
    ],
    ids=["loops", "brackets", "sums", "lists", "digits", "length"],
)
def test_a_template_that_cannot_be_compiled_is_refused(source):
    """The error is ours even if Jinja or Python fails on the compiled code."""
    end = attack(check_syntax, source)
    assert end.how == "refused", end
    assert "is not a chat template" in end.message


@pytest.mark.parametrize("text", [" ", "\n", "{", "{{", "{% ", "{#", "#}", "'"])
def test_a_long_template_is_read_in_time(text):
    """The regular expressions of Jinja's lexer run in linear time."""
    assert attack(lambda: _outcome(text * (2**20 // len(text)))).how == "returned"


def _outcome(source):
    try:
        return check_syntax(source)
    except DataError:
        return None


TEMPLATES = sorted(Path(__file__).parents[1].glob("rows/templates/*.jinja"))
MOST = 10_000
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_conversation_of_ten_thousand_messages_is_rendered(path):
    """Published templates render it."""
    source = path.read_text("utf-8")
    turns = [USER, {"role": "assistant", "content": "def f():\n    return 1\n" * 20}]
    text = render(source, turns * (MOST // 2), add_generation_prompt=False, **TOKENS)
    assert text.count("def f()") == 20 * MOST // 2


def test_copies_of_a_long_conversation_are_no_attack():
    """For each of so many messages a list may be sliced, and grow by one."""
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}"
        "{% set rest = messages[1:] %}{% set ns.seen = ns.seen + [m] %}{% endfor %}"
        "{{ ns.seen|length }}"
    )
    assert render(source, [USER] * MOST, add_generation_prompt=False) == str(MOST)


def test_one_long_message_is_rendered():
    """The text of a book is rendered in several passes."""
    text = "word " * 2_000_000
    source = "{{ (messages[0].content|trim + '\n').split('</think>')[-1].strip().lstrip('x') }}"
    assert render(source, [{"role": "user", "content": text}], add_generation_prompt=False) == (
        text.strip()
    )


def test_each_rendering_has_steps_of_its_own(fewer):
    """Exceeding the limit does not affect the next rendering."""
    with pytest.raises(DataError, match="does too much"):
        render("{{ 'x' * 99999999 }}", [USER], add_generation_prompt=False)
    assert render(CHATML, [USER], add_generation_prompt=False).endswith("<|im_end|>")
    looped = "{% for i in range(9999) %}{% endfor %}"
    for _ in range(30):
        assert render(looped, [USER], add_generation_prompt=False) == ""
    assert generated_spans(looped, [USER]) is None


SAME = [
    ("{{ '%5.2f|%-6s|%s' % (1.234, 'ab', [1, 'x']) }}", " 1.23|ab    |[1, 'x']"),
    ("{{ '%(a)03d%%' % {'a': 7} }}", "007%"),
    ("{{ '{:>5}{!r}{x[0]}'.format('ab', 'c', x=[4]) }}", "   ab'c'4"),
    ("{{ '{a}'.format_map({'a': 1}) }}", "1"),
    ("{{ '%s-%s'|format('a', 2) }}", "a-2"),
    ("{{ 2 ** 10 }}{{ 7 // 2 }}{{ -7 % 3 }}{{ 1 - 0.5 }}", "1024320.5"),
    ("{{ [1] + [2] * 2 + [] }}{{ 'a' + 'b' + 'c' }}{{ (1,) + (2,) }}", "[1, 2, 2]abc(1, 2)"),
    ("{{ 'a' ~ 1 ~ none ~ [2] }}{{ '-'.join(['a', 'b']|map('upper')) }}", "a1None[2]A-B"),
    ("{{ ('<b>'|e) + '<i>' }}{{ ('<b>'|e) * 2 }}", "&lt;b&gt;&lt;i&gt;&lt;b&gt;&lt;b&gt;"),
    (
        "{% for a in [1, 2, 3] if a > 1 %}{{ loop.index }}/{{ loop.length }}{% endfor %}",
        "1/22/2",
    ),
    ("{% for a in [[1], [2]] recursive %}{{ a }}{{ loop([]) }}{% endfor %}", "[1][2]"),
    (
        "{{ 'a b c d'|wordwrap(3) }}|{{ 'x\ny'|indent(2) }}|{{ 'x'|center(5) }}",
        "a b\nc d|x\n  y|  x  ",
    ),
    (
        "{{ [3, 1, 2]|sort|join(',') }}{{ [1, 1]|unique|list }}{{ [[1], [2]]|sum(start=[]) }}",
        "1,2,3[1][1, 2]",
    ),
    (
        "{{ [1, 2, 3]|batch(2, 0)|list }}{{ 'aXbX'|replace('X', '--', 1) }}",
        "[[1, 2], [3, 0]]a--bX",
    ),
    (
        "{{ 1 < 2 < 3 }}{{ 'a' in 'cat' }}{{ 1 in [1] }}{{ 'k' in {'k': 1} }}{{ [1] == [1] }}",
        "True" * 5,
    ),
    ("{{ {'a': 1, 2: 'b'}[2] }}{{ {(1, 2): 'p'}[(1, 2)] }}{{ 'abc'[::-1] }}", "bpcba"),
    ("{{ undefined_name }}{{ [1.5, none, true] }}{{ 2.5|round|int }}", "[1.5, None, True]2"),
    ("{% set t %}{{ 1 }}x{% endset %}{{ t }}{% filter upper %}a{% endfilter %}", "1xA"),
    ("{% autoescape true %}{{ '<' }}{{ '<' ~ '>' }}{% endautoescape %}", "&lt;&lt;&gt;"),
]


@pytest.mark.parametrize(("source", "text"), SAME)
def test_counting_changes_no_text(source, text):
    """Operators, filters and methods give the same as Jinja's own sandbox."""
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert plain.from_string(source).render() == text
    assert render(source, [USER], add_generation_prompt=False) == text
