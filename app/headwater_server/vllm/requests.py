"""The request fields that clients may send to vLLM. Every field is listed here: vLLM would ignore others in silence.
(The route of ``/v1/embeddings`` has its own list.)

vLLM itself checks most values. Source: OpenAI's API reference, and vLLM 0.32 for the extensions.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import msgspec

from headwater.errors import did_you_mean
from headwater_server.codecs.faults import at, key_text, shown
from headwater_server.errors import BadRequest
from headwater_server.lm.answer_grammar import CONSTRAINTS, FORMAT_FIELDS
from headwater_server.lm.known_fields import MAX_IGNORED, check_ignorable, is_absent
from headwater_server.lm.text_generate import NO_DETAILS, GenerateRequest
from headwater_server.lm.tools import NO_PARAMETERS
from headwater_server.telemetry.catalogue import Route
from headwater_server.vllm.media_parts import Media

__all__ = ["PATHS", "VllmRequest", "fields_of", "from_generate", "read_request", "tokenize_request"]

PATHS: Final[dict[Route, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "tokenize": "/tokenize",
}
MAX_CHOICES: Final = 128
"""Maximum of ``n``."""
MAX_SEQUENCES: Final = 256
"""Maximum of prompts times choices."""
MAX_SECONDS: Final = 1_000_000
"""Maximum of ``timeout_s``."""

_SAMPLING: Final = {
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "logit_bias", "structured_outputs",
    "truncate_prompt_tokens", "max_tokens", "n", "logprobs", "response_format", "stream_options", *CONSTRAINTS,
}  # fmt: skip
_FIELDS: Final[dict[Route, set[str]]] = {
    "chat": _SAMPLING | {
        "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
        "chat_template_kwargs", "reasoning_effort", "include_reasoning", "add_generation_prompt",
        "continue_final_message",
    },
    "completions": _SAMPLING | {"prompt", "suffix", "echo"},
}  # fmt: skip
_LABELS: Final = {
    "client_metadata", "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "service_tier",
}  # fmt: skip
"""Fields that don't affect the answer: accepted, but not sent to vLLM."""
_REFUSED: Final = {
    "store": "this server keeps no answers",
    "background": "this server keeps no answers for later",
    "previous_response_id": "this server keeps no answers; send the conversation so far as `input`",
    "conversation": "this server keeps no answers; send the conversation so far as `input`",
    **dict.fromkeys(("audio", "function_call", "functions", "prediction", "web_search_options"), "not supported"),
}
"""Fields of OpenAI's API that must be absent, null, false or empty, each with the reason."""
_TOKENIZED: Final = (
    "model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "return_token_strs",
)  # fmt: skip
"""The fields of a request to tokenize messages."""
_STREAM_OPTIONS: Final = {"include_usage", "continuous_usage_stats", "include_obfuscation"}


class VllmRequest(NamedTuple):
    """A checked request for vLLM."""

    route: Route
    body: dict[str, Any]
    """The request's JSON, without the fields that `encoded` adds (such as ``stream``), and without fields that vLLM
    doesn't get (such as ``timeout_s``)."""
    streams: bool
    """Whether the answer is a stream."""
    includes_usage: bool = False
    """Whether the client asked for the token usage at the end of a stream."""
    counts_usage: bool = False
    """Whether the client asked for the token usage in every chunk."""
    timeout_s: float | None = None
    """Maximum duration of the whole request in seconds; None: no maximum."""
    ignored: tuple[str, ...] = ()
    """The client's fields without effect."""
    media: Media | None = None
    """The request's images, recordings and videos. Its `Media.links` must be fetched and put into the body before the
    request is sent."""

    def encoded(self, cache_scope: str) -> bytes:
        """The body that vLLM gets, in JSON. It asks vLLM to count the tokens in every event of a stream,
        whether or not the client asked for that.

        Args:
            cache_scope: scope of the prefix cache. Only requests with the same scope share cached prefixes; so do
                requests with an empty scope.

        Raises:
            BadRequest: the body is nested too deeply.
        """
        body: dict[str, Any] = dict(self.body)
        if self.route == "tokenize":  # it has no cache, and no streams
            cache_scope = ""
        elif self.route != "embeddings":
            body["stream"] = self.streams
        if self.streams:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if cache_scope:
            body["cache_salt"] = hashlib.sha256(cache_scope.encode()).hexdigest()
        try:
            return msgspec.json.encode(body)
        except RecursionError:
            raise BadRequest("expected a body of less depth") from None

    @property
    def model(self) -> str:
        """The name of the deployment, or of an adapter; empty if the body has no ``model``."""
        return str(self.body.get("model", ""))

    @property
    def prompt(self) -> bytes:
        """The parts of the prompt as JSON, in the order in which they are computed. `PrefixAffinity` compares requests
        by the prefixes of this text."""
        parts = [self.body.get(name) for name in ("tools", "messages", "prompt")]
        return msgspec.json.encode([part for part in parts if part is not None])


