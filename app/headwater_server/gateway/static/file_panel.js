// A panel for models that read a file, an image or a recording, which is sent as a data URL.

import { make, field, say } from "./dom.js";
import { Exchange } from "./exchange.js";

const KINDS = { image: ["image/*", "An image"], audio: ["audio/*", "A recording, WAV"] };

export class FilePanel {
  static takes({ inputs, needed }) {
    return needed === 1 && inputs[0].name in KINDS && inputs[0].datatype === "BYTES" && inputs[0].shape.join() === "-1,1";
  }

  constructor(model) {
    this.input = model.inputs[0];
    const [accept, what] = KINDS[this.input.name];
    this.exchange = new Exchange(model, "Choose a file: the answer comes here.");
    this.file = make("input", { type: "file", accept, onchange: () => this.#read() });
    this.seen = make("div", { class: "preview" });
    const chosen = field(what, this.file, "It is sent as soon as it is chosen.");
    this.note = chosen.querySelector(".note");
    const form = make("form", { class: "panel" }, chosen, this.seen);
    this.element = make("div", {}, make("div", { class: "split wide" }, form, this.exchange.element), this.exchange.curl.element);
    const example = model.example?.inputs.find((tensor) => tensor.name === this.input.name)?.data;
    if (example) this.exchange.offer(this.#inputs(example[0]));
  }

  #inputs(text) {
    return [{ name: this.input.name, datatype: "BYTES", shape: [1, 1], data: [text] }];
  }

  #read() {
    const [file] = this.file.files;
    if (!file) return;
    const reader = new FileReader();
    reader.onerror = () => say(this.note, `${file.name} can't be read.`);
    reader.onload = () => {
      const isImage = this.input.name === "image";
      this.seen.replaceChildren(...(isImage ? [make("img", { src: reader.result, alt: file.name })] : []));
      this.exchange.send(this.#inputs(reader.result));
    };
    reader.readAsDataURL(file);
  }

  close() {
    this.exchange.isClosed = true;
  }
}
