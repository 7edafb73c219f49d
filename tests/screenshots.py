"""Takes the pictures of the status page that are in ``docs/images``: ``python -m tests.screenshots``.

Starts the demo, asks it things for a minute, so that the charts have something to show, and looks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import yaml

from tests.browser import Page, open_browser
from tests.running import serve

REPOSITORY = Path(__file__).parents[1]
ROWS = 8


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server that runs; default: one is started")
    parser.add_argument("--seconds", type=float, default=60, help="how long to ask it things")
    parser.add_argument("--into", type=Path, default=REPOSITORY / "docs" / "images")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        url = arguments.url
        if url is None:
            config = yaml.safe_load((REPOSITORY / "configs" / "demo.yaml").read_text())
            url = stack.enter_context(serve(config)).url
        browser = stack.enter_context(open_browser())
        with browser.page(1080, 860) as page, asked(url):
            page.open(f"{url}/")
            time.sleep(arguments.seconds)
            save(page, arguments.into / "status.png")
        with browser.page(1080, 800) as page:
            page.open(f"{url}/#/playground/digits")
            draw_a_three(page)
            save(page, arguments.into / "digits.png")
            page.open(f"{url}/#/playground/tiny-lm")
            page.find("#panel[data-model=tiny-lm] textarea")
            page.click("#panel button.main")
            page.wait("document.body.innerText.includes('Done: ')")
            page.value("document.activeElement.blur()")
            save(page, arguments.into / "language-model.png")
        with browser.page(360, 720) as page:
            page.resize(360, 720, 1.5)
            page.prefer("dark")
            page.open(f"{url}/#/playground/text")
            page.find("#panel[data-model=text] textarea")
            page.click("#panel button.main")
            page.find(".answer [data-output=topic] .word")
            page.value("document.activeElement.blur()")
            page.value("document.querySelector('[data-head=sentiment]').scrollIntoView()")
            save(page, arguments.into / "phone-dark.png")


def save(page: Page, path: Path) -> None:
    """Take a picture."""
    path.write_bytes(page.picture())
    print(path, f"{path.stat().st_size / 1000:.0f} kB")


def draw_a_three(page: Page) -> None:
    """With the mouse, and wait until the whole of it is answered."""
    left, top, width, height = page.place(".pad canvas")
    upper = [(0.48 + 0.2 * math.cos(a), 0.31 + 0.2 * math.sin(a)) for a in (-2.6 + i * 4.1 / 20 for i in range(21))]
    lower = [(0.47 + 0.24 * math.cos(a), 0.7 + 0.2 * math.sin(a)) for a in (-1.5 + i * 4.2 / 20 for i in range(21))]
    page.stroke([(left + width * x, top + height * y) for x, y in [*upper, *lower]])
    page.wait("document.querySelector('[aria-busy]').getAttribute('aria-busy') === 'false'")


@contextlib.contextmanager
def asked(url: str) -> Iterator[None]:
    """Have clients of several kinds ask things, more and less, while the block runs."""
    stop = threading.Event()
    threads = [threading.Thread(target=client, args=(url, kind, stop)) for kind in ("digits", "digits", "text", "lm")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def client(url: str, kind: str, stop: threading.Event) -> None:
    """Ask until told to stop, in waves."""
    numbers = random.Random(kind)
    with httpx.Client(timeout=60, trust_env=False, base_url=url) as one:
        begun = time.monotonic()
        while not stop.is_set():
            if kind == "digits":
                rows = numbers.randint(1, ROWS)
                data = [numbers.randint(0, 16) for _ in range(64 * rows)]
                image = {"name": "image", "datatype": "FP32", "shape": [rows, 1, 8, 8], "data": data}
                one.post("/v2/models/digits/infer", json={"inputs": [image]})
            elif kind == "text":
                text = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["A quiet river, and a mill."]}
                one.post("/v2/models/text/infer", json={"inputs": [text]})
            else:
                body = {"model": "tiny-lm", "prompt": "import ", "max_tokens": numbers.randint(20, 120)}
                one.post("/v1/completions", content=json.dumps(body))
            wave = 1 + math.sin((time.monotonic() - begun) / 5)
            stop.wait(0.05 + 0.15 * wave + (0.3 if kind != "digits" else 0))


if __name__ == "__main__":
    main()