def fields_of(route: Route) -> list[str]:
    """The names of the fields that a body may have, sorted. ``store`` is in it, although it may only be false. Not for
    ``embeddings``."""
    more = {"completions": {"best_of"}, "chat": {"modalities"}}.get(route, set[str]())
    return sorted(_FIELDS[route] | _LABELS | more | {"model", "stream", "timeout_s", "store"})


def read_request(
    route: Route, body: dict[str, Any], *, refuses_unknown: bool = False, fetches: bool = False
) -> VllmRequest:
    """Check the fields of a request of chat or completions.

    Args:
        route: the route.
        body: the request.
        refuses_unknown: whether each unknown field is refused; else it is left out, as by
            `headwater_server.lm.known_fields.read_known`.
        fetches: whether images and the like may be named by URLs that must be fetched.

    Raises:
        BadRequest: a field is unknown and can't be left out, requests an unsupported feature, or has a wrong value
            that the gateway would otherwise use (`n`, `timeout_s`, `stream`, `stream_options`); or an image or the like
            can't be passed on (see `Media.read`); the message names the field.
    """
    allowed = _FIELDS[route]
    kept: dict[str, Any] = {}
    ignored: list[str] = []
    streams, timeout_s = False, None
    for name, value in body.items():
        if name in allowed or name == "model":
            if value is not None:
                kept[name] = value
        elif name == "stream":
            streams = _flag(name, value)
        elif name == "timeout_s":
            timeout_s = _seconds(value)
        elif name in _REFUSED:
            if value:
                raise at(name, None, f"expected it absent or false, since {_REFUSED[name]}, got {shown(value)}")
        elif name == "best_of" and route == "completions":
            if value is not None and value != (body.get("n") or 1):
                raise at(name, None, f"expected the same as n, since answers are not ranked, got {shown(value)}")
        elif name == "modalities" and route == "chat":
            if value not in (None, ["text"]):
                raise at(name, None, f'expected ["text"], got {shown(value)}')
        elif name == "verbosity" and route == "chat":
            ignored += [name] if value not in (None, "medium") else []
        elif name not in _LABELS and refuses_unknown:
            raise at(key_text(name), None, f"unknown field{did_you_mean(name, allowed)}")
        elif name not in _LABELS and not is_absent(name, value):
            check_ignorable(name, key_text(name), fields_of(route))
            ignored.append(key_text(name))
    _set_constraint(kept)
    if isinstance(kept.get("tools"), list):
        is_required = kept.get("tool_choice") not in (None, "auto", "none")
        kept["tools"] = [_completed(tool, is_required=is_required) for tool in kept["tools"]]
    options = kept.pop("stream_options", {})
    n = kept.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_CHOICES):
        raise at("n", None, f"expected 1 to {MAX_CHOICES}, got {shown(n)}")
    _check_prompts(kept.get("prompt"), n or 1)
    media = Media(fetches=fetches)
    if route == "chat" and "messages" in kept:
        kept["messages"] = media.read(kept["messages"])
    if not isinstance(options, dict):
        raise at("stream_options", None, f"expected an object, got {shown(options)}")
    for name in sorted(options.keys() - _STREAM_OPTIONS):
        path = f"stream_options.{key_text(name)}"
        if refuses_unknown:
            raise at(path, None, f"unknown field{did_you_mean(name, _STREAM_OPTIONS)}")
        if options[name] is not None:
            check_ignorable(name, path, _STREAM_OPTIONS)
            ignored.append(path)
    if any(options.get(name) for name in ("include_usage", "continuous_usage_stats")) and not streams:
        raise at("stream_options", None, "allowed only with stream: true; leave it out")
    includes = _flag("stream_options.include_usage", options.get("include_usage"))
    counts = _flag("stream_options.continuous_usage_stats", options.get("continuous_usage_stats"))
    if _flag("stream_options.include_obfuscation", options.get("include_obfuscation")):
        raise at("stream_options.include_obfuscation", None, "expected false, since streams aren't padded, got true")
    return VllmRequest(route, kept, streams, includes, counts, timeout_s, tuple(ignored[:MAX_IGNORED]), media)


