// One question at a time to a model's infer route, and where its answer, error and curl line are shown.

import { Failure, curl, post } from "./api.js";
import { CurlBox } from "./curl_box.js";
import { make, say } from "./dom.js";
import { duration } from "./numbers.js";
import { answer } from "./outputs.js";
import { NO_JSON, jsonText } from "./tensors.js";

export class Exchange {
  /**
   * @param model as the playground describes it
   * @param empty what stands there before the first answer
   * @param imageTop what full ink is in an image
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

  /** The body of a request, without what has no form in JSON among the outputs. */
  body(inputs, parameters) {
    const inJson = this.model.outputs.filter((tensor) => !NO_JSON.includes(tensor.datatype));
    const content = { inputs };
    if (parameters && Object.keys(parameters).length) content.parameters = parameters;
    if (inJson.length < this.model.outputs.length) content.outputs = inJson.map(({ name }) => ({ name }));
    return jsonText(content);
  }

  /** Show the curl line of a request that isn't sent yet. */
  offer(inputs, parameters) {
    this.curl.show(curl(this.path, this.body(inputs, parameters)));
  }

  /** Send; while one is on its way, only the newest waits. */
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
