// A panel for models that read a text: an input of strings, one string per row.

import { make, field } from "./dom.js";
import { Exchange } from "./exchange.js";

const EXAMPLES = [
  "The match went to penalties, and the keeper saved three of them.",
  "Parliament rejected the bill after a long and bitter debate.",
  "Astronomers found water vapour around a planet twice the size of ours.",
  "The film is far too long, and I would not see it again.",
];

export class TextPanel {
  static takes({ inputs, needed }) {
    return needed === 1 && inputs[0].datatype === "BYTES" && inputs[0].shape.join() === "-1,1";
  }

  constructor(model) {
    this.input = model.inputs[0];
    this.exchange = new Exchange(model, "Every head's answer comes here.");
    this.text = make("textarea", { rows: "4", maxlength: "20000", oninput: () => this.#offer() });
    this.text.value = EXAMPLES[0];
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#send(event);
    });
    const examples = EXAMPLES.map((example, index) =>
      make("button", { type: "button", title: example, onclick: () => this.#use(example) }, `Example ${index + 1}`),
    );
    const form = make(
      "form",
      { class: "panel", onsubmit: (event) => this.#send(event) },
      field(`${this.input.name}: a sentence`, this.text, "Ctrl+Enter sends it."),
      make("div", { class: "row" }, make("button", { type: "submit", class: "main" }, "Ask"), make("div", { class: "examples" }, ...examples)),
    );
    this.element = make("div", {}, make("div", { class: "split wide" }, form, this.exchange.element), this.exchange.curl.element);
    this.#offer();
  }

  #inputs() {
    return [{ name: this.input.name, datatype: "BYTES", shape: [1, 1], data: [this.text.value] }];
  }

  #offer() {
    this.exchange.offer(this.#inputs());
  }

  #use(example) {
    this.text.value = example;
    this.exchange.send(this.#inputs());
  }

  #send(event) {
    event.preventDefault();
    this.exchange.send(this.#inputs());
  }

  close() {
    this.exchange.isClosed = true;
  }
}
