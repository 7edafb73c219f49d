"""The status page and the playground in a real headless browser, against the demo."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import Browser, Page, chromium, open_browser
from tests.forwarding import forward
from tests.running import Running, wait_for

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium; on Debian: apt-get install chromium-headless-shell"
)

VIEWS = ("status", "playground/digits", "playground/text", "playground/tiny-lm", "playground/scale")
LUMINANCE = """(color) => {
    const channels = color.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255);
    const linear = channels.map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as one:
        yield one


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must have nothing to complain of, and asks nobody but the demo."""
    with browser.page() as one:
        yield one
        assert one.complaints == []


def view(page: Page, demo: Running, name: str) -> None:
    """Open a view, and wait until it has what it shows."""
    page.open(f"{demo.url}/#/{name}")
    model = name.partition("/")[2]
    page.find(f"#panel[data-model='{model}']" if model else "#replicas tr")


def output(page: Page, name: str) -> str:
    """Of an answer: what stands for one output."""
    return page.text(f".answer [data-output='{name}']")


def copied(page: Page, browser: Browser) -> str:
    """What the button by the curl line puts into the clipboard."""
    page.click(".curl button")
    page.wait("document.querySelector('.curl [role=status]').innerText === 'Copied'")
    found = page.value("navigator.clipboard.readText()")
    assert isinstance(found, str)
    return found


def curl(command: str) -> bytes:
    return subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=60).stdout


def active(demo: Running) -> int:
    """Sequences that the language model computes."""
    found = demo.get("/v2/models/tiny-lm/stats").json()["model_stats"][0]["language_model"]["sequences"]
    return int(found["active"] + found["waiting"])


def test_every_view_loads_without_complaints_and_from_here_only(page: Page, demo: Running) -> None:
    for name in VIEWS:
        view(page, demo, name)
    assert all(url.startswith(f"{demo.url}/") for url in page.urls), page.urls
    assert "4 of 4 deployments ready" in page.text("#summary")


def test_the_policy_is_enforced(browser: Browser, demo: Running) -> None:
    """Else an absence of violations would say nothing."""
    with browser.page() as page:
        view(page, demo, "status")
        page.value(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
        )
        page.value("fetch('http://127.0.0.1:9/').catch(() => {})")
        wait_for(lambda: len(page.complaints) >= 2, what="violations")
        assert page.value("window.ran") is None
        assert all("Content Security Policy" in one or "violates" in one for one in page.complaints), page.complaints


def test_the_table_and_charts_follow_the_load(page: Page, demo: Running) -> None:
    view(page, demo, "status")
    before = demo.get("/v2/status").json()
    accepted = next(one["accepted"] for one in before["deployments"] if one["name"] == "scale")
    for _ in range(20):
        assert demo.infer("scale", [1, 2], shape=[1, 2]).status_code == 200
    row = "[...document.querySelectorAll('#deployments tr')].find((row) => row.cells[0].innerText.startsWith('scale'))"
    page.wait(f"Number({row}.cells[3].innerText) > 0")
    cells = page.value(f"[...{row}.cells].map((cell) => cell.innerText)")
    assert "READY" in cells[1]
    assert cells[4].endswith("s")  # p50, with its unit
    assert float(cells[6]) == 1  # one after the other: a row a call
    after = demo.get("/v2/status").json()
    assert next(one["accepted"] for one in after["deployments"] if one["name"] == "scale") == accepted + 20
    page.value("document.querySelector('#chart-choice').value = 'scale'")
    page.value("document.querySelector('#chart-choice').dispatchEvent(new Event('change'))")
    for title, unit in (("Requests/s", ""), ("Latency", "s"), ("Rows per call", "")):
        chart = f"[...document.querySelectorAll('.chart')].find((one) => one.innerText.startsWith('{title}'))"
        assert page.value(f"{chart}.querySelector('path.line-0').getAttribute('d').length") > 10
        assert page.value(f"{chart}.querySelector('b').innerText").endswith(unit)
        assert page.value(f"{chart}.querySelector('b').innerText") not in ("–", "0")


def test_quantiles_lie_where_the_buckets_say(page: Page, demo: Running) -> None:
    view(page, demo, "status")
    quantiles = page.value(
        """import("/static/history.js").then(({quantile}) => [
            quantile({counts: [0, 10, 10, 0], total: 20}, [1, 2, 4], 0.25),
            quantile({counts: [0, 10, 10, 0], total: 20}, [1, 2, 4], 0.75),
            quantile({counts: [0, 0, 0, 5], total: 5}, [1, 2, 4], 0.5),
            quantile({counts: [0, 0, 0, 0], total: 0}, [1, 2, 4], 0.5),
        ])"""
    )
    assert quantiles == [1.5, 3, 4, None]


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("[9007199254740993, -9223372036854775808, 1]", "[9007199254740993,-9223372036854775808,1]"),
        ('{"data": [NaN, -Infinity, Infinity, 0.5]}', '{"data":[NaN,-Infinity,Infinity,0.5]}'),
        ('{"a": "NaN, \\"Infinity", "b": [NaN, 1e400]}', '{"a":"NaN, \\"Infinity","b":[NaN,Infinity]}'),
        ('[true, null, "é", []]', '[true,null,"é",[]]'),
    ],
)
def test_numbers_that_json_or_floats_lack_survive(page: Page, demo: Running, text: str, again: str) -> None:
    view(page, demo, "status")
    modules = "Promise.all([import('/static/api.js'), import('/static/tensors.js')])"
    given = json.dumps(text)
    assert page.value(f"{modules}.then(([api, tensors]) => tensors.jsonText(api.parse({given})))") == again


def test_a_digit_drawn_with_the_mouse_is_answered_by_every_head(page: Page, browser: Browser, demo: Running) -> None:
    view(page, demo, "playground/digits")
    left, top, width, height = page.place(".pad canvas")
    turns = [index / 24 * 2 * math.pi for index in range(25)]
    page.stroke([(left + width * (0.5 + 0.22 * math.sin(a)), top + height * (0.5 - 0.36 * math.cos(a))) for a in turns])
    page.wait("document.querySelector('[aria-busy]').getAttribute('aria-busy') === 'false'")
    assert page.text("[data-output=digit] .word") == "0"
    assert output(page, "parity").endswith("even")
    assert "%" in output(page, "odd_probability")
    assert (
        len(page.value("[...document.querySelectorAll('[data-output=logits] dt')].map((one) => one.innerText)")) == 10
    )
    assert page.value("document.querySelector('[data-output=reconstruction] canvas').width") == 8
    assert float(output(page, "anomaly_score").splitlines()[-1]) > 0
    heads = page.value("[...document.querySelectorAll('[data-head]')].map((one) => one.dataset.head)")
    assert heads == ["digit", "parity", "reconstruction"]
    answer = json.loads(curl(copied(page, browser)))
    found = {one["name"]: one["data"] for one in answer["outputs"]}
    assert (found["digit"], found["parity"]) == ([0], ["even"])


@pytest.mark.parametrize("digit", [2, 3, 5])
def test_an_example_digit_is_read(page: Page, demo: Running, digit: int) -> None:
    view(page, demo, "playground/digits")
    page.click(f".examples button[aria-label='Draw a {digit}']")
    page.wait(f"document.querySelector('[data-output=digit] .word')?.innerText === '{digit}'")


def test_a_sentence_gets_its_topic_and_mood(page: Page, browser: Browser, demo: Running) -> None:
    view(page, demo, "playground/text")
    page.fill("textarea", 'It\'s wonderful how the striker won us the cup "twice"; I love this team $HOME `x`.')
    page.click("#panel button.main")
    page.find(".answer [data-output=topic] .word")
    assert output(page, "topic").endswith("sport")
    assert output(page, "sentiment").endswith("positive")
    labels = page.value("[...document.querySelectorAll('[data-output=topic_scores] dt')].map((one) => one.innerText)")
    assert sorted(labels) == ["business", "entertainment", "health", "politics", "science", "sport"]
    assert page.text("[data-output=topic_scores] dt.best") == "sport"
    answer = json.loads(curl(copied(page, browser)))  # with quotes and all
    assert {one["name"]: one["data"] for one in answer["outputs"]}["topic"] == ["sport"]


def test_tokens_arrive_one_by_one_and_stop_ends_them_in_the_server_too(page: Page, demo: Running) -> None:
    view(page, demo, "playground/tiny-lm")
    page.fill("input[type=number]", "400")
    page.fill("input[step]", "0")
    # In the page, so that no slow test can miss the answer's middle: after five pieces, Stop.
    page.value(
        """(() => {
            window.lengths = [];
            const box = document.querySelector(".stream");
            new MutationObserver(() => {
                window.lengths.push(box.innerText.length);
                if (window.lengths.length === 5) document.querySelector("#panel button[type=button]").click();
            }).observe(box, {childList: true});
        })()"""
    )
    page.click("#panel button.main")
    page.wait("document.body.innerText.includes('Stopped.')")
    lengths = page.value("window.lengths")
    assert 5 <= len(lengths) < 100
    assert lengths == sorted(set(lengths))
    assert page.value("document.querySelector('.figures dd').innerText").endswith("s")  # time to the first token
    wait_for(lambda: active(demo) == 0, what="the sequence's end")
    assert page.value("document.querySelector('#panel button.main').disabled") is False


def test_a_whole_answer_is_counted_and_its_curl_streams(page: Page, browser: Browser, demo: Running) -> None:
    view(page, demo, "playground/tiny-lm")
    page.fill("input[type=number]", "20")
    page.fill("input[step]", "0")
    page.click("#panel button.main")
    page.wait("document.body.innerText.includes('Done: ')")
    figures = page.value("[...document.querySelectorAll('.figures dd')].map((one) => one.innerText)")
    assert figures[1] == "20"
    assert float(figures[2]) > 0
    shown = page.text(".stream").removeprefix("def read_lines(path):")
    told = [line.removeprefix("data: ") for line in curl(copied(page, browser)).decode().splitlines() if line]
    assert told[-1] == "[DONE]"
    pieces = [json.loads(line) for line in told[:-1]]
    assert "".join(one["choices"][0]["text"] for one in pieces if one["choices"]).strip() == shown.strip()


def test_a_language_models_error_is_shown(page: Page, demo: Running) -> None:
    view(page, demo, "playground/tiny-lm")
    page.fill("input[type=number]", "90000")
    page.click("#panel button.main")
    page.wait("document.querySelector('.error[role=alert]').innerText.startsWith('400')")
    assert "max_tokens" in page.text(".error[role=alert]")
    page.complaints.clear()  # the browser notes each 4xx


def test_a_form_made_of_tensors(page: Page, browser: Browser, demo: Running) -> None:
    view(page, demo, "playground/scale")
    page.fill("textarea", "[[1, 2.5], [-3, 4]]")
    page.click("#panel button.main")
    page.find(".answer [data-output=y]")
    assert page.text("#panel .note") == "2 rows, shape [2, 2]"
    answer = json.loads(curl(copied(page, browser)))
    assert answer["outputs"][0]["data"] == [2, 5, -6, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1, 2], [3]]", "[1]: expected the shape [2] of its neighbours, got [1]"),
        ("[1, 2]", "expected the shape [rows, any], got [2]"),
        ('[["a"]]', 'expected numbers (FP32), got "a"'),
        ("[[1, 2", "expected JSON"),
    ],
)
def test_a_form_says_what_is_wrong_before_it_sends(page: Page, demo: Running, text: str, message: str) -> None:
    view(page, demo, "playground/scale")
    page.fill("textarea", text)
    page.click("#panel button.main")
    assert message in page.text("#panel .note")
    assert page.text(".error[role=alert]").startswith("Not sent")
    assert page.value("document.activeElement.tagName") == "TEXTAREA"
    assert not any(url.endswith("/infer") for url in page.urls)


def test_what_the_server_refuses_is_shown_in_its_words(page: Page, demo: Running) -> None:
    view(page, demo, "playground/scale")
    page.value("document.querySelectorAll('#panel textarea')[1].focus()")
    page.write('{"no_such_parameter": 1}')
    page.click("#panel button.main")
    page.wait("document.querySelector('.error[role=alert]').innerText.startsWith('400')")
    assert "no_such_parameter" in page.text(".error[role=alert]")
    page.complaints.clear()


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until an element has the focus, which must be seen at each stop."""
    for _ in range(60):
        page.press("Tab")
        outline = page.value("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", page.value("document.activeElement.outerHTML")
        if page.value(f"document.activeElement.matches({json.dumps(selector)})"):
            return
    raise AssertionError(f"Tab doesn't lead to {selector}")


def test_a_keyboard_is_enough(page: Page, demo: Running) -> None:
    view(page, demo, "status")
    tab_to(page, "[data-view=playground]")
    page.press("Enter")
    page.find("#panel[data-model=digits] canvas")
    tab_to(page, ".pad canvas")
    for key in [*["ArrowUp"] * 6, " ", *["ArrowDown"] * 14, " "]:
        page.press(key)
    page.wait("document.querySelector('[data-output=digit] .word')?.innerText === '1'")
    page.press("Delete")
    tab_to(page, "[aria-label='Draw a 4']")
    page.press("Enter")
    page.wait("document.querySelector('[data-output=digit] .word')?.innerText === '4'")
    page.value("document.querySelector('#models a').focus()")
    tab_to(page, "[data-model=tiny-lm]")
    page.press("Enter")
    page.find("#panel[data-model=tiny-lm] textarea")
    tab_to(page, "textarea")
    page.press("Enter", control=True)
    page.wait("document.querySelector('.stream').childNodes.length > 2")
    page.press("Escape")
    page.wait("/Stopped|Done/.test(document.body.innerText)")
    wait_for(lambda: active(demo) == 0, what="the sequence's end")


def test_every_control_has_a_name(page: Page, demo: Running) -> None:
    for name in VIEWS:
        view(page, demo, name)
        tree = page.send("Accessibility.getFullAXTree")["nodes"]
        wanted = {"button", "link", "textbox", "combobox", "spinbutton", "image", "application", "table", "log"}
        unnamed = [
            node["role"]["value"]
            for node in tree
            if not node.get("ignored") and node.get("role", {}).get("value") in wanted
            if not node.get("name", {}).get("value")
        ]
        assert unnamed == [], name


def test_a_phones_width_needs_no_sideways_scrolling(page: Page, demo: Running) -> None:
    page.resize(320, 640)
    for name in VIEWS:
        view(page, demo, name)
        assert page.value("document.documentElement.scrollWidth") == 320, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_readable(page: Page, demo: Running, scheme: str) -> None:
    page.prefer(scheme)
    view(page, demo, "status")
    for selector, least in (("body", 7), (".summary", 4.5), ("td .quiet", 4.5), (".chart .line-1", 4.5)):
        found = page.value(
            f"""(() => {{
                const luminance = {LUMINANCE};
                const element = document.querySelector({json.dumps(selector)});
                let behind = element;
                while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
                const both = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(luminance);
                return [(Math.max(...both) + 0.05) / (Math.min(...both) + 0.05), both[1]];
            }})()"""
        )
        assert found[0] >= least, (selector, found)
        assert (found[1] < 0.1) == (scheme == "dark")


def test_nothing_jumps_while_it_loads_and_runs(page: Page, demo: Running) -> None:
    view(page, demo, "status")
    page.value(
        """(() => {
            window.shifts = 0;
            new PerformanceObserver((list) => list.getEntries().forEach((one) => (window.shifts += one.value)))
                .observe({type: "layout-shift", buffered: true});
        })()"""
    )
    asked = len(page.urls)
    wait_for(lambda: len(page.urls) >= asked + 2, what="two more questions")
    assert page.value("window.shifts") < 0.1


def test_a_dead_server_shows_and_a_living_one_too(browser: Browser, demo: Running) -> None:
    host, _, port = demo.url.removeprefix("http://").rpartition(":")
    with browser.page() as page:
        with forward((host, int(port))) as address:
            page.open(f"http://{address}/")
            page.find("#deployments tr")
            assert page.text("#banner") == ""
        page.wait("document.querySelector('#banner').innerText.startsWith('No answer from the server since')")
        assert page.value("document.querySelector('#status').classList.contains('stale')")
        with forward((host, int(port)), int(address.rpartition(":")[2])):
            page.wait("document.querySelector('#banner').innerText === ''")
            assert not page.value("document.querySelector('#status').classList.contains('stale')")


def test_a_server_that_wants_a_key_is_given_one_which_is_kept_nowhere(browser: Browser, demo: Running) -> None:
    refusal = "new Response(JSON.stringify({error: 'API key: expected one'}), {status: 401})"
    with browser.page() as page:
        view(page, demo, "status")
        page.value(
            f"""(() => {{
                const before = window.fetch;
                window.keys = [];
                window.fetch = async (path, options) => {{
                    window.keys.push(options.headers.Authorization ?? "");
                    return options.headers.Authorization === "Bearer secret-1" ? before(path, options) : {refusal};
                }};
            }})()"""
        )
        page.wait("!document.querySelector('#key-form').hidden")
        assert page.text("#banner") == "The server wants an API key."
        page.fill("#key", "secret-1")
        page.press("Enter")
        page.wait("document.querySelector('#banner').innerText === ''")
        assert page.value("document.querySelector('#key-form').hidden")
        stored: Any = page.value("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert stored[:3] == [0, 0, ""]
        assert "secret" not in stored[3] + page.value("document.documentElement.outerHTML")
        view(page, demo, "playground/scale")
        assert "secret" not in page.text(".curl pre")
        assert "$HEADWATER_KEY" in page.text(".curl pre")
