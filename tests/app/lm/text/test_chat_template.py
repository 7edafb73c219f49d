"""Conversations rendered as transformers renders them, and within bounds."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwater_server.errors import BadRequest, ConfigError
from headwater_server.lm.text.chat_messages import checked_messages
from headwater_server.lm.text.chat_template import ChatTemplate
from headwater_server.lm.text.tokenizer import Tokenizer
from tests.app.lm.text.tokenizer_files import model_folder

pytestmark = pytest.mark.heavy
CHATML: Final = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3: Final = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL: Final = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
QWEN_3: Final = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- macro shown(text, kind='plain') -%}
    {{ text.split('</think>')[-1].lstrip('\\n') if '</think>' in text else text ~ '' }}
{%- endmacro %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is defined else '' %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if reasoning and loop.index0 > ns.last_query_index %}{{- '<think>' ~ reasoning ~ '</think>' }}{% endif %}
    {%- if message.role == 'assistant' %}
        {% generation %}{{ shown(message.content) }}{% endgeneration %}
    {%- else %}
        {{- shown(message.content) }}
    {%- endif %}
    {{- '<|im_end|>' }}{{ '' if loop.last else '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
STYLES: Final = {"chatml": CHATML, "llama_3": LLAMA_3, "mistral": MISTRAL, "qwen_3": QWEN_3}
NAMED: Final = {"bos_token": "<s>", "eos_token": "</s>"}

texts = st.text(st.sampled_from("ab <>|_é🙂\n{}%&'\"") | st.characters(exclude_categories=["Cs"]), max_size=12)
conversations = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": texts},
        optional={"reasoning_content": texts | st.none(), "name": st.none()},
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: model_folder(
            root / name,
            tokenizer_config={"tokenizer_class": "TokenizersBackend", "chat_template": template, **NAMED},
        )
        for name, template in STYLES.items()
    }


@pytest.fixture(scope="module")
def references(folders: Mapping[str, Path]) -> Mapping[str, Any]:
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}


def of_folder(folder: Path) -> ChatTemplate:
    tokenizer = Tokenizer(folder)
    return ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)


def one(source: str, **limits: Any) -> ChatTemplate:
    return ChatTemplate({"default": source}, NAMED, **limits)


HELLO: Final[Sequence[Mapping[str, Any]]] = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("style", STYLES)
def test_every_conversation_is_rendered_as_transformers_does(
    style: str, folders: Mapping[str, Path], references: Mapping[str, Any]
) -> None:
    from jinja2 import TemplateError

    template, reference = of_folder(folders[style]), references[style]

    @given(conversations, st.booleans(), st.none() | st.just([{"type": "function", "function": {"name": "<f>é"}}]))
    @settings(deadline=None)
    def check(messages: list[dict[str, Any]], prompt: bool, tools: list[dict[str, Any]] | None) -> None:
        options: dict[str, Any] = {"add_generation_prompt": prompt, "tools": tools}
        refusal, expected = "", ""
        try:
            expected = reference.apply_chat_template(messages, tokenize=False, enable_thinking=False, **options)
        except TemplateError as error:
            refusal = str(error)
            assume(all(message["role"] != "system" for message in messages[1:]))  # these are rendered otherwise
        with pytest.raises(BadRequest) if refusal else nullcontext() as caught:
            assert template.render(messages, variables={"enable_thinking": False}, **options) == expected
        assert caught is None or caught.value.message.endswith(refusal)

    check()


SYSTEM_FIRST = """{% for message in messages %}{% if message.role == "system" and not loop.first %}
{{- raise_exception("System message must be at the beginning.") }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}"""


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("system user system assistant", "system: 0|user: 1\n2|assistant: 3"),
        ("system system user", "system: 0\n1|user: 2"),
        ("user assistant developer user system system", "user: 0\n2|assistant: 1|user: 3\n4\n5"),
        ("system user assistant tool system", "system: 0|user: 1\n4|assistant: 2|tool: 3"),
        ("assistant system", "assistant: 0\n1"),
    ],
)
def test_a_later_system_message_that_the_template_refuses_joins_the_users_turn(roles: str, expected: str) -> None:
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles.split())]
    lines = "".join(f"{line}\n" for line in expected.split("|"))
    assert one(SYSTEM_FIRST).render(messages) == lines
    assert [message["content"] for message in messages] == [str(n) for n in range(len(messages))]


def test_a_later_system_message_stays_where_the_template_takes_it() -> None:
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "system")]
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    assert one(template).render(messages) == "system: x user: x system: x "


def test_numbers_are_written_as_the_model_wrote_them() -> None:
    text = '{"a": 123456789012345678901, "b": [1e9, 1.10, -0, 0.5], "c": 1E400, "d": 2.50, "e": "1e9"}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = checked_messages([{"role": "assistant", "content": None, "tool_calls": [call]}], 10)
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert one(template).render(messages) == text
    arguments = "messages[0].tool_calls[0].function.arguments"
    each = f"{{% for k, v in {arguments}.items() %}}{{{{ v | tojson if v is not string else v }}}} {{% endfor %}}"
    assert one(each).render(messages) == "123456789012345678901 [1e9, 1.10, -0, 0.5] 1E400 2.50 1e9 "
    assert one(f"{{{{ {arguments}.c }}}} {{{{ {arguments}.c is number }}}}").render(messages) == "1E400 True"


def test_what_the_template_refuses_is_a_bad_request_in_its_own_words() -> None:
    with pytest.raises(BadRequest) as caught:
        one(MISTRAL).render([*HELLO, *HELLO])
    assert caught.value.field == "messages"
    assert caught.value.message == (
        "messages: the model's chat template refuses the conversation: "
        "Conversation roles must alternate user/assistant/user/assistant/..."
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].none.at_all }}",
        "{{ messages[7]['content'] }}",
        "{{ 1 / (messages|length - 1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'other' %}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__init__.__globals__ }}",
    ],
)
def test_what_the_template_cannot_render_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest, match="messages: the model's chat template can't render the conversation: "):
        one(source).render(HELLO)


def test_functions_and_filters_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = (
        "{{ {'b': '<é>&', 'a': [1, none, true]} | tojson }}{{ [1] | tojson(indent=2) }}{{ strftime_now('%Y') }}"
        "{% for x in [1, 2, 3, 4] %}{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}{% endif %}"
        "{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}"
        "{% for x in [] %}{% else %}none{% endfor %}{% for k, v in {'a': 1} | items %}{{ k ~ v ~ nope }}{% endfor %}"
        "{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "  {% set x %}a{{ 1 }}b{% endset %}{{ x | upper }} {{ -3 * 2 + 2 ** 3 }}{{ 'ab' * 3 }}{{ [1] + [2] }}\n"
        "  {%- filter upper %} text {% endfilter %}{{ dict(a=1) }}{{ bos_token }}{{ none }}{{ missing }}"
        "{% for x in missing %}{% endfor %}{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}\n"
    )
    folder = model_folder(tmp_path, tokenizer_config={"tokenizer_class": "TokenizersBackend", **NAMED})
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template([dict(HELLO[0])], tokenize=False)
    assert of_folder(folder).render(HELLO, add_generation_prompt=False) == expected


def test_a_developers_message_is_a_systems_where_the_template_knows_no_developers() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert ChatTemplate({"default": "{{ messages[0].role }}"}, {}).render(message) == "system"
    knows = "{% if messages[0].role == 'developer' %}{{ messages[0].role }}{% endif %}"
    assert ChatTemplate({"default": knows}, {}).render(message) == "developer"


def test_a_template_for_tools_is_taken_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[]) == "with tools"


ENDLESS: Final = "{% for a in range(99999) %}{% for b in range(99999) %}{% BODY %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS.replace("{% BODY %}", ""),
        ENDLESS.replace("{% BODY %}", "{% set x = a %}"),
        ENDLESS.replace("{% BODY %}", "{{ '' }}"),
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
        "{% for x in [[[[[range(999)] * 99] * 99] * 99] * 99] recursive %}{{ loop(x) if x is iterable }}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_ended(source: str) -> None:
    with pytest.raises(BadRequest, match=r"messages: expected a conversation that renders within 0\.2 s"):
        one(source, max_seconds=0.2).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS.replace("{% BODY %}", "text"),
        "{% macro m() %}" + ENDLESS.replace("{% BODY %}", "text") + "{% endmacro %}{{ m() }}",
        "{% set x %}" + ENDLESS.replace("{% BODY %}", "{{ bos_token }}") + "{% endset %}",
        "{{ 'a' * 99999999999 }}",
        "{{ 99999999999 * [1] }}",
        "{{ 9 ** 99999999999 }}",
        "{% set ns = namespace(s='ab') %}{% for x in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for x in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for x in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_writes_without_end_is_ended(source: str) -> None:
    messages = [{"role": "user", "content": "a" * 1000}] * 100
    with pytest.raises(BadRequest, match="messages: expected a conversation of at most 1000000 characters"):
        one(source, max_characters=1_000_000).render(messages)


def test_one_rendering_takes_nothing_from_the_next() -> None:
    template = one("{{ messages[0].content }}", max_characters=1000)
    for _ in range(5):
        assert len(template.render([{"role": "user", "content": "a" * 999}])) == 999


class Content(str):
    """Text that can be referred to weakly."""


def test_nothing_is_kept_of_a_refused_conversation() -> None:
    def refuse() -> weakref.ref[Content]:
        content = Content("a" * 1001)
        with contextlib.suppress(BadRequest):
            one("{{ messages[0].content }}", max_characters=1000).render([{"role": "user", "content": content}])
        return weakref.ref(content)

    gc.disable()
    try:
        assert refuse()() is None
    finally:
        gc.enable()


def test_threads_share_a_template() -> None:
    template = one(CHATML, max_characters=40_000)
    barrier = threading.Barrier(4)

    def render(n: int) -> bool:
        barrier.wait(20)
        message = {"role": "user", "content": str(n) * 100}
        text = template.render([message] * 250)
        return text.count(f"\n{str(n) * 100}<|im_end|>") == 250

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(render, range(4), timeout=60))


def test_a_template_that_is_no_jinja_is_the_operators_error() -> None:
    with pytest.raises(ConfigError, match="chat template 'default', line 2: expected a Jinja template, got this: "):
        one("a\n{% if %}")


def test_a_model_without_a_default_template_is_the_operators_error() -> None:
    with pytest.raises(ConfigError, match="chat template: expected a template named 'default', got tool_use"):
        ChatTemplate({"tool_use": ""}, {})


@pytest.mark.parametrize(
    "expression",
    [
        "''.ljust(10 ** 10)", "''.rjust(10 ** 10)", "''.center(10 ** 10)", "''.zfill(10 ** 10)",
        "'\t'.expandtabs(10 ** 9)", "('a' * 10000).replace('', 'a' * 10000)", "('a' * 10000).replace('a', 'a' * 10000)",
        "('a' * 10000).join('a' * 10000)", "'{:>9999999999}'.format(1)", "'{:>{}}'.format(1, 10 ** 10)",
        "'%9999999999d' % 1", "'%*d' % (10 ** 10, 1)", "'%9999999999d'|format(1)", "'%*d'|format(10 ** 10, 1)",
        "'a'|center(10 ** 10)", "'a\nb'|indent(10 ** 10)", "('a' * 10000)|replace('a', 'a' * 10000)",
        "('a' * 10000)|join('a' * 10000)", "[[1]]|tojson(indent=10 ** 10)", "'a' * 10 ** 10", "[0] * 10 ** 10",
        "2 ** 1000000000", "'{:>{x[0]}}'.format(1, x=[10 ** 10])", "'{x:>9999999999}'.format_map({'x': 1})",
        "'{y:>{x}}'.format_map({'x': 10 ** 10, 'y': 1})", "[1]|batch(10 ** 10, 'x')|first", "[1]|slice(10 ** 10)|list",
        "('{0}' * 1000).format('a' * 100000)", "('%(a)s' * 1000) % {'a': 'a' * 100000}",
        "[['a' * 100000] * 1000]|tojson",
        "''.join(['a' * 100000] * 1000)", "(['a' * 100000] * 1000)|join", "(['a' * 100000] * 1000)|string",
        "([[0] * 100000] * 1000)|sum(start=[])", "('a ' * 10000)|wordwrap(1, true, 'b' * 10000)",
        "'' ~ ['a' * 100000] * 1000", "(['a' * 100000] * 1000)|pprint",
    ],
)  # fmt: skip
def test_a_single_call_of_a_hostile_template_takes_no_memory(expression: str) -> None:
    template = ChatTemplate({"default": "{{ (" + expression + ")|length }}"}, {})
    with pytest.raises(BadRequest, match="of at most 16777216 characters once rendered"):
        template.render([])


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__", "messages.__class__", "cycler.__init__.__globals__", "joiner.__init__.__globals__",
        "namespace.__init__.__globals__", "self.__init__", "self._TemplateReference__context",
        "raise_exception.__globals__", "strftime_now.__globals__", "dict.__class__", "''|attr('__class__')",
        "'{0.__class__.__mro__}'.format('')", "'{0.__class__}'.format_map({'0': ''})", "messages.append(1)",
        "messages.clear()", "(messages|map(attribute='__class__')|list)[0].__name__",
    ],
)  # fmt: skip
def test_a_hostile_template_reaches_nothing_beyond_its_values(expression: str) -> None:
    template = ChatTemplate({"default": "{{ " + expression + " }}"}, {})
    try:
        text = template.render([{"role": "user", "content": "x"}])
    except BadRequest:
        return
    assert text == ""
