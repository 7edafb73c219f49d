"""Requests and answers of Triton's generate extension for a language model.

The field names come from Triton's backends for vLLM and TensorRT-LLM; `details` comes from the Open Inference Protocol
(`generate_rest.yaml`). No chat template is applied to the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
import orjson
from msgspec import Meta

from headwater.engine import EngineLimits, Sampling, Seed
from headwater_server.codecs.faults import at, read_json, shown
from headwater_server.codecs.parameters import MAX_UINT64, RequestId, integer
from headwater_server.errors import BadRequest, HeadwaterError
from headwater_server.lm.answer_grammar import checked_grammar
from headwater_server.lm.openai_answer import AnswerForm, shown_logprob
from headwater_server.lm.sampling_fields import DEFAULT_TOKENS, Flag, SamplingFields, TextEnd
from headwater_server.lm.text_plan import Prompt, TextPlan, answer_tokens, plan, text_ids
from headwater_server.lm.text_stream import TextPiece, TokenLogprob, Usage

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["NO_DETAILS", "GenerateAnswer", "GenerateRequest"]


class GenerateAnswer(AnswerForm):
    """The answer to a `GenerateRequest`: whole, or as events of a stream.

    Args:
        model: the model's name.
        id: the request's id from the client; empty without an id.
        version: the model's version.
        in_one_event: whether a stream sends the whole text in a single event.
    """

    def __init__(self, model: str, id: str = "", version: str = "1", *, in_one_event: bool = False) -> None:
        about = {"model_name": model, "model_version": version, **({"id": id} if id else {})}
        self.texts: TokenTexts | None = None
        """The texts of the tokenizer's ids, which the caller sets if the answer has `details`; otherwise None. Pieces
        must then have log probabilities."""
        self._head = orjson.dumps(about)[:-1]
        self._text_head = self._head + b',"text_output":'
        self._finish: str | None = None
        self._stop: str | None = None
        self._tokens: list[TokenLogprob] = []
        self._held: list[str] | None = [] if in_one_event else None

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        (text,) = texts
        parameters = orjson.dumps(_facts(text.finish, usage))
        self._note(text)
        return b'%b%b,"parameters":%b%b}' % (self._text_head, orjson.dumps(text.text), parameters, self._details())

    def piece(self, place: int, piece: TextPiece) -> list[bytes]:
        self._note(piece)
        if self._held is not None:
            self._held.append(piece.text)
            return []
        return [self._event(piece.text)] if piece.text else []

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        before = [] if error is None else [orjson.dumps({"error": error.message, "status": error.status})]
        if self._held is not None and error is None:
            before = [self._event("".join(self._held))]
        facts = orjson.dumps(_facts(self._finish if error is None else "error", usage))
        details = b"" if error is not None else self._details(is_stream=True)
        return [*before, b'%b"","final":true,%b%b}' % (self._text_head, facts[1:-1], details)]

    def _note(self, piece: TextPiece) -> None:
        """Note the values of a piece that `details` contains."""
        self._finish, self._stop = piece.finish, piece.stop
        if self.texts is not None:
            self._tokens += piece.logprobs

    def _details(self, *, is_stream: bool = False) -> bytes:
        """The JSON of the field `details`, after a comma; empty if the answer has no `details`. In a stream, the field
        also has the last token separately."""
        if self.texts is None:
            return b""
        tokens = [_token(entry, self.texts) for entry in self._tokens]
        reason = "length" if self._finish == "length" else "eos_token" if self._stop is None else "stop_sequence"
        last = {"token": tokens[-1]} if is_stream and tokens else {}
        return b',"details":%b' % orjson.dumps({"finish_reason": reason, **last, "logprobs": tokens})

    def _event(self, text: str) -> bytes:
        return b"%b%b}" % (self._text_head, orjson.dumps(text))


def _token(entry: TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    """A token in the protocol's form."""
    text, _ = texts.shown(entry.token)
    is_special = entry.token in texts.special_ids
    return {"id": entry.token, "text": text, "logprob": shown_logprob(entry.logprob), "special": is_special}


def _facts(finish: str | None, usage: Usage) -> dict[str, Any]:
    tokens = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    return {"finish_reason": finish, **tokens}


_MAX_JSON: Final = 65_536
_BANNED: Final = -100.0
"""The bias of a token that must not be generated, as in OpenAI's API."""
_NO_EFFECT: Final = "Without effect"
NO_DETAILS: Final = "this model has no log probabilities; expected false, got true; leave it out"

