"""What is asked: requests of every kind, each with what its answer must be."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.chaos.reply import Reply
from tests.services.chaotic import NOT_A_NUMBER, RAISE, WRONG_DTYPE

__all__ = [
    "DEADLINE_S",
    "PIECES",
    "PROMPTS",
    "Ask",
    "References",
    "make_ask",
    "reference_asks",
    "reference_text",
]

DEADLINE_S: Final = 10.0
"""``timeout_s`` of all deployments, and what requests to the language model ask for in all."""
WIDTH: Final = 4
PIECES: Final = 12
WIDE: Final = 20_000
"""Elements of a row whose stream is larger than the buffers of a connection to a slow reader."""
PROMPTS: Final = ("def ", "import os\n", "class Point:", "for i in range(", "return ", "if __name__")
TOKENS: Final = 16
MANY_TOKENS: Final = 300
WHATEVER: Final = frozenset({"unavailable", "timeout", "shed"})
"""Outcomes that any request may have while processes are killed."""

References = Mapping[tuple[str, str], str]
"""By route and prompt, what the language model answers while nothing is wrong."""
Check = Callable[[Reply], str]
"""Says what is wrong with an answer that is ok; empty: nothing."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    what: str
    """Its kind, for reports."""
    deployment: str
    route: str
    """As the metrics call it."""
    path: str
    body: bytes
    check: Check
    may: frozenset[str] = frozenset({"ok"})
    """Outcomes it may have besides `WHATEVER`."""
    headers: Mapping[str, str] | None = None
    is_counted: bool = True
    """Whether the metrics must have it; not, if it may be refused before its deployment is known."""

    @property
    def streams(self) -> bool:
        """Whether its answer comes in pieces."""
        return self.route == "generate_stream" or b'"stream":true' in self.body


def make_ask(chance: random.Random, references: References, deployments: Collection[str]) -> Ask:
    """One at random, to one of these deployments."""
    while True:
        ask = chance.choices(_KINDS, _WEIGHTS)[0](chance, references)
        if ask.deployment in deployments:
            return ask


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _values(chance: random.Random, rows: int) -> list[list[float]]:
    return [[float(chance.randrange(1, 1000)), 0.0, *(float(chance.randrange(1000)) for _ in range(2))]
            for _ in range(rows)]  # fmt: skip


