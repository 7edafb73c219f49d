"""What a kept answer costs in comparison to a computed one, and what keeping answers costs those that are computed.

``python -m benchmarks.answer_cache [--blocks N] [--requests N] [--json FILE] [--smoke]``. The server is Headwater with
one gateway worker; one client asks, one request at a time, over one connection.

- **hit / miss**: the demo's ``text`` with ``cache``: a block of texts that are new, and the same texts again;
- **features**: the demo's ``text`` with ``cache`` on its trunk: new texts for the head ``topic``, then the same ones
  for ``sentiment``, whose features are there; and new ones for ``sentiment``;
- **miss / none**: ``scale``, whose callable costs nothing, with ``cache`` and without: blocks of new inputs, in turns.

Every answer is checked: its header, and that the second answer to a text is the first one. What is wrong ends the
benchmark with status 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.fanout_report import Ratio, Spread, ratio_line
from benchmarks.fanout_servers import headwater
from benchmarks.smoke import parse_with_smoke

HIT_AT_MOST: Final = 0.4
KINDS: Final = ("hit", "miss", "features kept", "features new", "scale miss", "scale none")
DEMO: Final = Path(__file__).parents[1] / "configs" / "demo.yaml"
CACHE: Final = {"max_bytes": "64MiB"}
SCALE: Final = {"model": "headwater.zoo.scale:Scale", "threads": 1, "device": "cpu"}


class Client:
    """One connection that is kept.

    Args:
        url: the server's.
    """

    def __init__(self, url: str) -> None:
        self._http = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)

    def ask(
        self, model: str, tensor: dict[str, Any], expected: str | None, head: str | None = None
    ) -> tuple[float, list[Any]]:
        """One request with one input, for all heads or one. Returns the milliseconds until its answer, and the outputs;
        the header must say what is expected."""
        wanted = {} if head is None else {"parameters": {"heads": head}}
        body = json.dumps({"inputs": [tensor], **wanted}).encode()
        began_s = time.perf_counter()
        self._http.request("POST", f"/v2/models/{model}/infer", body, {"Content-Type": "application/json"})
        answer = self._http.getresponse()
        raw = answer.read()
        took_ms = (time.perf_counter() - began_s) * 1e3
        got = answer.headers["Headwater-Cache"]
        if answer.status != 200 or got != expected:
            raise SystemExit(f"{model}: expected 200 and Headwater-Cache {expected}, got {answer.status} and {got}")
        return took_ms, json.loads(raw)["outputs"]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="What a kept answer costs, and what keeping answers costs others.")
    parser.add_argument("--blocks", type=int, default=10, help="of each kind")
    parser.add_argument("--requests", type=int, default=300, help="in each block")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    options = parse_with_smoke(parser, blocks=1, requests=20)
    if min(options.blocks, options.requests) < 1:
        parser.error("--blocks and --requests: expected at least 1")
    text = yaml.safe_load(DEMO.read_text())["deployments"]["text"]
    trunk = {**text["pipeline"]["trunk"], "cache": CACHE}
    features = {**text, "pipeline": {**text["pipeline"], "trunk": trunk}}
    deployments = {
        "text": {**text, "cache": CACHE},
        "features": features,
        "kept": {**SCALE, "cache": CACHE},
        "plain": SCALE,
    }
    try:
        with headwater(deployments) as server:
            raw = _measure(Client(server.url), options.blocks, options.requests)
    except RuntimeError as error:  # it didn't start
        raise SystemExit(str(error)) from None
    if options.json is not None:
        options.json.write_text(json.dumps({"python": platform.python_version(), **raw}, indent=1))


def _measure(client: Client, blocks: int, requests: int) -> dict[str, list[float]]:
    p50: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for block in range(blocks + 1):  # the first one warms up
        found: dict[str, list[float]] = {kind: [] for kind in p50}
        sentences = [f"In week {n} of year {block}, the team won." for n in range(requests)]
        texts = [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [one]} for one in sentences]
        first = [client.ask("text", text, "miss") for text in texts]
        second = [client.ask("text", text, "hit") for text in texts]
        if [outputs for _, outputs in first] != [outputs for _, outputs in second]:
            raise SystemExit("text: expected the first answer again, got another one")
        found["miss"], found["hit"] = ([took_ms for took_ms, _ in asked] for asked in (first, second))
        new = [{**text, "data": [one.replace("won", "lost")]} for text, one in zip(texts, sentences, strict=True)]
        for text in texts:
            client.ask("features", text, None, "topic")
        for kind, asked in (("features kept", texts), ("features new", new)):
            answers = [client.ask("features", text, None, "sentiment") for text in asked]
            found[kind] = [took_ms for took_ms, _ in answers]
            if kind == "features kept" and not all(map(_alike, first, answers)):
                raise SystemExit("features: expected the same sentiments, got others")
        for n in range(requests):
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [block, n, 1, 2]}
            for kind, model, expected in (("scale miss", "kept", "miss"), ("scale none", "plain", None)):
                took_ms, outputs = client.ask(model, tensor, expected)
                if outputs[0]["data"] != [2 * block, 2 * n, 2, 4]:
                    raise SystemExit(f"{model}: expected each value doubled, got {outputs}")
                found[kind].append(took_ms)
        if block:
            for kind, values in found.items():
                p50[kind].append(statistics.median(values))
    for kind, values in p50.items():
        spread = Spread.of(values)
        print(f"p50 of {kind:<13} {spread.median:.2f} ms ({spread.least:.2f} to {spread.most:.2f})")
    for name, over, under, goal in (
        ("text: hit / miss", "hit", "miss", HIT_AT_MOST),
        ("features: kept / new", "features kept", "features new", None),
        ("scale: miss / no cache", "scale miss", "scale none", None),
    ):
        print(ratio_line(Ratio(name, [a / b for a, b in zip(p50[over], p50[under], strict=True)], goal)))
    return p50


def _alike(whole: tuple[float, list[Any]], one: tuple[float, list[Any]]) -> bool:
    """Whether a head's outputs are among those of all heads, but for what rounds differently."""
    outputs = {output["name"]: output["data"] for output in whole[1]}
    return all(
        len(output["data"]) == len(outputs[output["name"]])
        and all(
            math.isclose(a, b, abs_tol=1e-5) if isinstance(a, float) else a == b
            for a, b in zip(output["data"], outputs[output["name"]], strict=True)
        )
        for output in one[1]
    )


if __name__ == "__main__":
    main()
