// A panel for language models: tokens as they arrive, a stop button, the time to first token, and tokens per second.

import { Failure, curl, events } from "./api.js";
import { Answer, ChatForm } from "./chat_form.js";
import { CurlBox } from "./curl_box.js";
import { fault, field, make, say } from "./dom.js";
import { count, duration } from "./numbers.js";
import { jsonText } from "./tensors.js";

const NEAR_END_PX = 40;

export class LanguageModelPanel {
  constructor(model) {
    this.model = model;
    this.abort = null;
    this.prompt = make("textarea", { rows: "4", class: "code", maxlength: "100000" });
    this.prompt.value = "def read_lines(path):";
    this.form = make("select", {}, make("option", { value: "completions" }, "continue the text"), make("option", { value: "chat" }, "answer as a chat"));
    this.tokens = make("input", { type: "number", min: "1", max: "100000", value: "200", class: "small" });
    this.temperature = make("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0.7", class: "small" });
    this.chat = new ChatForm();
    this.controls = {
      prompt: this.prompt, messages: this.prompt, max_tokens: this.tokens, temperature: this.temperature,
      response_format: this.chat.schema, tools: this.chat.tools, tool_choice: this.chat.choice,
    };
    this.start = make("button", { type: "submit", class: "main" }, "Generate");
    this.stop = make("button", { type: "button", disabled: true, onclick: () => this.abort?.abort() }, "Stop");
    this.output = make("div", { class: "stream", role: "log", "aria-live": "polite", "aria-label": "Generated text", tabindex: "0" });
    this.parsed = make("div", { class: "parsed" });
    this.told = make("p", { class: "note", role: "status" }, "\u00a0");
    this.error = make("p", { class: "error", role: "alert" });
    this.figures = {};
    this.curl = new CurlBox();
    const form = make(
      "form",
      { class: "panel", onsubmit: (event) => this.#generate(event), oninput: (event) => this.#changed(event.target) },
      field("Prompt", this.prompt, "Ctrl+Enter sends it, Escape stops."),
      make(
        "div",
        { class: "row" },
        field("Task", this.form),
        field("Tokens, at most", this.tokens),
        field("Temperature", this.temperature),
      ),
      this.chat.element,
      make("div", { class: "row" }, this.start, this.stop),
    );
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#generate(event);
    });
    const figures = ["First token", "Tokens", "Tokens/s", "Time"].map((name) => {
      this.figures[name] = make("dd", {}, "–");
      return make("div", {}, make("dt", {}, name), this.figures[name]);
    });
    this.element = make(
      "div",
      { onkeydown: (event) => event.key === "Escape" && this.abort?.abort() },
      make(
        "div",
        { class: "split wide" },
        form,
        make("section", { class: "panel", "aria-label": "Answer" }, make("dl", { class: "figures" }, ...figures), this.told, this.error, this.output, this.parsed),
      ),
      this.curl.element,
    );
    this.#offer();
  }

  get #isChat() {
    return this.form.value === "chat";
  }

  #changed(control) {
    if (control.hasAttribute("aria-invalid")) fault(control, "");
    this.#offer();
  }

  /** Path and body of the request; null if a field is wrong, which then shows its error. */
  #request() {
    const isChat = this.#isChat;
    const text = this.prompt.value;
    const asked = isChat ? this.chat.fields() : {};
    if (!asked) return null;
    const body = {
      model: this.model.name,
      ...asked,
      ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
      max_tokens: Number(this.tokens.value),
      temperature: Number(this.temperature.value),
      stream: true,
      stream_options: { include_usage: true },
    };
    return [isChat ? "/v1/chat/completions" : "/v1/completions", jsonText(body)];
  }

  #offer() {
    this.chat.element.hidden = !this.#isChat;
    const request = this.#request();
    if (request) this.curl.show(curl(...request, { streams: true }));
    return request;
  }

  async #generate(event) {
    event.preventDefault();
    if (this.abort) return;
    for (const control of Object.values(this.controls)) fault(control, "");
    const request = this.#offer();
    if (!request) {
      say(this.error, "Not sent: the fields show the errors.");
      say(this.told, "\u00a0");
      this.chat.element.querySelector("[aria-invalid]").focus();
      return;
    }
    const [path, body] = request;
    const isSchema = this.#isChat && this.chat.hasSchema;
    const run = new Run(this.figures);
    const answer = new Answer();
    this.abort = new AbortController();
    this.start.disabled = true;
    this.stop.disabled = false;
    this.parsed.replaceChildren();
    this.output.replaceChildren(...(path.includes("chat") ? [] : [make("span", { class: "prompt" }, this.prompt.value)]));
    say(this.error, "");
    say(this.told, "Waiting for the first token …");
    const clock = setInterval(() => run.show(), 200);
    try {
      for await (const data of events(path, body, this.abort.signal)) {
        if (data === "[DONE]") break;
        const said = JSON.parse(data);
        if (said.error) throw new Failure(0, said.error.message, said.error.param);
        const [choice] = said.choices;
        const text = choice?.text ?? answer.take(choice?.delta ?? {});
        run.take(text, said.usage, choice?.finish_reason);
        if (text) {
          this.#append(text);
          say(this.told, "Generating …");
        }
      }
      this.#end(answer.parsed(isSchema), run.reason === "length");
    } catch (error) {
      if (error.name === "AbortError") say(this.told, "Stopped.");
      else if (error instanceof Failure) {
        say(this.error, error.message);
        say(this.told, "\u00a0");
        const control = this.controls[/^\w*/.exec(error.param ?? "")[0]]; // such as response_format.json_schema
        if (control) fault(control, error.message);
      } else throw error;
    } finally {
      clearInterval(clock);
      run.end();
      this.abort = null;
      const hadFocus = document.activeElement === this.stop;
      this.start.disabled = false;
      this.stop.disabled = true;
      if (hadFocus) this.start.focus();
    }
  }

  /** Show how the answer ended, and the JSON in it. */
  #end(parsed, isCut) {
    const whole = parsed.filter(([, text]) => text !== null);
    if (whole.length === parsed.length) say(this.told, isCut ? "Done: the token limit was reached." : "Done: the model ended the answer.");
    else if (isCut) say(this.told, "Cut: the token limit was reached, and the JSON is incomplete. Allow more tokens.");
    else say(this.told, "Done: the model ended the answer, but it is not JSON.");
    const parts = whole.map(([title, text]) => [make("h3", {}, title), make("pre", { class: "code", tabindex: "0", "aria-label": title }, text)]);
    this.parsed.replaceChildren(...parts.flat());
  }

  #append(text) {
    const box = this.output;
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
    box.append(text);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  close() {
    this.abort?.abort();
  }
}

/** The figures of an answer. The server reports its token count at the end; until then the pieces are counted. */
class Run {
  constructor(figures) {
    this.figures = figures;
    this.begun = performance.now();
    this.first = null;
    this.last = null;
    this.pieces = 0;
    this.tokens = null;
    this.reason = null;
    this.show();
  }

  take(text, usage, reason) {
    const now = performance.now();
    if (text) {
      this.first ??= now;
      this.last = now;
      this.pieces += 1;
    }
    this.tokens = usage?.completion_tokens ?? this.tokens;
    this.reason = reason ?? this.reason;
  }

  end() {
    this.ended = performance.now();
    this.show();
  }

  show() {
    const tokens = this.tokens ?? this.pieces;
    const about = this.tokens === null && tokens ? "≈ " : "";
    const seconds = this.first === null ? 0 : (this.last - this.first) / 1000;
    say(this.figures["First token"], duration(this.first === null ? null : (this.first - this.begun) / 1000));
    say(this.figures.Tokens, `${about}${tokens}`);
    say(this.figures["Tokens/s"], seconds > 0 && tokens > 1 ? about + count((tokens - 1) / seconds) : "–");
    say(this.figures.Time, duration(((this.ended ?? performance.now()) - this.begun) / 1000));
  }
}
