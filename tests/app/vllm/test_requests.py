"""What of a request goes to vLLM, and what is refused before."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from headwater_server.errors import BadRequest
from headwater_server.lm.text_generate import GenerateRequest
from headwater_server.telemetry.catalogue import Route
from headwater_server.vllm.requests import MAX_SEQUENCES, from_generate, read_request
from tests.app.vllm.pictures import png_url

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
BODIES: dict[Route, dict[str, Any]] = {"chat": CHAT, "completions": TEXT}


def sent(route: Route, scope: str = "", **fields: Any) -> dict[str, Any]:
    """The body that vLLM gets, without what it always has."""
    found: dict[str, Any] = orjson.loads(read_request(route, {**BODIES[route], **fields}).encoded(scope))
    return {name: value for name, value in found.items() if name not in BODIES[route]}


def fault(route: Route, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_request(route, {**BODIES[route], **fields})
    return caught.value


@pytest.mark.parametrize(
    ("route", "name", "suggested"),
    [
        ("chat", "temprature", "`temperature`"),
        ("completions", "max_token", "`max_tokens`"),
        ("chat", "prompt_logprobs", ""),
        ("completions", "prompt_embeds", ""),
        ("chat", "kv_transfer_params", ""),
        ("chat", "chat_template", "`chat_template_kwargs`"),
        ("chat", "cache_salt", ""),
        ("chat", "priority", ""),
        ("completions", "return_token_ids", ""),
        ("chat", "mm_processor_kwargs", ""),
    ],
)
def test_an_unknown_field_is_named(route: Route, name: str, suggested: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_request(route, {**BODIES[route], name: "x"}, refuses_unknown=True)
    assert caught.value.field == name
    assert f"{name}: unknown field" in caught.value.message
    assert suggested in caught.value.message


def test_an_unknown_field_is_left_out_unless_the_answer_would_be_another() -> None:
    body = {**BODIES["chat"], "kv_transfer_params": {}, "verbosity": "low", "priority": 1, "x": None}
    request = read_request("chat", body)
    assert request.ignored == ("kv_transfer_params", "verbosity", "priority")
    assert request.body == read_request("chat", BODIES["chat"]).body
    assert "did you mean `temperature`?" in fault("chat", temprature=1).message
    for name in ("chat_template", "prompt_embeds", "input", "guided_whitespace_pattern", "thread"):
        assert fault("chat", **{name: "x"}).message.startswith(f"{name}: not supported here: ")


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    own = {"name": "own", "parameters": {"type": "object"}}
    chat = sent("chat", tools=[{"type": "function", "function": function} for function in ({"name": "bare"}, own)])
    assert [tool["function"] for tool in chat["tools"]] == [{"name": "bare", "parameters": none}, own]
    others = [{"type": "x"}, 1]
    assert sent("chat", tools=others)["tools"] == others


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "own"}}])
def test_tools_are_strict_where_a_tool_must_be_called(choice: Any) -> None:
    own = {"name": "own", "parameters": {"type": "object"}, "strict": False}
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": own}]}
    assert sent("chat", **fields, tool_choice=choice)["tools"][0]["function"] == {**own, "strict": True}
    for free in ("auto", "none", None):
        assert sent("chat", **fields, tool_choice=free)["tools"] == fields["tools"]


def test_known_fields_go_on_as_they_are() -> None:
    fields: dict[str, Any] = {
        "temperature": 0,
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "n": 2,
        "stop": ["a"],
    }
    assert sent("chat", **fields) == {**fields, "stream": False}


def test_null_is_no_value() -> None:
    assert sent("completions", n=None, stop=None, store=None, stream=None, stream_options=None, best_of=None) == {
        "stream": False
    }


def test_labels_are_taken_and_not_sent() -> None:
    labels: dict[str, Any] = {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"}
    assert sent("chat", **labels, modalities=["text"]) == {"stream": False}


@pytest.mark.parametrize(
    ("route", "fields", "word"),
    [
        ("chat", {"store": True}, "keeps no answers"),
        ("chat", {"functions": [{}]}, "not supported"),
        ("chat", {"audio": {"voice": "x"}}, "not supported"),
        ("chat", {"modalities": ["text", "audio"]}, '["text"]'),
        ("completions", {"best_of": 3}, "the same as n"),
        ("completions", {"n": 2, "best_of": 3}, "the same as n"),
        ("completions", {"n": 0}, "expected 1 to 128, got 0"),
        ("completions", {"n": 129}, "expected 1 to 128, got 129"),
        ("completions", {"n": True}, "got true"),
        ("completions", {"n": "2"}, "got '2'"),
        ("completions", {"stream": 1}, "true or false"),
        ("completions", {"timeout_s": 0}, "above 0"),
        ("completions", {"timeout_s": True}, "above 0"),
        ("completions", {"timeout_s": 1e9}, "above 0"),
        ("completions", {"stream_options": {"include_usage": True}}, "only with stream"),
        ("completions", {"stream": True, "stream_options": 1}, "expected an object"),
    ],
)
def test_what_is_not_offered_is_refused(route: Route, fields: dict[str, Any], word: str) -> None:
    error = fault(route, **fields)
    assert error.field == list(fields)[-1]
    assert word in error.message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"include_usages": True}, "include_usages"),
        ({"include_usage": 1}, "include_usage"),
        ({"include_obfuscation": True}, "include_obfuscation"),
    ],
)
def test_options_of_streams_are_checked(options: dict[str, Any], field: str) -> None:
    error = fault("chat", stream=True, stream_options=options)
    assert error.field == f"stream_options.{field}"


SCHEMA = {"type": "object"}
TAG = {"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<a"]}


@pytest.mark.parametrize("route", list(BODIES))
@pytest.mark.parametrize(
    ("fields", "outputs"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": "{}"}, {"json": "{}"}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "g"}, {"grammar": "g"}),
        ({"ebnf": "g", "guided_json": None}, {"grammar": "g"}),
        ({"grammar": "g"}, {"grammar": "g"}),
        ({"structural_tag": TAG}, {"structural_tag": orjson.dumps(TAG).decode()}),
    ],
)
def test_constraints_of_other_servers_are_sent_as_structured_outputs(
    route: Route, fields: dict[str, Any], outputs: dict[str, Any]
) -> None:
    body = sent(route, **fields)
    assert body["structured_outputs"] == outputs
    assert not set(body) & set(fields)


@pytest.mark.parametrize(
    ("form", "outputs"),
    [
        ({"type": "json_object", "schema": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "regex", "pattern": "a"}, {"regex": "a"}),
        ({"type": "grammar", "grammar": "g"}, {"grammar": "g"}),
    ],
)
def test_formats_that_vllm_does_not_have_are_structured_outputs(form: dict[str, Any], outputs: dict[str, Any]) -> None:
    for route in ("chat", "completions"):
        body = sent(route, response_format=form)
        assert (body.get("response_format"), body["structured_outputs"]) == (None, outputs)
    for own in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}):
        assert sent("chat", response_format=own, grammar="") == {"stream": False, "response_format": own}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": {}, "json_schema": {}}, "json_schema: expected it without guided_json; leave one of them out"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex: expected it without response_format"),
        ({"structured_outputs": {"regex": "a"}, "ebnf": "a"}, "ebnf: expected it without structured_outputs; leave"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern: not supported here"),
    ],
)
def test_constraints_that_cannot_be_together_are_refused(fields: dict[str, Any], message: str) -> None:
    assert fault("chat", **fields).message.startswith(message)


def test_streams_are_always_counted_and_the_clients_wish_is_kept() -> None:
    counted = {"include_usage": True, "continuous_usage_stats": True}
    alone = {"include_usage": False, "continuous_usage_stats": True}
    for options in (None, {}, {"include_usage": True}, counted, alone):
        read = read_request("chat", {**CHAT, "stream": True, "stream_options": options})
        assert orjson.loads(read.encoded(""))["stream_options"] == counted
        assert read.includes_usage == (options or {}).get("include_usage", False)
        assert read.counts_usage == (options in (counted, alone))


def test_several_prompts_with_several_answers_are_bounded() -> None:
    few = {"prompt": ["x"] * (MAX_SEQUENCES // 2), "n": 2}
    assert read_request("completions", {**TEXT, **few}).body["n"] == 2
    for prompt in (["x"] * (MAX_SEQUENCES + 1), [[1]] * (MAX_SEQUENCES + 1)):
        assert fault("completions", prompt=prompt).field == "prompt"
    assert fault("completions", prompt=["x"] * 3, n=128).field == "prompt"
    assert read_request("completions", {**TEXT, "prompt": [1] * 10_000, "n": 2})


DATA = png_url(2, 2)


@pytest.mark.parametrize(
    ("route", "where", "field"),
    [
        ("chat", {"type": "image_url", "image_url": {"url": "URL"}}, "messages[0].content[0].image_url.url"),
        ("chat", {"type": "image_url", "image_url": "URL"}, "messages[0].content[0].image_url"),
        (
            "chat",
            {"type": "image_url", "image_url": {"url": "URL", "detail": None}},
            "messages[0].content[0].image_url.url",
        ),
        ("chat", {"type": "file", "file": {"file_data": "URL"}}, "messages[0].content[0].file.file_data"),
    ],
)
def test_nothing_is_fetched(route: Route, where: Any, field: str) -> None:
    def told(url: str) -> dict[str, Any]:
        part = orjson.loads(orjson.dumps(where).replace(b"URL", url.encode()))
        return {"messages": [{"role": "user", "content": [part]}]}

    read_request(route, {**BODIES[route], **told(DATA)})
    for url in ("http://x/y.png", "file:///etc/passwd", "//x"):
        error = fault(route, **told(url))
        assert error.field == field
        assert "data: URL" in error.message


def test_what_a_body_can_have_can_be_sent() -> None:
    """Numbers beyond 64 bits, and deep nesting."""
    assert sent("chat", seed=2**70)["seed"] == 2**70
    deep: Any = []
    for _ in range(400):
        deep = [{"a": deep}]
    assert sent("chat", tools=deep)["tools"] == deep
    read = read_request("chat", {**CHAT, "messages": deep})
    assert b"[]" in read.encoded("")
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRequest, match="depth"):
        read_request("chat", {**CHAT, "tools": deep}).encoded("")
    while deep:  # Python would free it recursively
        deep = deep[0] if isinstance(deep, list) else deep["a"]


def test_prefixes_are_shared_within_a_key_only() -> None:
    one, two = sent("chat", scope="one")["cache_salt"], sent("chat", scope="two")["cache_salt"]
    assert one != two
    assert one == sent("chat", scope="one")["cache_salt"]
    assert "one" not in one
    assert "cache_salt" not in sent("chat")


def test_a_prompt_is_its_text_in_the_order_in_which_it_is_computed() -> None:
    chat = read_request("chat", {**CHAT, "tools": [{"a": 1}], "temperature": 0})
    assert chat.prompt == orjson.dumps([[{"a": 1}], CHAT["messages"]])


def generate(**fields: Any) -> dict[str, Any]:
    asked = GenerateRequest.read(orjson.dumps({"text_input": "x", **fields}))
    return from_generate("m", asked, streams=False).body


def test_a_request_of_the_generate_extension_is_one_for_completions() -> None:
    assert generate() == {"model": "m", "prompt": "x", "echo": False}
    found = generate(parameters={"max_tokens": 5, "temperature": 0.5, "stop": ["a"]})
    assert found == {"model": "m", "prompt": "x", "echo": False, "max_tokens": 5, "temperature": 0.5, "stop": ["a"]}
    assert generate(text_input=["x"])["prompt"] == "x"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"bad_words": "a"}, {"bad_words": ["a"]}),
        ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b"]}),
        ({"stop_words": ["a"]}, {"stop": ["a"]}),
        ({"random_seed": 3}, {"seed": 3}),
        ({"end_id": 7}, {"stop_token_ids": [7], "ignore_eos": True}),
        ({"end_id": -1}, {"stop_token_ids": [], "ignore_eos": True}),
        ({"exclude_input_in_output": False}, {"echo": True}),
        ({"exclude_input_in_output": True}, {"echo": False}),
        ({"min_length": 4}, {"min_tokens": 4}),
    ],
)
def test_names_of_tritons_backends_become_vllms(fields: dict[str, Any], told: dict[str, Any]) -> None:
    assert generate(**fields) == {"model": "m", "prompt": "x", "echo": False, **told}


def test_the_details_of_an_answer_are_not_for_vllm() -> None:
    with pytest.raises(BadRequest, match=r"^details: this model has no log probabilities; expected false"):
        generate(parameters={"details": True})


def test_tritons_timeout_is_in_microseconds() -> None:
    asked = GenerateRequest.read(orjson.dumps({"text_input": "x", "timeout": 2_500_000}))
    assert from_generate("m", asked, streams=True).timeout_s == 2.5
