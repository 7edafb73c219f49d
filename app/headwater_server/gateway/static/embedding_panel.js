// A panel for embedding models that only OpenAI's route serves: it shows the curl line of a request.

import { curl } from "./api.js";
import { CurlBox } from "./curl_box.js";
import { make } from "./dom.js";
import { jsonText } from "./tensors.js";

export class EmbeddingPanel {
  constructor(model) {
    const box = new CurlBox();
    box.show(curl("/v1/embeddings", jsonText({ model: model.name, input: ["Rivers begin here."] })));
    const told = `${model.name} turns texts into vectors, at /v1/embeddings.`;
    this.element = make("div", {}, make("p", { class: "panel" }, told), box.element);
  }

  close() {}
}
