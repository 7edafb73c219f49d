// A panel for any other model: a field for each input tensor, as nested JSON lists; shapes and datatypes are checked.

import { Failure, curl, events, parse } from "./api.js";
import { fault, field, make, say } from "./dom.js";
import { Exchange } from "./exchange.js";
import { NO_JSON, elementFault, flatten, jsonText, nest, shapeFault, shapeOf, shapeText } from "./tensors.js";

export class FormPanel {
  constructor(model) {
    this.model = model;
    this.exchange = new Exchange(model, "The answer comes here.");
    this.abort = null;
    this.fields = model.inputs.map((tensor) => this.#field(tensor));
    this.parameters = make("textarea", { rows: "2", class: "code", spellcheck: "false" });
    const known = model.parameters.map(([name, one]) => `${name} (${one.type ?? "value"}${"default" in one ? `, default ${JSON.stringify(one.default)}` : ""})`);
    this.parameterField = field("Parameters, as a JSON object", this.parameters, `Known: ${known.join(", ") || "none"}.`);
    this.send = make("button", { type: "submit", class: "main" }, "Send");
    this.stop = make("button", { type: "button", disabled: true, onclick: () => this.abort?.abort() }, "Stop");
    this.form = make(
      "form",
      { class: "panel", onsubmit: (event) => this.#submit(event), oninput: () => this.#offer() },
      ...this.fields.map((one) => one.element),
      this.parameterField,
      make("div", { class: "row" }, this.send, model.streams ? this.stop : null),
    );
    this.element = make("div", {}, make("div", { class: "split wide" }, this.form, this.exchange.element), this.exchange.curl.element);
    this.#offer();
  }

  /** The shape that the server takes: rows of a tensor, or a single row if the model streams. */
  #shape(tensor) {
    return this.model.streams ? tensor.shape.slice(1) : tensor.shape;
  }

  #field(tensor) {
    const area = make("textarea", { rows: "5", class: "code", spellcheck: "false" });
    area.value = this.#example(tensor);
    const text = `${tensor.name} · ${tensor.datatype} ${shapeText(this.#shape(tensor))}`;
    const element = field(text, area);
    const one = { tensor, area, element, note: element.querySelector(".note") };
    if (NO_JSON.includes(tensor.datatype)) {
      area.disabled = true;
      say(one.note, `${tensor.datatype} has no JSON form: send it with the binary tensor extension.`);
    }
    return one;
  }

  #example(tensor) {
    if (this.model.streams) return tensor.name in (this.model.row ?? {}) ? jsonText(this.model.row[tensor.name]) : "";
    const given = this.model.example?.inputs.find((one) => one.name === tensor.name);
    return given ? lines(nest(given.data, given.shape)) : "";
  }

  /** The value of a field. Throws an Error if it is wrong. */
  #read({ tensor, area }) {
    let value;
    try {
      value = parse(area.value);
    } catch (error) {
      throw new Error(`expected JSON, such as [[1, 2, 3]]: ${error.message}`);
    }
    const expected = this.#shape(tensor);
    const shape = shapeOf(value);
    // In a stream's body, a bare value stands for a tensor of one element.
    const isBare = this.model.streams && !shape.length && expected.length === 1;
    const wrong = (isBare ? "" : shapeFault(shape, expected)) || elementFault(flatten(value), tensor.datatype);
    if (wrong) throw new Error(wrong);
    return { value, shape };
  }

  /** All values, checked; null if a field is wrong, which then shows its error. */
  #collect() {
    let isRight = true;
    const found = [];
    const optional = this.fields.length > this.model.needed;
    for (const one of this.fields) {
      if (one.area.disabled) continue;
      if (optional && !one.area.value.trim()) {
        say(one.note, "Left out.");
        continue;
      }
      try {
        const { value, shape } = this.#read(one);
        found.push({ one, value, shape });
        fault(one.area, "", this.model.streams ? "" : `${shape[0]} ${shape[0] === 1 ? "row" : "rows"}, shape [${shape.join(", ")}]`);
      } catch (error) {
        isRight = false;
        fault(one.area, `${one.tensor.name}: ${error.message}`);
      }
    }
    const rows = found[0]?.shape[0];
    if (isRight && !this.model.streams) {
      for (const { one, shape } of found) {
        if (shape[0] === rows) continue;
        isRight = false;
        fault(one.area, `${one.tensor.name}: expected ${rows} rows, as ${found[0].one.tensor.name} has, got ${shape[0]}`);
      }
    }
    return isRight ? found : null;
  }

  #readParameters() {
    if (!this.parameters.value.trim()) return {};
    const value = parse(this.parameters.value);
    if (!value || typeof value !== "object" || Array.isArray(value)) throw new Error("expected a JSON object");
    return value;
  }

  #offer() {
    const found = this.#collect();
    let parameters;
    try {
      parameters = this.#readParameters();
    } catch {
      return null;
    }
    if (!found) return null;
    if (this.model.streams) {
      const body = jsonText({ ...Object.fromEntries(found.map(({ one, value }) => [one.tensor.name, value])), ...(Object.keys(parameters).length ? { parameters } : {}) });
      this.exchange.curl.show(curl(this.#streamPath(), body, { streams: true }));
      return { body };
    }
    const inputs = found.map(({ one, value, shape }) => ({ name: one.tensor.name, datatype: one.tensor.datatype, shape, data: flatten(value) }));
    this.exchange.offer(inputs, parameters);
    return { inputs, parameters };
  }

  #streamPath() {
    return `${this.model.path}/generate_stream`;
  }

  #submit(event) {
    event.preventDefault();
    const asked = this.#offer();
    if (!asked) {
      this.exchange.fail(this.#parameterFault() || "Not sent: the fields show the errors.");
      this.form.querySelector("[aria-invalid]")?.focus();
    } else if (this.model.streams) this.#stream(asked.body);
    else this.exchange.send(asked.inputs, asked.parameters);
  }

  #parameterFault() {
    try {
      this.#readParameters();
      return "";
    } catch (error) {
      return `Not sent: parameters: ${error.message}`;
    }
  }

  async #stream(body) {
    if (this.abort) return;
    this.abort = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    const box = make("pre", { class: "stream", role: "log", tabindex: "0", "aria-label": "Events" });
    this.exchange.result.replaceChildren(box);
    say(this.exchange.error, "");
    say(this.exchange.told, "Streaming …");
    try {
      for await (const data of events(this.#streamPath(), body, this.abort.signal)) box.append(`${data}\n`);
      say(this.exchange.told, "Done.");
    } catch (error) {
      if (error.name === "AbortError") say(this.exchange.told, "Stopped.");
      else if (error instanceof Failure) this.exchange.fail(error.message);
      else throw error;
    } finally {
      this.abort = null;
      this.send.disabled = false;
      this.stop.disabled = true;
    }
  }

  close() {
    this.abort?.abort();
    this.exchange.isClosed = true;
  }
}

/** Nested lists, with each row on its own line. */
const lines = (value) => (value.length > 1 ? `[\n${value.map((row) => `  ${jsonText(row)}`).join(",\n")}\n]` : jsonText(value));