def _set_constraint(fields: dict[str, Any]) -> None:
    """Replace other servers' fields that constrain the answer by vLLM's ``structured_outputs``, in place.

    Raises:
        BadRequest: more than one field constrains the answer.
    """
    others = {name: fields.pop(name) for name in CONSTRAINTS if name in fields}
    constraints = {CONSTRAINTS[name]: value for name, value in others.items() if (name, value) != ("grammar", "")}
    names = [name for name, value in others.items() if (name, value) != ("grammar", "")]
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        names.insert(0, "response_format")
        kinds = FORMAT_FIELDS.get(str(form["type"]), {})
        own = {kinds[name]: value for name, value in form.items() if value is not None and kinds.get(name)}
        if own:
            constraints |= own
            del fields["response_format"]
    if fields.get("structured_outputs"):
        names.insert(0, "structured_outputs")
    if len(names) > 1:
        raise at(names[1], None, f"expected it without {names[0]}; leave one of them out")
    if isinstance(tag := constraints.get("structural_tag"), dict):
        constraints["structural_tag"] = msgspec.json.encode(tag).decode()
    if constraints:
        fields["structured_outputs"] = constraints


def from_generate(model: str, request: GenerateRequest, *, streams: bool) -> VllmRequest:
    """Convert a request of Triton's generate extension into a request for completions.

    Args:
        model: the name of the deployment, or of an adapter.
        request: the request.
        streams: whether the answer is a stream.

    Raises:
        BadRequest: a parameter was given twice, or requests an unsupported feature (here also `details`).
    """
    parameters = request.merged()
    fields: dict[str, Any] = {name: getattr(parameters, name) for name in parameters.__struct_fields__}
    if parameters.details:
        raise at("details", None, NO_DETAILS)
    timeout_us, end_id = fields["timeout"], fields["end_id"]
    body = {name: value for name, value in fields.items() if name in _FIELDS["completions"] and value is not None}
    if isinstance(body.get("bad_words"), str):
        body["bad_words"] = [body["bad_words"]]
    if end_id is not None:
        ids = [*body.get("stop_token_ids", ()), *([end_id] if end_id >= 0 else ())]
        body |= {"stop_token_ids": ids, "ignore_eos": True}
    body |= {
        "model": model,
        "prompt": request.text_input if isinstance(request.text_input, str) else request.text_input[0],
        "echo": parameters.exclude_input_in_output is False,
    }
    return VllmRequest("completions", body, streams, timeout_s=timeout_us / 1e6 if timeout_us else None)


def tokenize_request(chat: dict[str, Any], media: Media | None = None) -> VllmRequest:
    """Convert the body of a chat request into a request for the tokens of its prompt. What is fetched of its `media` is
    put into both bodies."""
    body: dict[str, Any] = {name: chat[name] for name in _TOKENIZED if name in chat}
    if (effort := chat.get("reasoning_effort")) is not None:  # variables that vLLM sets for a chat request
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        body["chat_template_kwargs"] = variables | (chat.get("chat_template_kwargs") or {})
    return VllmRequest("tokenize", body, streams=False, media=media)


def _completed(tool: object, *, is_required: bool) -> object:
    """A tool of a chat request. Adds an empty parameter schema to a function that declares no parameters, and, where a
    tool must be called, ``strict``: without it vLLM holds a call to the function's name only."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    if not isinstance(function, dict) or "name" not in function:
        return tool
    parameters = {} if function.get("parameters") is not None else {"parameters": NO_PARAMETERS}
    return {**tool, "function": {**function, **parameters, **({"strict": True} if is_required else {})}}


def _check_prompts(prompt: object, n: int) -> None:
    """Refuse a request whose number of prompts times `n` exceeds `MAX_SEQUENCES`. A list of integers is a single prompt
    of token ids."""
    count = len(prompt) if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt) else 1
    if count * n > MAX_SEQUENCES:
        raise at("prompt", None, f"expected at most {MAX_SEQUENCES} answers in all, got {count} prompts x {n}")


def _flag(name: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise at(name, None, f"expected true or false, got {shown(value)}")


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECONDS:
        raise at("timeout_s", None, f"expected seconds, above 0 and up to {MAX_SECONDS}, got {shown(value)}")
    return float(value)
