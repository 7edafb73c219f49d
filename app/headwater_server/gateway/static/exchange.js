// Sends requests to a model's infer route one at a time, and shows the answer, the error and the curl line.

import { Failure, curl, post } from "./api.js";
import { CurlBox } from "./curl_box.js";
import { make, say } from "./dom.js";
import { duration } from "./numbers.js";
import { answer } from "./outputs.js";
import { NO_JSON, jsonText } from "./tensors.js";

export class Exchange {
  /**
   * @param model the playground's description of the model
   * @param empty text that is shown before the first answer
   * @param imageTop value of full ink in an image
   */
  constructor(model, empty, imageTop) {
    this.model = model;
    this.imageTop = imageTop;
    this.path = `${model.path}/infer`;
    this.curl = new CurlBox();
    this.told = make("p", { class: "note", role: "status" }, "\u00a0");
    this.error = make("p", { class: "error", role: "alert" });
    this.result = make("div", { class: "answer" }, make("p", { class: "empty" }, empty));
    this.element = make("section", { class: "panel", "aria-label": "Answer" }, this.told, this.error, this.result);
    this.busy = false;
    this.next = null;
    this.isClosed = false;
  }

  /** The body of a request. It asks only for outputs whose datatype has a form in JSON. */
  body(inputs, parameters) {
    const inJson = this.model.outputs.filter((tensor) => !NO_JSON.includes(tensor.datatype));
    const content = { inputs };
    if (parameters && Object.keys(parameters).length) content.parameters = parameters;
    if (inJson.length < this.model.outputs.length) content.outputs = inJson.map(({ name }) => ({ name }));
    return jsonText(content);
  }

  /** Show the curl line of a request without sending it. */
  offer(inputs, parameters) {
    this.curl.show(curl(this.path, this.body(inputs, parameters)));
  }

  /** Send a request. While a request is in flight, only the newest request waits. */
  async send(inputs, parameters) {
    this.next = this.body(inputs, parameters);
    this.curl.show(curl(this.path, this.next));
    if (this.busy) return;
    this.busy = true;
    this.element.setAttribute("aria-busy", "true");
    try {
      while (this.next !== null && !this.isClosed) {
        const body = this.next;
        this.next = null;
        await this.#ask(body);
      }
    } finally {
      this.busy = false;
      this.element.setAttribute("aria-busy", "false");
    }
  }

  async #ask(body) {
    try {
      const { content, seconds } = await post(this.path, body);
      this.result.replaceChildren(answer(content, this.model, this.imageTop));
      say(this.error, "");
      const by = this.model.hasVersions ? ` by version ${content.model_version}` : "";
      say(this.told, `Answered in ${duration(seconds)}${by}.`);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      this.fail(error.message);
    }
  }

  fail(message) {
    say(this.error, message);
    say(this.told, "\u00a0");
    this.result.replaceChildren();
  }
}
