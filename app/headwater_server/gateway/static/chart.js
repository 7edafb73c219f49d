// A line chart of the last minutes: a single SVG, whose paths are replaced each second.

import { make, makeSvg, say } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 80;
const GAP_S = 12;

/** Round up to 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  /**
   * @param title the chart's title
   * @param lines [name, key of the figures] for each line, at most three
   * @param format formats a value as text
   * @param least smallest upper end of the vertical axis
   */
  constructor(title, lines, format, least, shown) {
    this.title = title;
    this.lines = lines;
    this.format = format;
    this.least = least;
    this.shown = shown;
    this.svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    for (const y of [0.5, HEIGHT / 2, HEIGHT - 0.5]) this.svg.append(makeSvg("path", { class: "grid", d: `M0 ${y}H${WIDTH}` }));
    this.paths = lines.map((_, index) => makeSvg("path", { class: `line-${index}` }));
    this.svg.append(...[...this.paths].reverse());
    this.top = make("span", { class: "top" });
    this.values = lines.map(() => make("b", {}, "–"));
    const values = lines.map(([name], index) => make("span", { class: `line-${index}` }, `${name} `, this.values[index]));
    this.element = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, title, make("span", { class: "values" }, ...values)),
      make("div", { class: "plot", "aria-hidden": "false" }, this.svg, this.top),
      make("div", { class: "axis", "aria-hidden": "true" }, make("span", {}, "3 min ago"), make("span", {}, "now")),
    );
  }

  /** Draw points, each [seconds ago, figures], oldest first. */
  draw(points) {
    const all = this.lines.flatMap(([, key]) => points.map(([, figures]) => figures[key] ?? 0));
    const top = ceiling(Math.max(this.least, ...all) * 1.05);
    say(this.top, this.format(top));
    this.lines.forEach(([, key], index) => {
      this.paths[index].setAttribute("d", this.#path(points, key, top));
      const last = points[points.length - 1]?.[1][key];
      say(this.values[index], this.format(last ?? null));
    });
    const spoken = this.lines.map(([name], index) => `${name} ${this.values[index].textContent}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, now: ${spoken}`);
  }

  #path(points, key, top) {
    let path = "";
    let before = null; // seconds ago of the point that this point is joined to
    for (const [ago, figures] of points) {
      const value = figures[key];
      if (value === null || value === undefined) {
        before = null;
        continue;
      }
      const x = (WIDTH * (1 - ago / this.shown)).toFixed(1);
      const y = (HEIGHT - 1.5 - ((HEIGHT - 3) * value) / top).toFixed(1);
      path += before !== null && before - ago < GAP_S ? `L${x} ${y}` : `M${x} ${y}h0`;
      before = ago;
    }
    return path;
  }
}
