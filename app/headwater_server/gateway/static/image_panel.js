// A panel for models that read an image with one channel: draw it by pointer or keys, or take an example.

import { DIGITS, rasterise, trace } from "./drawing.js";
import { make, say } from "./dom.js";
import { Exchange } from "./exchange.js";
import { drawPixels } from "./outputs.js";

const STEP = 0.05;
const PEN = 0.07;
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class ImagePanel {
  static takes({ inputs, needed }) {
    const [first] = inputs;
    const sides = first.shape.slice(-2);
    const isFlat = first.shape.length === 3 || (first.shape.length === 4 && first.shape[1] === 1);
    return needed === 1 && first.datatype === "FP32" && isFlat && sides.every((side) => side >= 4 && side <= 64);
  }

  constructor(model) {
    this.input = model.inputs[0];
    this.sides = this.input.shape.slice(-2);
    const example = model.example?.inputs.find((tensor) => tensor.name === this.input.name)?.data;
    this.top = Math.max(0, ...(example ?? [])) || 1; // full ink is the highest value in the model's example
    this.exchange = new Exchange(model, "Draw a digit: every head's answer comes here.", this.top);
    this.strokes = [];
    this.pen = null; // position of the keyboard's pen
    this.isDown = false;
    this.canvas = make("canvas", {
      width: "480",
      height: "480",
      tabindex: "0",
      role: "application",
      "aria-label": "Drawing",
      "aria-describedby": "drawing-note",
    });
    this.seen = make("canvas", { class: "pixels", role: "img", "aria-label": `What the model sees: ${this.sides.join(" by ")} pixels` });
    this.told = make("p", { class: "unseen", role: "status" });
    const digits = DIGITS.map((strokes, digit) =>
      make("button", { type: "button", "aria-label": `Draw a ${digit}`, onclick: () => this.#use(strokes) }, String(digit)),
    );
    this.element = make(
      "div",
      {},
      make(
        "div",
        { class: "split" },
        make(
          "section",
          { class: "panel", "aria-label": this.input.name },
          make("div", { class: "pad" }, this.canvas),
          make("p", { class: "note", id: "drawing-note" }, "Keys: arrows move the pen, Space sets it down or lifts it, Delete clears."),
          this.told,
          make("div", { class: "row" }, make("button", { type: "button", onclick: () => this.#clear() }, "Clear"), make("div", { class: "examples" }, ...digits)),
          make("p", { class: "note" }, "What the model sees:"),
          this.seen,
        ),
        this.exchange.element,
      ),
      this.exchange.curl.element,
    );
    this.#listen();
    this.#redraw();
    if (example) {
      this.#see(example);
      this.exchange.offer(this.#inputs(example));
    }
  }

  #listen() {
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    };
    let drawing = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      this.canvas.setPointerCapture(event.pointerId);
      drawing = event.pointerId;
      this.pen = null;
      this.isDown = false;
      this.strokes.push([at(event)]);
      this.#changed();
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.pointerId !== drawing) return;
      const events = event.getCoalescedEvents?.() ?? [];
      this.strokes[this.strokes.length - 1].push(...(events.length ? events : [event]).map(at));
      this.#changed();
    });
    for (const kind of ["pointerup", "pointercancel"]) this.canvas.addEventListener(kind, () => (drawing = null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    for (const kind of ["focus", "blur"]) this.canvas.addEventListener(kind, () => this.#redraw());
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = MOVES[event.key];
    if (move) {
      const [x, y] = this.pen ?? [0.5, 0.5];
      this.pen = [x + move[0] * STEP, y + move[1] * STEP].map((value) => Math.min(0.95, Math.max(0.05, value)));
      if (this.isDown) this.strokes[this.strokes.length - 1].push(this.pen);
    } else if (event.key === " ") {
      this.pen ??= [0.5, 0.5];
      this.isDown = !this.isDown;
      if (this.isDown) this.strokes.push([this.pen]);
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.#clear();
    } else {
      return;
    }
    event.preventDefault();
    if (this.pen) {
      const place = this.pen.map((value) => Math.round(value * 100)).join(", ");
      say(this.told, `Pen ${this.isDown ? "down" : "up"} at ${place}.`);
    }
    if (this.isDown) this.#changed();
    else this.#redraw();
  }

  #clear() {
    this.strokes = [];
    this.pen = null;
    this.isDown = false;
    say(this.told, "Cleared.");
    this.#redraw();
    this.#see(rasterise([], this.sides));
  }

  #use(strokes) {
    this.strokes = strokes.map((stroke) => [...stroke]);
    this.isDown = false;
    this.#changed();
  }

  #redraw() {
    const context = this.canvas.getContext("2d");
    const side = this.canvas.width;
    context.clearRect(0, 0, side, side);
    context.strokeStyle = "#1a2426";
    trace(context, this.strokes, side, side * PEN);
    if (document.activeElement === this.canvas && (this.pen || !this.strokes.length)) {
      const [x, y] = this.pen ?? [0.5, 0.5];
      context.strokeStyle = this.isDown ? "#b4590b" : "#0b6570";
      context.lineWidth = 3;
      context.beginPath();
      context.arc(x * side, y * side, side * PEN * 0.6, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  #see(values) {
    drawPixels(this.seen, values, this.sides, this.top);
  }

  #inputs(data) {
    return [{ name: this.input.name, datatype: "FP32", shape: [1, ...this.input.shape.slice(1)], data }];
  }

  #changed() {
    this.#redraw();
    const data = rasterise(this.strokes, this.sides).map((value) => Math.round(value * this.top * 1000) / 1000);
    this.#see(data);
    this.exchange.send(this.#inputs(data));
  }

  close() {
    this.exchange.isClosed = true;
  }
}