_Word: TypeAlias = Annotated[str, Meta(max_length=1024)]
_Words: TypeAlias = Annotated[list[_Word], Meta(max_length=16, extra={"expected": "at most 16 words"})]
_OneText: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=1, extra={"expected": "one text"})]
_EndId: TypeAlias = Annotated[int, Meta(ge=-1)]


class BackendSampling(SamplingFields, kw_only=True):
    """Fields that Triton's backends for vLLM and TensorRT-LLM add, or name differently.

    A field of a feature that is unsupported, or that every answer has, accepts only the value that doesn't request the
    feature, since clients send their defaults.
    """

    random_seed: Annotated[Seed | None, Meta(description="Another name of `seed`")] = None
    bad_words: Annotated[_Word | _Words | None, Meta(description="Words that are not generated, each of one token")] = (
        None
    )
    stop_words: Annotated[_Word | _Words | None, Meta(description="Another name of `stop`; may be empty")] = None
    end_id: Annotated[_EndId | None, Meta(description="The only token that ends the text; -1: no token ends it")] = None
    pad_id: Annotated[int | None, Meta(description=_NO_EFFECT)] = None
    length_penalty: Annotated[float | None, Meta(description=_NO_EFFECT)] = None
    early_stopping: Annotated[bool | None, Meta(description=_NO_EFFECT)] = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    beam_width: Literal[1] | None = None
    num_return_sequences: Literal[1] | None = None
    min_length: Annotated[int, Meta(ge=0)] | None = None
    use_beam_search: Flag | None = None
    details: (
        Annotated[Flag, Meta(description="The answer says why it ended, and each token with its log probability")]
        | None
    ) = None
    return_log_probs: Flag | None = None
    return_logprobs: Flag | None = None
    return_cumulative_logprob: Flag | None = None
    return_context_logits: Flag | None = None
    return_generation_logits: Flag | None = None
    return_finish_reason: Flag | None = None
    return_num_input_tokens: Flag | None = None
    return_num_output_tokens: Flag | None = None


_UNSUPPORTED: Final = (
    "use_beam_search", "return_log_probs", "return_logprobs", "return_cumulative_logprob",
    "return_context_logits", "return_generation_logits",
)  # fmt: skip
_FACTS: Final = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "prompt_tokens",
    "return_num_output_tokens": "completion_tokens",
}
_OTHER_NAMES: Final = {"min_length": "min_tokens", "random_seed": "seed", "stop_words": "stop"}


class GenerateParameters(BackendSampling, kw_only=True):
    """The parameters of a request."""

    timeout: (
        Annotated[int, Meta(description="Deadline of this request in microseconds", extra_json_schema={"minimum": 0})]
        | None
    ) = None
    stream: Annotated[
        bool | None,
        Meta(description="`false`: generate_stream sends the whole text in one event; `true`: not to generate"),
    ] = None
    exclude_input_in_output: Annotated[
        bool | None, Meta(description="`false`: the text begins with the input", extra_json_schema={"default": True})
    ] = None
    sampling_parameters: Annotated[
        Annotated[str, Meta(max_length=_MAX_JSON)] | None,
        Meta(description="Further parameters, as JSON text; its numbers may be strings"),
    ] = None


