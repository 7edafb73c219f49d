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
FIELDS = {"schema": "document.querySelectorAll('#panel textarea')[1]",
          "tools": "document.querySelectorAll('#panel textarea')[2]"}  # fmt: skip
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


def test_the_share_of_prompts_that_the_prefix_cache_had_is_shown(page: Page, demo: Running) -> None:
    view(page, demo, "status")
    cells = "[...document.querySelectorAll('#deployments tr')].find((row) => row.innerText.startsWith('tiny-lm')).cells"
    page.wait(f"{cells}[8].innerText.endsWith('– cached')")
    height = page.value(f"{cells}[0].offsetHeight")
    usages = []
    for question in ("What is it?", "Who wrote it?"):
        said = [("system", "You know all the rivers. " * 20), ("user", question)]
        messages = [{"role": role, "content": text} for role, text in said]
        body = {"model": "tiny-lm", "messages": messages, "max_tokens": 4}
        usages.append(demo.client.post(f"{demo.url}/v1/chat/completions", json=body).json()["usage"])
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in usages]
    assert cached[0] < 32 <= cached[1]
    share = f"{100 * sum(cached) / sum(one['prompt_tokens'] for one in usages):.0f}\u00a0%"
    page.wait(f"{cells}[8].innerText.endsWith('{share} cached')")
    assert page.value(f"{cells}[0].offsetHeight") == height  # nothing jumps


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
                if (window.lengths.length === 5) document.querySelector("#panel button.main + button").click();
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


def chat(page: Page, demo: Running, tokens: int, *, schema: object = None, tools: object = None) -> None:
    """Ask the language model as a chat, in a form."""
    view(page, demo, "playground/tiny-lm")
    assert not page.value(f"{FIELDS['schema']}.checkVisibility()")
    page.fill("input[type=number]", str(tokens))
    choose(page, "Task", "chat")
    for name, given in (("schema", schema), ("tools", tools)):
        if given is not None:
            page.value(f"({FIELDS[name]}.focus(), {FIELDS[name]}.select())")
            page.write(given if isinstance(given, str) else json.dumps(given))
    choose(page, "Tool choice", "required")
    page.click("#panel button.main")


def choose(page: Page, label: str, value: str) -> None:
    """Choose in the list with this label."""
    page.value(
        f"""(() => {{
            const list = [...document.querySelectorAll("label")].find((one) => one.innerText === "{label}").control;
            list.value = "{value}";
            list.dispatchEvent(new Event("input", {{bubbles: true}}));
        }})()"""
    )


def told(page: Page) -> str:
    """How the last answer ended."""
    page.wait("/^(Done|Cut|Stopped)/.test(document.querySelector('#panel section [role=status]').innerText)")
    return page.text("#panel section [role=status]")


def test_an_answer_that_follows_a_schema_is_shown_as_json(page: Page, browser: Browser, demo: Running) -> None:
    properties = {"of": {"const": []}, "text": {"const": 'a, {"b": 1}'}}
    required = {"required": ["of", "text"], "additionalProperties": False}
    chat(page, demo, 200, schema={"type": "object", "properties": properties, **required})
    assert told(page) == "Done: the model ended the answer."
    assert page.text(".parsed h3") == "Answer as JSON"
    shown = page.text(".parsed pre")
    assert shown.splitlines() == ["{", '  "of": [],', '  "text": "a, {\\"b\\": 1}"', "}"]
    assert json.loads(page.text(".stream")) == json.loads(shown)
    pieces = [line.removeprefix("data: ") for line in curl(copied(page, browser)).decode().splitlines() if line]
    texts = [one["delta"].get("content", "") for piece in pieces[:-1] for one in json.loads(piece)["choices"]]
    assert json.loads("".join(texts)) == json.loads(shown)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('{"a":[1e999,12345678901234567890],"b":{ },"c":[\n]}',
         ["{", '  "a": [', "    1e999,", "    12345678901234567890", "  ],", '  "b": {},', '  "c": []', "}"]),
        (' "a: [1, 2]\\\\" ', ['"a: [1, 2]\\\\"']),
        ("null", ["null"]),
        ("[[1], {", None),
        ("", None),
    ],
)  # fmt: skip
def test_json_is_laid_out_as_it_is_written(page: Page, demo: Running, text: str, lines: list[str] | None) -> None:
    view(page, demo, "status")
    found = page.value(f"import('/static/chat_form.js').then(({{laidOut}}) => laidOut({json.dumps(text)}))")
    assert (found and found.split("\n")) == lines


