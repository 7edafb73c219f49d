"""A headless Chromium, driven over the DevTools protocol's pipe: no driver, no port, no dependency.

Source: the protocol's pages at https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from tests.running import wait_for

__all__ = ["Browser", "Page", "chromium", "open_browser"]

NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ANSWER_TIMEOUT_S: Final = 60.0
FLAGS: Final = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # needs user namespaces, or another user than root; the page is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
)
KEYS: Final = {
    # name: (Windows key code, text)
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    " ": (32, " "),
    "Delete": (46, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}


def chromium() -> str | None:
    """The browser's path; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """The process.

    Args:
        binary: its path.
        profile: an empty folder.
    """

    def __init__(self, binary: str, profile: str) -> None:
        theirs_in, ours_out = (_high(fd) for fd in os.pipe())
        ours_in, theirs_out = (_high(fd) for fd in os.pipe())
        # It reads from descriptor 3 and writes to 4.
        moved = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "bash", binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out = os.fdopen(ours_out, "wb", buffering=0)
        self._in = os.fdopen(ours_in, "rb")
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._has_ended = False
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Give a command, and wait for what comes of it."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        with self._news:
            if not self._news.wait_for(lambda: number in self._answers or self._has_ended, ANSWER_TIMEOUT_S):
                raise AssertionError(f"{method}: no answer within {ANSWER_TIMEOUT_S:g} s")
            answer = self._answers.pop(number, None)
        if answer is None:
            raise AssertionError(f"{method}: the browser has ended")
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    @contextlib.contextmanager
    def page(self, width: int = 1200, height: int = 900) -> Iterator[Page]:
        """A page of its own until the block ends."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        self.send(
            "Browser.grantPermissions",
            permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
            browserContextId=context,
        )
        try:
            yield page
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)
            del self._pages[session]

    def close(self) -> None:
        """End it, and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(10)
        self._out.close()
        self._in.close()

    def _read(self) -> None:
        rest = b""
        while part := self._in.read1(1 << 20):
            *messages, rest = (rest + part).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                page = self._pages.get(message.get("sessionId", ""))
                if "id" not in message:
                    if page is not None:
                        page.take(message["method"], message["params"])
                    continue
                with self._news:
                    self._answers[message["id"]] = message
                    self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()


class Page:
    """One page, and what it complained of and asked for so far."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        """Errors and warnings in its console, violations of its content security policy among them."""
        self.urls: deque[str] = deque()
        """What it asked for."""

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command."""
        return self._browser.send(method, self._session, **parameters)

    def take(self, event: str, content: dict[str, Any]) -> None:
        """Note an event."""
        if event == "Network.requestWillBeSent":
            self.urls.append(content["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = content["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([one.get("value", one.get("description")) for one in content["args"]]))
        elif event == "Log.entryAdded" and content["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{content['entry']['text']} {content['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go to an address, and wait until it is loaded."""
        answer = self.send("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives; promises are awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression gives something true, and return that."""
        return wait_for(lambda: self.value(expression), timeout_s, expression)

    def find(self, selector: str, timeout_s: float = 30.0) -> None:
        """Wait until a selector finds an element."""
        self.wait(f"document.querySelector({json.dumps(selector)}) !== null", timeout_s)

    def text(self, selector: str) -> str:
        """What is written in the first element that a selector finds."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def resize(self, width: int, height: int = 900, scale: float = 1) -> None:
        """Have it show so many CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """Say that the user prefers a ``dark`` or ``light`` page."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width, height of an element, which is scrolled into view."""
        found = self.wait(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                if (!element || element.disabled) return null;
                element.scrollIntoView({{block: "center"}});
                const box = element.getBoundingClientRect();
                return box.width && [box.left, box.top, box.width, box.height];
            }})()"""
        )
        left, top, width, height = found
        return left, top, width, height

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        left, top, width, height = self.place(selector)
        self.stroke([(left + width / 2, top + height / 2)])

    def stroke(self, points: list[tuple[float, float]]) -> None:
        """Press the mouse's button at the first point, and let it go at the last."""
        (x, y), *_ = points
        self._mouse("mouseMoved", x, y, buttons=0)
        self._mouse("mousePressed", x, y, buttons=1)
        for x, y in points[1:]:
            self._mouse("mouseMoved", x, y, buttons=1)
        self._mouse("mouseReleased", x, y, buttons=0)

    def _mouse(self, kind: str, x: float, y: float, buttons: int) -> None:
        button = "none" if kind == "mouseMoved" else "left"
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1)

    def press(self, key: str, *, control: bool = False) -> None:
        """Press a key and let it go."""
        code, text = KEYS[key]
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        about["modifiers"] = 2 if control else 0
        text = "" if control else text
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def write(self, text: str) -> None:
        """Put text where the focus is, over what is selected."""
        self.send("Input.insertText", text=text)

    def fill(self, selector: str, text: str) -> None:
        """Replace what is in a field."""
        self.click(selector)
        self.value("document.activeElement.select()")
        self.write(text)

    def picture(self) -> bytes:
        """What it shows, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Run a headless browser until the block ends.

    Raises:
        FileNotFoundError: there is none.
    """
    binary = chromium()
    if binary is None:
        raise FileNotFoundError(
            f"no browser found; expected one of {', '.join(NAMES)}; on Debian: apt-get install {NAMES[0]}"
        )
    with tempfile.TemporaryDirectory(prefix="hw-browser-", ignore_cleanup_errors=True) as profile:
        browser = Browser(binary, profile)
        try:
            yield browser
        finally:
            browser.close()


def _high(fd: int) -> int:
    """The same descriptor under a number that isn't 3 or 4."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