def _infer_body(rows: Sequence[Sequence[float]], **more: Any) -> bytes:
    data = [value for row in rows for value in row]
    return _json({"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(rows), WIDTH], "data": data}], **more})


def _infer(
    what: str, deployment: str, rows: Sequence[Sequence[float]], check: Check, *outcomes: str, **more: Any
) -> Ask:
    may = frozenset(outcomes or ("ok",))
    return Ask(what, deployment, "infer", f"/v2/models/{deployment}/infer", _infer_body(rows, **more), check, may)


def _expect(wanted: Mapping[str, Sequence[float]], may_lack: str = "") -> Check:
    """That these outputs came, with these numbers; one may be left out."""

    def check(reply: Reply) -> str:
        found = {one["name"]: one["data"] for one in reply.json()["outputs"]}
        for name, values in wanted.items():
            if name == may_lack and name not in found:
                continue
            if found.get(name) != list(values):
                return f"{name}: expected {list(values)}, got {found.get(name)}"
        return f"expected no {set(found) - set(wanted)}" if set(found) - set(wanted) else ""

    return check


def _unchecked(reply: Reply) -> str:
    return ""


def _doubled(rows: Sequence[Sequence[float]], add: float = 0) -> list[float]:
    return [value * 2 + add for row in rows for value in row]


def _plain(chance: random.Random, references: References) -> Ask:
    rows = _values(chance, chance.choice((1, 1, 1, 2, 5)))
    return _infer("infer", "plain", rows, _expect({"y": _doubled(rows)}))


def _plain_generate(chance: random.Random, references: References) -> Ask:
    (row,) = _values(chance, 1)

    def check(reply: Reply) -> str:
        got = reply.json()["y"]
        return "" if got == _doubled([row]) else f"y: expected {_doubled([row])}, got {got}"

    return Ask("generate", "plain", "generate", "/v2/models/plain/generate", _json({"x": row}), check)


def _binary(chance: random.Random, references: References, is_poison: bool = False) -> Ask:
    rows = _values(chance, 1 if is_poison else chance.choice((1, 3)))
    if is_poison:
        rows[0][0] = NOT_A_NUMBER
    data = np.array(rows, "<f4")
    tensor = {"name": "x", "datatype": "FP32", "shape": list(data.shape)}
    head = _json(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": data.nbytes}}],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }
    )

    def check(reply: Reply) -> str:
        size = int(reply.headers["inference-header-content-length"])
        got = np.frombuffer(reply.body[size:], "<f4")
        wanted = np.full(WIDTH, np.nan, "<f4") if is_poison else (data * 2).ravel()
        return "" if np.array_equal(got, wanted, equal_nan=True) else f"y: expected {wanted}, got {got}"

    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    what = "NaN" if is_poison else "infer, binary"
    return Ask(what, "plain", "infer", "/v2/models/plain/infer", head + data.tobytes(), check, headers=headers)


def _not_a_number(chance: random.Random, references: References) -> Ask:
    return _binary(chance, references, is_poison=True)


def _poison(chance: random.Random, references: References) -> Ask:
    rows = _values(chance, 1)
    rows[0][0] = chance.choice((RAISE, WRONG_DTYPE))
    return _infer("poison", "plain", rows, _unchecked, "failed")


def _late(chance: random.Random, references: References) -> Ask:
    rows = _values(chance, 1)
    rows[0][1] = 0.3
    return _infer("deadline", "plain", rows, _unchecked, "timeout", parameters={"timeout": 100_000})


def _bad(chance: random.Random, references: References) -> Ask:
    rows = _values(chance, 1)
    sound = _infer_body(rows)
    path, route = "/v2/models/plain/infer", "infer"
    body, is_counted = chance.choice(
        (
            (sound[: len(sound) // 2], True),
            (sound.replace(b'"shape":[1,4]', b'"shape":[1,3]'), True),
            (sound.replace(b"FP32", b"FP33"), True),
            (b"\xff\xfe" + sound, True),
            (b"[]", True),
            (_json({"model": "tiny", "messages": "not a list"}), False),
        )
    )
    if not is_counted:
        path, route = "/v1/chat/completions", "chat"
    deployment = "plain" if is_counted else "tiny"
    may = frozenset({"client_error"})
    return Ask("bad body", deployment, route, path, body, _unchecked, may, is_counted=is_counted)


def _fused(chance: random.Random, references: References) -> Ask:
    rows = _values(chance, chance.choice((1, 2)))
    outputs = chance.choice((("ya",), ("yb",), ("ya", "yb")))
    wanted = dict.fromkeys(outputs, _doubled(rows, 1))
    return _infer("fused", "fused", rows, _expect(wanted), outputs=[{"name": name} for name in outputs])


def _graph(chance: random.Random, references: References) -> Ask:
    rows = _values(chance, chance.choice((1, 2)))
    outputs = chance.choice((("ya",), ("ya", "yb"), ("ya", "yb")))
    wanted = dict.fromkeys(outputs, _doubled(rows, 1))
    wishes = [{"name": name} for name in outputs]
    return _infer("graph", "graph", rows, _expect(wanted, may_lack="yb"), outputs=wishes)


def _heads(chance: random.Random, references: References) -> Ask:
    name = chance.choice(("fused", "graph"))
    (row,) = _values(chance, 1)

    def check(reply: Reply) -> str:
        *events, end = reply.events
        for event in events:
            got = event.get(f"y{event['head']}")
            if event["status"] == "ok" and got != _doubled([row], 1):
                return f"{event['head']}: expected {_doubled([row], 1)}, got {got}"
        told = {event["head"]: event["status"] for event in events}
        return "" if end.get("heads") == told and set(told) == {"a", "b"} else f"heads: got {told}, then {end}"

    return Ask("heads", name, "generate_stream", f"/v2/models/{name}/generate_stream", _json({"x": row}), check)


def _pieces(chance: random.Random, references: References) -> Ask:
    row = [float(chance.randrange(1000)) for _ in range(chance.choice((1, 3, 8)))]
    if chance.random() < 0.05:
        row *= WIDE // len(row)

    def check(reply: Reply) -> str:
        *events, end = reply.events
        if not end.get("final") or len(events) != PIECES:
            return f"expected {PIECES} pieces and an end, got {len(events)} and {str(end)[:100]}"
        for index, event in enumerate(events):
            got = event["piece"] if isinstance(event["piece"], list) else [event["piece"]]
            if got != [value + index for value in row]:
                return f"piece {index}: expected x + {index}, got {got[:8]}"
        return ""

    path = "/v2/models/pieces/generate_stream"
    return Ask("pieces", "pieces", "generate_stream", path, _json({"x": row}), check)


def _embeddings(chance: random.Random, references: References) -> Ask:
    texts = ["".join(chance.choices("abcdefgh", k=chance.randrange(1, 20))) for _ in range(chance.choice((1, 3)))]

    def check(reply: Reply) -> str:
        got = [one["embedding"] for one in reply.json()["data"]]
        wanted = [[len(text), sum(text.encode())] for text in texts]
        return "" if got == wanted else f"expected {wanted}, got {got}"

    body = _json({"model": "bytes", "input": texts})
    return Ask("embeddings", "bytes", "embeddings", "/v1/embeddings", body, check)


# The language model. Its routes differ in where the text is.


def _text(reply: Reply, route: str) -> str:
    parts = reply.events or [reply.json()]
    if route in ("generate", "generate_stream"):
        return "".join(part.get("text_output", "") for part in parts)
    choices = [choice for part in parts for choice in part.get("choices", ())]
    if route == "completions":
        return "".join(choice["text"] for choice in choices)
    return "".join(choice.get("delta", choice.get("message", {})).get("content") or "" for choice in choices)


def _language(route: str, prompt: str, references: References, *, streams: bool) -> Ask:
    if route in ("generate", "generate_stream"):
        path = f"/v2/models/tiny/{route}"
        content: dict[str, Any] = {"text_input": prompt, "timeout": int(DEADLINE_S * 1e6)}
    else:
        path = f"/v1/{'chat/' if route == 'chat' else ''}completions"
        said = {"messages": [{"role": "user", "content": prompt}]} if route == "chat" else {"prompt": prompt}
        content = {"model": "tiny", **said, "timeout_s": DEADLINE_S, **({"stream": True} if streams else {})}
    content |= {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

    def check(reply: Reply) -> str:
        if streams and route != "generate_stream" and not reply.is_done:
            return "the stream has no [DONE]"
        wanted = references[_like(route), prompt]
        got = _text(reply, route)
        return "" if got == wanted else f"expected {wanted!r}, got {got!r}"

    what = f"{route}, streamed" if streams and route != "generate_stream" else route
    return Ask(what, "tiny", route, path, _json(content), check)


def _like(route: str) -> str:
    """Routes that answer the same to the same prompt."""
    return "chat" if route == "chat" else "generate"


def _token_texts(chance: random.Random, references: References) -> Ask:
    route, streams = chance.choice(
        (
            ("generate", False), ("generate_stream", True), ("completions", False), ("completions", True),
            ("chat", False), ("chat", True),
        )
    )  # fmt: skip
    return _language(route, chance.choice(PROMPTS), references, streams=streams)


def _cancelled(chance: random.Random, references: References) -> Ask:
    """A stream that is cancelled by its id when its first event is there."""
    content = {"text_input": chance.choice(PROMPTS), "max_tokens": MANY_TOKENS, "ignore_eos": True}
    content["timeout"] = int(DEADLINE_S * 1e6)
    headers = {"X-Request-Id": f"chaos-{chance.getrandbits(64):x}"}
    may = frozenset({"ok", "cancelled"})
    path = "/v2/models/tiny/generate_stream"
    return Ask("cancelled by id", "tiny", "generate_stream", path, _json(content), _unchecked, may, headers)


def reference_asks() -> dict[tuple[str, str], Ask]:
    """Requests whose answers are the `References`."""
    return {
        (route, prompt): _language(route, prompt, {}, streams=False)
        for route in ("generate", "chat")
        for prompt in PROMPTS
    }


def reference_text(route: str, reply: Reply) -> str:
    """The text of the answer to one of `reference_asks`."""
    return _text(reply, route)


_KINDS: Final = (
    _plain, _plain_generate, _binary, _not_a_number, _poison, _late, _bad, _fused, _graph, _heads, _pieces,
    _embeddings, _token_texts, _cancelled,
)  # fmt: skip
_WEIGHTS: Final = (20, 6, 10, 3, 5, 2, 5, 10, 10, 6, 6, 5, 10, 2)
assert len(_KINDS) == len(_WEIGHTS)
assert math.isclose(sum(_WEIGHTS), 100)
