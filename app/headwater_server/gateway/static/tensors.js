// Tensors in JSON: nested lists, their shapes, and the elements that a datatype allows.

export const NO_JSON = ["FP16", "BF16"];

/** Nest a flat list into lists of a shape. */
export function nest(flat, shape) {
  if (!shape.length) return flat[0];
  if (shape.length === 1) return flat;
  const size = shape.slice(1).reduce((a, b) => a * b, 1);
  return Array.from({ length: shape[0] }, (_, index) => nest(flat.slice(index * size, (index + 1) * size), shape.slice(1)));
}

export const flatten = (value) => (Array.isArray(value) ? value.flatMap(flatten) : [value]);

/** The shape of nested lists. Throws an Error that names the place if they are uneven. */
export function shapeOf(value, where = "") {
  if (!Array.isArray(value)) return [];
  if (!value.length) return [0];
  const shapes = value.map((part, index) => shapeOf(part, `${where}[${index}]`));
  const first = shapes[0].join();
  const odd = shapes.findIndex((shape) => shape.join() !== first);
  if (odd > 0) throw new Error(`${where}[${odd}]: expected the shape [${first.replaceAll(",", ", ")}] of its neighbours, got [${shapes[odd].join(", ")}]`);
  return [value.length, ...shapes[0]];
}

export const shapeText = (shape) => `[${shape.map((dim, index) => (dim >= 0 ? dim : index ? "any" : "rows")).join(", ")}]`;

/** The error of a shape; empty if it is right. */
export function shapeFault(shape, expected) {
  const fits = shape.length === expected.length && expected.every((dim, index) => dim < 0 || dim === shape[index]);
  return fits ? "" : `expected the shape ${shapeText(expected)}, got [${shape.join(", ")}]`;
}

/** The error of the elements; empty if they are right. */
export function elementFault(flat, datatype) {
  const kind = datatype === "BOOL" ? "boolean" : datatype === "BYTES" ? "string" : "number";
  const isInteger = datatype.includes("INT");
  const odd = flat.findIndex((value) => {
    if (typeof value === "bigint") return kind !== "number";
    return typeof value !== kind || (isInteger && !Number.isInteger(value));
  });
  if (odd < 0) return "";
  const what = isInteger ? "whole numbers" : { boolean: "true or false", string: "strings", number: "numbers" }[kind];
  return `expected ${what} (${datatype}), got ${String(JSON.stringify(flat[odd])).slice(0, 40)}`;
}

/** JSON text that also has BigInt, NaN and infinities, which JSON.stringify refuses or loses. */
export function jsonText(value) {
  if (typeof value === "bigint" || typeof value === "number") return String(value);
  if (Array.isArray(value)) return `[${value.map(jsonText).join(",")}]`;
  if (value && typeof value === "object") {
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}:${jsonText(one)}`).join(",")}}`;
  }
  return JSON.stringify(value);
}

/** The elements of a row; the tensor's shape includes the batch axis. */
export const rowOf = (tensor, index) => {
  const size = tensor.shape.slice(1).reduce((a, b) => a * b, 1);
  return tensor.data.slice(index * size, (index + 1) * size);
};
