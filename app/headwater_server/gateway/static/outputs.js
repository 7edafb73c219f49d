// Answers for people: grouped by head, and every tensor in a form that suits its datatype, shape and name.

import { make } from "./dom.js";
import { element as elementText } from "./numbers.js";
import { jsonText, nest, rowOf } from "./tensors.js";

const MOST_BARS = 64;
const MOST_ROWS = 10;
const LONGEST_WORD = 60;

/** Draw an image with one channel like ink on paper: low values are bright. */
export function drawPixels(canvas, values, [height, width], top) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  values.forEach((value, index) => {
    const ink = Math.min(1, Math.max(0, value / top));
    image.data.set([252 - 226 * ink, 252 - 216 * ink, 250 - 212 * ink, 255], index * 4);
  });
  context.putImageData(image, 0, 0);
}

export function softmax(values) {
  const most = Math.max(...values);
  const powers = values.map((value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((value) => value / sum);
}

const percent = (value) => `${(value * 100).toFixed(value < 0.0995 ? 1 : 0)} %`;

function bars(values, labels, text, top) {
  const best = values.indexOf(Math.max(...values));
  const box = make("dl", { class: "bars" });
  values.forEach((value, index) => {
    const kind = index === best && values.length > 1 ? " best" : "";
    const fill = make("div", { class: `fill${kind}` });
    fill.style.width = `${Math.min(100, (100 * Math.abs(value)) / top)}%`;
    box.append(
      make("dt", { class: kind.trim() }, labels[index] ?? String(index)),
      make("div", { class: "track", "aria-hidden": "true" }, fill),
      make("dd", { class: `value${kind}` }, text(value)),
    );
  });
  for (const value of box.querySelectorAll("dd")) value.style.margin = "0";
  return box;
}

function numbers(name, values, labels) {
  if (/logits$/.test(name)) return bars(softmax(values), labels, percent, 1);
  const isShare = values.every((value) => value >= 0 && value <= 1) && Math.abs(values.reduce((a, b) => a + b, 0) - 1) < 0.01;
  if (isShare) return bars(values, labels, percent, 1);
  return bars(values, labels, elementText, Math.max(...values.map(Math.abs)) || 1);
}

function pixels(values, shape, top) {
  const canvas = make("canvas", { class: "pixels", role: "img" });
  drawPixels(canvas, values, shape, top);
  canvas.setAttribute(
    "aria-label",
    `Image of ${shape.join(" by ")} values from ${elementText(Math.min(...values))} to ${elementText(Math.max(...values))}`,
  );
  return canvas;
}

/** Named spans of a text, with a colour for each name; null if the text is not of this form. */
function spans(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    return null;
  }
  if (!Array.isArray(found) || !found.every((one) => typeof one?.word === "string")) return null;
  if (!found.length) return make("div", { class: "quiet" }, "no entities");
  const names = [...new Set(found.map((one) => one.entity_group ?? one.entity))];
  const marks = found.map((one) => {
    const name = one.entity_group ?? one.entity;
    const mark = make("mark", { class: "span" }, one.word, make("small", {}, ` ${name} ${percent(one.score)}`));
    mark.style.setProperty("--hue", String((names.indexOf(name) * 137) % 360));
    return mark;
  });
  return make("div", { class: "spans" }, ...marks);
}

/** A row of a tensor, as an element. */
function row(tensor, index, { imageTop, labels }) {
  const values = rowOf(tensor, index);
  const shape = tensor.shape.slice(1);
  const isFloat = tensor.datatype.startsWith("FP") && values.every(Number.isFinite);
  if (values.length === 1) {
    const [value] = values;
    if (isFloat && /probability$/.test(tensor.name)) return bars([value], [""], percent, 1);
    const text = elementText(value);
    const entities = tensor.name === "entities" && spans(text);
    if (entities) return entities;
    if (text.length > LONGEST_WORD) return make("div", {}, text);
    return make("div", { class: "word" }, text || "(empty)");
  }
  const sides = shape.length === 3 && shape[0] === 1 ? shape.slice(1) : shape;
  if (isFloat && sides.length === 2 && Math.min(...sides) >= 4) {
    return pixels(values, sides, imageTop ?? (Math.max(...values.map(Math.abs)) || 1));
  }
  if (isFloat && shape.length === 1 && values.length >= 2 && values.length <= MOST_BARS) return numbers(tensor.name, values, labels ?? []);
  if (isFloat && shape.length === 1 && values.length > MOST_BARS) {
    return make("div", {}, `${values.length} numbers: ${values.slice(0, 6).map(elementText).join(", ")}, …`);
  }
  const text = jsonText(nest(values, shape));
  return make("pre", { class: "code" }, text.length > 4000 ? `${text.slice(0, 4000)} …` : text);
}

function output(tensor, options) {
  const rows = tensor.shape[0] ?? 1;
  const box = make("div", { class: "output", "data-output": tensor.name });
  box.append(make("span", { class: "name" }, `${tensor.name} · ${tensor.datatype} [${tensor.shape.join(", ")}]`));
  if (!tensor.data) box.append(make("div", { class: "quiet" }, "no JSON form"));
  else if (tensor.data.length) for (let index = 0; index < Math.min(rows, MOST_ROWS); index++) box.append(row(tensor, index, options));
  else box.append(make("div", { class: "quiet" }, "no elements"));
  if (rows > MOST_ROWS) box.append(make("div", { class: "quiet" }, `and ${rows - MOST_ROWS} more rows`));
  return box;
}

/**
 * An answer of the infer route, by head if the model has heads.
 *
 * @param imageTop value of full ink in an image
 */
export function answer(content, model, imageTop) {
  const outputs = content.outputs ?? [];
  const shown = (tensors) =>
    [...tensors]
      .sort((one, other) => weight(one) - weight(other))
      .map((tensor) => output(tensor, { imageTop, labels: model.outputs.find(({ name }) => name === tensor.name)?.labels }));
  if (!model.heads.length) return make("div", {}, ...shown(outputs));
  const heads = model.heads.map((head) => {
    const own = outputs.filter((tensor) => head.outputs.includes(tensor.name));
    const reason = content.parameters?.[`head.${head.name}.reason`];
    const missing = own.length ? null : make("p", { class: "error" }, reason ?? "no answer");
    return make("section", { class: "head", "data-head": head.name }, make("h3", {}, head.name), missing, ...shown(own));
  });
  return make("div", { class: "heads" }, ...heads);
}

/** Sort order: words before bars before long lists. */
const weight = (tensor) => (tensor.data?.length === 1 ? (tensor.datatype === "BYTES" ? 0 : 1) : tensor.data?.length > MOST_BARS ? 3 : 2);
