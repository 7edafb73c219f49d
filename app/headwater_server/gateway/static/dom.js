// Elements, made and changed. No markup is ever parsed from text, so nothing that a model says can be any.

export const byId = (id) => document.getElementById(id);

/** An element; attributes that begin with "on" are listeners, children are elements or text. */
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

/** Set a text, unless it is there: what doesn't change isn't read out again, and costs no layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let fields = 0;

/** A label, its control, and a line below that says what is expected or wrong. */
export function field(text, control, note = "") {
  control.id ||= `field-${++fields}`;
  const below = make("p", { class: "note", id: `${control.id}-note`, "data-usual": note }, note);
  control.setAttribute("aria-describedby", below.id);
  return make("div", { class: "field" }, make("label", { for: control.id }, text), control, below);
}

/** Say below a field's control what is wrong with it; if nothing is, what always stands there, or another note. */
export function fault(control, message, note) {
  const below = control.closest(".field").querySelector(".note");
  if (message) control.setAttribute("aria-invalid", "true");
  else control.removeAttribute("aria-invalid");
  below.classList.toggle("error", message !== "");
  say(below, message || (note ?? below.dataset.usual));
}