class GenerateRequest(GenerateParameters, kw_only=True):
    """The body of a request. The parameters may also be given at the top level, next to the text."""

    text_input: str | _OneText
    id: RequestId | None = None
    parameters: GenerateParameters | None = None

    def answer_form(self, model: str, version: str = "1", *, streams: bool) -> GenerateAnswer:
        """The form of the answer, still without `GenerateAnswer.texts`.

        Args:
            model: the model's name.
            version: the model's version.
            streams: whether the route answers with a stream of events.

        Raises:
            BadRequest: the request asks for a stream on a route that doesn't stream.
        """
        field, is_stream = "stream", self.stream
        if is_stream is None and self.parameters is not None:
            field, is_stream = "parameters.stream", self.parameters.stream
        if is_stream and not streams:
            fix = f"POST to /v2/models/{model}/generate_stream"
            raise at(field, None, f"expected false, since generate answers with the whole text, got true; {fix}")
        return GenerateAnswer(model, self.id or "", version, in_one_event=is_stream is False)

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and convert it into tokens. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, or exceeds a limit of the model.
        """
        parameters, places = self._places()
        prompt = self.text_input if isinstance(self.text_input, str) else self.text_input[0]
        try:
            sampling, end = _sampling(parameters, text, limits), _text_end(parameters, limits)
            grammar = checked_grammar(None, parameters.structured_outputs, limits)
            timeout_us = integer("timeout", None, parameters.timeout or 0, MAX_UINT64)
            ids = text_ids("text_input", prompt, partial(text.encode_text, field="text_input"), limits)
            max_tokens = answer_tokens("text_input", "max_tokens", ids, parameters.max_tokens, DEFAULT_TOKENS, limits)
            timeout_s = timeout_us / 1e6 if timeout_us else None
            prefix = prompt if parameters.exclude_input_in_output is False else ""
            return plan([Prompt(ids, max_tokens, prefix)], 1, sampling, end, limits, timeout_s, grammar)
        except BadRequest as error:
            place = "" if error.field is None else places.get(re.split(r"[.\[]", error.field)[0], "")
            if place:
                raise BadRequest(f"{place}{error.message}", field=f"{place}{error.field}") from None
            raise

    def merged(self) -> GenerateParameters:
        """The parameters under their canonical names, wherever in the request they were given.

        Raises:
            BadRequest: a parameter was given twice, or requests an unsupported feature.
        """
        return self._places()[0]

    def _places(self) -> tuple[GenerateParameters, dict[str, str]]:
        """The parameters under their canonical names, and for each name where it was given: an empty string for the top
        level, or a path that ends with a dot."""
        values: dict[str, Any] = {}
        places: dict[str, str] = {}

        def take(fields: SamplingFields, place: str) -> None:
            for name in fields.__struct_fields__:
                value = getattr(fields, name)
                key = _OTHER_NAMES.get(name, name)
                if name == "stop_words":
                    value = [word for word in _listed(value) if word] or None
                if value is None or name not in GenerateParameters.__struct_fields__:
                    continue
                if key in values:
                    raise at(f"{place}{name}", None, f"expected it once, got {places[key]}{key} as well")
                _check_asks_for_nothing(place, name, value)
                values[key], places[key] = value, place

        take(self, "")
        if self.parameters is not None:
            take(self.parameters, "parameters.")
        if "sampling_parameters" in values:
            path = f"{places['sampling_parameters']}sampling_parameters"
            text = values["sampling_parameters"].encode(errors="surrogatepass")
            take(read_json(text, BackendSampling, path, strict=False), f"{path}.")
        return GenerateParameters(**values), places


def _check_asks_for_nothing(place: str, name: str, value: object) -> None:
    if value is True and name in _UNSUPPORTED:
        raise at(f"{place}{name}", None, "this model does not support it; expected false, got true; leave it out")
    if value is True and name in _FACTS:
        had = f"the parameters of every answer have {_FACTS[name]}"
        raise at(f"{place}{name}", None, f"expected false, since {had}, got true; leave it out")


def _listed(words: str | list[str] | None) -> list[str]:
    return [words] if isinstance(words, str) else words or []


def _sampling(parameters: GenerateParameters, text: LanguageText, limits: EngineLimits) -> Sampling:
    """How tokens are chosen. Forbidden words get a bias, both without and, if this is one token, with a space before.

    Raises:
        BadRequest: a field is wrong or not supported, or a forbidden word is not one token.
    """
    if parameters.details and "logprobs" not in limits.sampling:
        raise at("details", None, NO_DETAILS)
    sampling = parameters.sampling(limits, text.sampling, logprobs=0 if parameters.details else None)
    banned: dict[int, float] = {}
    for place, word in enumerate(_listed(parameters.bad_words)):
        if not word:
            continue
        field = "bad_words" if isinstance(parameters.bad_words, str) else f"bad_words[{place}]"
        if "logit_bias" not in limits.sampling:
            raise at(field, None, "this model does not support it; leave it out")
        ids = text.tokenizer.encode(word, add_special_tokens=False, field=field)
        if len(ids) != 1:
            raise at(field, None, f"expected a word that is one token, got {shown(word)}, which is {len(ids)}")
        behind_space = text.tokenizer.encode(f" {word}", add_special_tokens=False, field=field)
        banned |= dict.fromkeys(ids + (behind_space if len(behind_space) == 1 else []), _BANNED)
    return msgspec.structs.replace(sampling, logit_bias={**sampling.logit_bias, **banned}) if banned else sampling


def _text_end(parameters: GenerateParameters, limits: EngineLimits) -> TextEnd:
    end = parameters.text_end(limits)
    if parameters.end_id is None:
        return end
    if parameters.end_id >= limits.vocab_size:
        raise at("end_id", None, f"expected a token id up to {limits.vocab_size - 1}, or -1, got {parameters.end_id}")
    return end._replace(stop_ids=end.stop_ids | ({parameters.end_id} - {-1}), ignore_eos=True)
