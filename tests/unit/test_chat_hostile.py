"""Chat templates from strangers: no hang, no memory blow-up, no way to Python's internals."""

import time
import tracemalloc

import pytest

import a3b_engine.sandbox as sandbox
from a3b_engine.chat import ChatTemplate
from a3b_engine.errors import CheckpointError

MESSAGES = [{"role": "user", "content": "hello"}]

INTERNALS = [
    "{{ messages.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ range.__self__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ ''['__class__'] }}",
    "{{ messages | map(attribute='__class__') | join }}",
    "{{ messages | map('attr', '__class__') | join }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ ('{0.__class__}').format_map({'0': 1}) }}",
    "{{ ''.join.__self__ }}{{ ''.encode() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ (1).to_bytes(8, 'big') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ caller.__globals__ }}",
]
TOO_MUCH = [
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * 10000000000 }}",
    "{{ [0] * 10000000000 }}",
    "{{ 10000000000 * 'a' }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ 'a'.zfill(10000000000) }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ 'a' | indent(10000000000) }}",
    "{{ [1] | batch(10000000000, 'x') | list }}",
    "{{ messages | tojson(indent=10000000000) }}",
    "{{ 1.5 | round(10000000000, 'ceil') }}",
    "{{ range(10000000000) | list }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% for i in range(9) %}{{ m(n - 1) if n else 'x' }}{% endfor %}{% endmacro %}{{ m(30) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=('ab',)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aaaaaaaaaa') %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('a', 'aaaaaaaaaa') %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x.join(ns.x ~ 'bb') %}{% endfor %}",
    "{% set s = 'x' * 1000000 %}{{ range(100000) | map(attribute='nope', default=s) | join }}",
    "{% set s = 'x' * 1000000 %}{{ range(100000) | map(attribute='nope', default=s) | list }}",
    "{% set s = 'x' * 1000000 %}{% set t %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endset %}",
    "{% set s = 'x' * 1000000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.a = [ns, ns] %}{{ ns }}",
    "{% set a = namespace() %}{% set ns = namespace(x=a) %}{% for i in range(60) %}"
    "{% set n = namespace(x=[ns.x, ns.x]) %}{% set ns.x = n %}{% endfor %}{{ ns.x }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{{ varargs == varargs }}{% endif %}{% endmacro %}{{ m(60, 1) }}",
    "{% for i in range(3) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "{% set s = 'x' * 3000000 %}" + "{% if s[1:] == s[:-1] %}{% endif %}" * 800,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{{ " + "9" * 100000 + " }}",
]


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)


@pytest.mark.parametrize("source", INTERNALS, ids=range(len(INTERNALS)))
def test_internals_and_files_are_out_of_reach(source):
    """Either an error, or nothing (jinja2 prints an unknown name as nothing)."""
    before = [dict(message) for message in MESSAGES]
    try:
        text = ChatTemplate(source).render(MESSAGES, enable_thinking=False)
    except CheckpointError:
        text = ""
    assert text == ""
    assert MESSAGES == before


@pytest.mark.parametrize("source", TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_greedy_templates_end_soon_and_stay_small(source):
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with pytest.raises(CheckpointError):
            ChatTemplate(source).render(MESSAGES, enable_thinking=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begin < 8
    assert peak < 300 * 1024**2


def test_ordinary_template_language_still_works():
    source = (
        "{%- macro shout(t) -%}{{ t | upper }}!{%- endmacro -%}"
        "{%- set ns = namespace(n=0) -%}"
        "{%- for m in messages[::-1] if m.role in ['user', 'x'] -%}"
        "{%- set ns.n = ns.n + loop.length * 2 -%}{{ loop.index0 ~ ':' ~ m.content[1:3] }}{{ shout(m['content']) }}"
        "{%- if loop.last -%}{% break %}{%- endif -%}"
        "{%- endfor -%}"
        " {{ ns.n }} {{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}"
        " {{ {'k': [1, 'a\u4e00']} | tojson }} {{ 'a-b'.split('-')[-1] }} {{ messages | length }} {{ none is none }}"
        " {{ undefined_name is defined }}{{ undefined_name }} {{ (1, 2) | list }} {{ 7 % 4 + 2 * 3 - 1 // 1 }}"
        "{%- for key, value in {'p': 'q'} | items %} {{ key }}={{ value | replace('q', 'r') | string }}{% endfor -%}"
    )
    text = ChatTemplate(source).render(MESSAGES, enable_thinking=True)
    assert text == '0:elHELLO!2 hello {"k": [1, "a\u4e00"]} b 1 True False [1, 2] 8 p=r'


def test_limits_grow_with_an_honest_long_conversation():
    long = [{"role": "user", "content": "word " * 1_000_000}]
    text = ChatTemplate("{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}").render(
        long, enable_thinking=False
    )
    assert len(text) == 5_000_002


def test_templates_share_no_state_between_renders():
    template = ChatTemplate("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}")
    assert [template.render(MESSAGES, enable_thinking=False) for _ in range(3)] == ["1", "1", "1"]
