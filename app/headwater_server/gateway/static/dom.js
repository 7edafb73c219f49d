// Makes and changes elements. No markup is parsed from text, so the text of a model can't become markup.

export const byId = (id) => document.getElementById(id);

/** Make an element; attributes that begin with "on" are listeners, children are elements or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Set a text only if it differs: unchanged text isn't read out again by screen readers, and costs no layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let fields = 0;

/** A label, its control, and a line below for a note or an error. */
export function field(text, control, note = "") {
  control.id ||= `field-${++fields}`;
  const below = make("p", { class: "note", id: `${control.id}-note`, "data-usual": note }, note);
  control.setAttribute("aria-describedby", below.id);
  return make("div", { class: "field" }, make("label", { for: control.id }, text), control, below);
}

/** Show an error below a field's control; without an error, show another note or the usual note. */
export function fault(control, message, note) {
  const below = control.closest(".field").querySelector(".note");
  if (message) control.setAttribute("aria-invalid", "true");
  else control.removeAttribute("aria-invalid");
  below.classList.toggle("error", message !== "");
  say(below, message || (note ?? below.dataset.usual));
}
