// The playground: the list of models, and a panel for the chosen model that suits its tensors.

import { Failure, get } from "./api.js";
import { byId, make, say } from "./dom.js";
import { EmbeddingPanel } from "./embedding_panel.js";
import { FilePanel } from "./file_panel.js";
import { FormPanel } from "./form_panel.js";
import { ImagePanel } from "./image_panel.js";
import { LanguageModelPanel } from "./language_model_panel.js";
import { count } from "./numbers.js";
import { TextPanel } from "./text_panel.js";

let models = []; // models of the last status that clients can name
let wanted = ""; // the model named in the address
let shown = ""; // model and state of the panel that is shown
let panel = null;
let version = ""; // version of the shown model to ask; empty: the shares of traffic choose

/** Fetch everything that a panel needs to know about a model. */
async function described(entry) {
  if (["language model", "embedding model"].includes(entry.kind)) return { name: entry.name, kind: entry.kind };
  const below = version ? `/versions/${version}` : "";
  const path = `/v2/models/${encodeURIComponent(entry.name)}${below}`;
  const [metadata, schema] = await Promise.all([get(path), get("/openapi.json")]);
  const knownPath = `/v2/models/${entry.name}${below}`;
  const body = (route) => schema.paths[`${knownPath}/${route}`]?.post.requestBody.content["application/json"];
  const whole = body("infer");
  const streamed = body("generate_stream") ?? body("generate");
  const known = (whole ?? streamed)?.schema.properties;
  return {
    name: entry.name,
    kind: entry.kind,
    path,
    hasVersions: Boolean(entry.traffic),
    streams: !whole,
    inputs: metadata.inputs,
    outputs: metadata.outputs,
    heads: metadata.heads ?? [],
    needed: whole?.schema.properties.inputs.minItems ?? streamed?.schema.required?.length ?? metadata.inputs.length,
    example: whole?.example ?? null,
    row: streamed?.example ?? null,
    parameters: Object.entries(known?.parameters?.properties ?? {}).filter(([name]) => name !== "binary_data_output"),
  };
}

function panelFor(model) {
  if (model.kind === "language model") return new LanguageModelPanel(model);
  if (model.kind === "embedding model") return new EmbeddingPanel(model);
  for (const Panel of [ImagePanel, FilePanel, TextPanel]) if (!model.streams && Panel.takes(model)) return new Panel(model);
  return new FormPanel(model);
}

const versionText = (entry, name) => (name ? `${name} (${count(100 * entry.traffic[name])}\u00a0%)` : "by their shares");

/** A choice of the version to ask; language models have no routes for versions. */
function versionChoice(entry) {
  if (!entry.traffic || entry.kind === "language model") return null;
  const options = ["", ...Object.keys(entry.traffic)].map((name) =>
    make("option", { value: name, selected: name === version }, versionText(entry, name)),
  );
  const select = make("select", { id: "version-choice" }, ...options);
  select.addEventListener("change", () => {
    version = select.value;
    refresh();
  });
  return make("p", {}, make("label", { class: "inline" }, "Version ", select));
}

async function render(entry) {
  const box = byId("panel");
  delete box.dataset.model;
  panel?.close();
  panel = null;
  if (entry.state !== "READY") {
    box.replaceChildren(make("p", { class: "panel empty" }, `${entry.name} is ${entry.state}${entry.reason ? `: ${entry.reason}` : ""}`));
    return;
  }
  const mark = shown;
  try {
    const model = await described(entry);
    if (mark !== shown) return; // another model was chosen meanwhile
    panel = panelFor(model);
    box.replaceChildren(...[versionChoice(entry), panel.element].filter(Boolean));
    box.dataset.model = entry.name;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (mark === shown) box.replaceChildren(make("p", { class: "panel error", role: "alert" }, error.message));
    shown = ""; // retried with the next status
  }
}

function follow() {
  if (byId("playground").hidden || !models.length) return;
  const entry = models.find((one) => one.name === wanted) ?? (wanted ? null : models[0]);
  for (const link of byId("models").children) {
    if (link.dataset.model === entry?.name) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  const versions = Object.keys(entry?.traffic ?? {});
  if (!shown.startsWith(`${entry?.name} `) && shown) version = "";
  if (!versions.includes(version)) version = "";
  for (const option of document.querySelectorAll("#version-choice option")) {
    if (!option.value || versions.includes(option.value)) say(option, versionText(entry, option.value));
  }
  const mark = entry ? `${entry.name} ${entry.state} ${entry.since_s} ${versions}` : `no ${wanted}`;
  if (mark === shown) return;
  // A panel in use stays even if its model is not ready: the answers to its requests then say so.
  if (panel && entry && entry.state !== "READY" && shown.startsWith(`${entry.name} `)) return;
  shown = mark;
  if (entry) render(entry);
  else byId("panel").replaceChildren(make("p", { class: "panel empty" }, `This server has no model ${wanted}.`));
}

/** Show a model; empty: the first. */
export function choose(name) {
  wanted = name;
  follow();
}

/** Fetch the shown model again, with another key or version. */
export function refresh() {
  shown = "";
  follow();
}

export function update(status) {
  models = status.deployments.filter((one) => one.part_of === null);
  const names = models.map((one) => one.name);
  const nav = byId("models");
  if ([...nav.children].map((link) => link.dataset.model).join("\n") !== names.join("\n")) {
    nav.replaceChildren(
      ...names.map((name) => make("a", { href: `#/playground/${encodeURIComponent(name)}`, "data-model": name }, name)),
    );
  }
  follow();
}