def test_an_answer_cut_before_its_json_is_whole_says_so(page: Page, demo: Running) -> None:
    chat(page, demo, 3, schema={"const": "a text that is much longer than three tokens"})
    assert told(page) == "Cut: the token limit was reached, and the JSON is incomplete. Allow more tokens."
    assert page.text(".stream") != ""
    assert page.text(".parsed") == ""


def test_calls_of_tools_are_shown(page: Page, demo: Running) -> None:
    parameters = {"type": "object", "properties": {"path": {"const": "a.py"}}, "required": ["path"],
                  "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    chat(page, demo, 400, tools=tools)
    assert told(page).startswith(("Done: ", "Cut: "))  # it may begin another call
    assert page.text(".parsed h3") == "Call of find"
    assert page.text(".parsed pre").splitlines() == ["{", '  "path": "a.py"', "}"]
    assert page.text(".stream").startswith("find {")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("schema", '{"type": ', "Expected JSON: "),
        ("schema", "3", "400 Bad Request: response_format.json_schema.schema: "),
        ("schema", {"type": "object", "not": {}}, "400 Bad Request: response_format.json_schema.schema: "),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "400 Bad Request: tools[0].function.name: "),
    ],
)
def test_a_form_that_is_wrong_is_told_at_its_field(
    page: Page, demo: Running, name: str, given: object, message: str
) -> None:
    chat(page, demo, 20, **{name: given})
    page.wait("document.querySelector('.error[role=alert]').innerText !== ''")
    control = FIELDS[name]
    assert page.value(f"{control}.getAttribute('aria-invalid')") == "true"
    below = f"document.getElementById({control}.getAttribute('aria-describedby'))"
    assert page.value(f"{below}.innerText").startswith(message)
    if message == "Expected JSON: ":
        assert page.value(f"document.activeElement === {control}")
        assert not any(url.endswith("/completions") for url in page.urls)
    page.value(f"({control}.value = '', {control}.dispatchEvent(new Event('input', {{bubbles: true}})))")
    assert page.value(f"{control}.getAttribute('aria-invalid')") is None
    page.complaints.clear()  # the browser notes each 4xx


def test_the_examples_of_forms_are_taken(page: Page, demo: Running) -> None:
    chat(page, demo, 5)
    told(page)
    for name in ("schema", "tools"):
        page.value(
            f"[...document.querySelectorAll('#panel button')].find((one) => one.innerText === 'Example {name}').click()"
        )
        assert json.loads(page.value(f"{FIELDS[name]}.value"))
    page.click("#panel button.main")
    assert told(page).startswith(("Done", "Cut"))
    assert page.text(".error[role=alert]") == ""


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
        if name == "playground/tiny-lm":
            choose(page, "Task", "chat")
        tree = page.send("Accessibility.getFullAXTree")["nodes"]
        wanted = {"button", "link", "textbox", "combobox", "spinbutton", "image", "application", "table", "log"}
        unnamed = [
            node["role"]["value"]
            for node in tree
            if not node.get("ignored") and node.get("role", {}).get("value") in wanted
            if not node.get("name", {}).get("value")
        ]
        assert unnamed == [], name


@pytest.mark.parametrize("width", [320, 600, 740, 929, 1080])
def test_no_width_needs_sideways_scrolling(page: Page, demo: Running, width: int) -> None:
    page.resize(width, 640)
    for name in VIEWS:
        view(page, demo, name)
        assert page.value("document.documentElement.scrollWidth") <= width, name
        if name == "playground/tiny-lm":
            choose(page, "Task", "chat")
            assert page.value("document.documentElement.scrollWidth") <= width, name


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
        assert page.text("#banner") == "The server requires an API key."
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
