// The curl line of an action, and a button that copies it.

import { make, say } from "./dom.js";

export class CurlBox {
  constructor() {
    this.code = make("pre", { class: "code", tabindex: "0", "aria-label": "curl command" });
    this.button = make("button", { type: "button", onclick: () => this.#copy() }, "Copy");
    this.told = make("span", { class: "note", role: "status" });
    this.element = make(
      "section",
      { class: "panel curl" },
      make("div", { class: "head-line" }, make("h3", {}, "The same with curl"), make("div", {}, this.told, " ", this.button)),
      this.code,
    );
  }

  show(text) {
    say(this.code, text);
    say(this.told, "");
  }

  async #copy() {
    const text = this.code.textContent;
    say(this.told, (await copied(text)) ? "Copied" : "Your browser can't copy: select the text");
  }
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS, and on another host than localhost, the clipboard API is missing or refused.
    const area = make("textarea", { readonly: true, "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
