// The status page: charts, and a table with a row for each deployment and each replica.

import { Chart } from "./chart.js";
import { byId, make, say } from "./dom.js";
import { byClient, failures, History, SHOWN_S } from "./history.js";
import { age, bytes, count, duration, shares } from "./numbers.js";

const history = new History();
const charts = [
  new Chart("Requests/s", [["ok", "ok"], ["client", "byClient"], ["failed", "failed"]], count, 1, SHOWN_S),
  new Chart("Latency", [["p50", "p50"], ["p99", "p99"]], duration, 0.001, SHOWN_S),
  new Chart("Rows per call", [["mean", "rows"]], count, 1, SHOWN_S),
  new Chart("Waiting", [["rows", "waiting"]], count, 1, SHOWN_S),
  new Chart("In flight", [["requests", "inFlight"], ["sequences", "active"]], count, 1, SHOWN_S),
  new Chart("Generated tokens/s", [["all", "tokens"]], count, 1, SHOWN_S),
];

/** Table rows by key. A row keeps its elements as long as its key is in the table. */
class Rows {
  constructor(body, labels) {
    this.body = body;
    this.labels = labels;
    this.rows = new Map();
  }

  show(entries) {
    const keys = new Set(entries.map(([key]) => key));
    for (const [key, row] of this.rows) if (!keys.has(key)) row.element.remove(), this.rows.delete(key);
    entries.forEach(([key, fill], index) => {
      if (!this.rows.has(key)) this.rows.set(key, this.#made());
      const row = this.rows.get(key);
      if (this.body.children[index] !== row.element) this.body.insertBefore(row.element, this.body.children[index] ?? null);
      fill(row.cells);
    });
  }

  #made() {
    const cells = this.labels.map(([label, kind], index) =>
      index ? make("td", { "data-label": label, class: kind }) : make("th", { scope: "row" }),
    );
    return { element: make("tr", {}, ...cells), cells };
  }
}

const deployments = new Rows(byId("deployments"), [
  ["Name"], ["State", "state"], ["Replicas", "number"], ["Requests/s", "number"], ["p50", "number"], ["p99", "number"],
  ["Rows/call", "number"], ["Waiting", "number"], ["In flight", "number"], ["Client errors", "number"],
  ["Failed", "number"],
]);
const replicas = new Rows(byId("replicas"), [
  ["Replica"], ["Deployment"], ["State"], ["Device"], ["Threads", "number"], ["Memory", "number"], ["GPU memory", "number"],
]);

/** Set a text with a quieter text below it. */
function sayBoth(cell, text, below, dot) {
  if (!cell.children.length) {
    const mark = dot === undefined ? null : make("span", { "aria-hidden": "true" });
    cell.append(make("span", {}), make("span", { class: "quiet" }));
    if (mark) cell.prepend(mark);
  }
  const [quiet, loud, mark] = [...cell.children].reverse();
  say(loud, text);
  say(quiet, below);
  if (mark) mark.className = `dot ${dot}`;
}

/** How full the engines' caches are, since sequences mostly wait for cache; empty if there is no cache. */
function cacheUse(model) {
  if (!model?.cache_limit_tokens) return "";
  return `cache ${Math.round((model.cache_used_tokens / model.cache_limit_tokens) * 100)}\u00a0%`;
}

/** How a shadow's answers differ from the answers that clients got. */
function comparison({ requests, failed, dropped, disagreements, difference, mean_s }, bounds) {
  const last = difference.counts.findLastIndex((value) => value > 0);
  const greatest = last < bounds.length ? `at most ${bounds[last]}` : `over ${bounds[bounds.length - 1]}`;
  return [
    `${requests} compared`,
    last < 0 ? "" : `differences ${greatest}`,
    requests ? `${disagreements} disagreements` : "",
    mean_s.answer ? `${count(mean_s.shadow / mean_s.answer)} times as long` : "",
    `${failed} failed`,
    `${dropped} dropped`,
  ].filter(Boolean).join(", ");
}

/** The kind of a deployment; for versions, how they share requests. */
function about(one, status) {
  if (one.traffic) {
    const watched = one.watched ? ", compared for a rollback" : "";
    const change = one.rolled_back ? "undoing the rollback" : "a rollback";
    const before = one.before ? `; ${change} gives ${shares(one.before)}` : "";
    return `${one.kind} with versions, default ${one.default}${watched}${before}`;
  }
  if (!one.part_of) return one.kind;
  const kind = `${one.kind} of ${one.part_of}`;
  if (one.compared) return `${kind}, shadow: ${comparison(one.compared, status.bounds.difference)}`;
  return one.share === undefined ? kind : `${kind}, ${count(100 * one.share)}\u00a0% of the requests`;
}

function deploymentRow(one, status) {
  return [one.name, (cells) => {
    const figures = history.now(one.name);
    const since = `for ${age(status.now_s - one.since_s)}`;
    const shortage = one.shortage ? `; ${one.shortage}` : "";
    sayBoth(cells[0], one.name, about(one, status));
    sayBoth(cells[1], one.state, `${since}${one.reason ? `: ${one.reason}` : ""}${shortage}`, one.state);
    sayBoth(cells[2], one.replicas ? `${one.replicas.ready} of ${one.replicas.wanted}` : "–", (one.devices ?? []).join(", "));
    say(cells[3], count(figures?.rate ?? null));
    say(cells[4], duration(figures?.p50));
    say(cells[5], duration(figures?.p99));
    say(cells[6], count(figures?.rows));
    sayBoth(cells[7], count(one.waiting), cacheUse(one.language_model));
    const active = one.language_model?.active_sequences;
    const cached = figures?.cached ?? null;
    const share = cached === null ? "–" : `${Math.round(cached * 100)}\u00a0%`;
    // The share's line is always there: the layout of the table stays the same while prompts come and go.
    sayBoth(cells[8], count(one.in_flight), active === undefined ? "" : `${active} sequences\n${share} cached`);
    say(cells[9], count(byClient(one.outcomes)));
    say(cells[10], count(failures(one.outcomes)));
    const told = Object.entries(one.outcomes).map(([name, value]) => `${name.replaceAll("_", " ")}: ${value}`).join("\n");
    cells[9].title = cells[10].title = told;
  }];
}

function replicaRow(one, replica) {
  return [replica.id, (cells) => {
    say(cells[0], replica.id);
    say(cells[1], one.name);
    say(cells[2], replica.state);
    if (replica.node) sayBoth(cells[3], replica.device || "–", `on ${replica.node}`);
    else say(cells[3], replica.device || "–");
    say(cells[4], replica.threads === null ? "–" : String(replica.threads));
    say(cells[5], bytes(replica.resident_bytes));
    say(cells[6], bytes(replica.gpu_bytes));
  }];
}

function summarise(status) {
  const own = status.deployments.filter((one) => one.part_of === null);
  const ready = own.filter((one) => one.state === "READY").length;
  const figures = history.now("");
  const parts = [
    ["", `${ready} of ${own.length}`, " deployments ready"],
    [" · ", count(figures?.rate ?? 0), " requests/s"],
    [" · ", count(own.reduce((sum, one) => sum + one.in_flight, 0)), " in flight"],
    [" · ", count(status.deployments.reduce((sum, one) => sum + one.waiting, 0)), " waiting"],
  ];
  byId("summary").replaceChildren(...parts.flatMap(([before, bold, after]) => [before, make("b", {}, bold), after]));
}

function choices(status) {
  const select = byId("chart-choice");
  const names = status.deployments.map((one) => one.name);
  const known = [...select.options].slice(1).map((option) => option.value);
  if (names.join("\n") === known.join("\n")) return;
  const chosen = names.includes(select.value) ? select.value : "";
  select.replaceChildren(select.options[0], ...names.map((name) => make("option", { value: name }, name)));
  select.value = chosen;
}

function drawCharts() {
  const points = history.over(byId("chart-choice").value);
  for (const chart of charts) chart.draw(points);
}

export function setUp() {
  byId("charts").append(...charts.map((chart) => chart.element));
  byId("chart-choice").addEventListener("change", drawCharts);
  drawCharts();
}

/** Add a status, and show it if the page is in view. */
export function update(status, isShown) {
  history.add(status);
  if (!isShown) return;
  choices(status);
  summarise(status);
  drawCharts();
  deployments.show(status.deployments.map((one) => deploymentRow(one, status)));
  replicas.show(status.deployments.flatMap((one) => one.replica_list.map((replica) => replicaRow(one, replica))));
  byId("tables").hidden = false; // shown only now: before the first answer, the tables' rows would move what is below
  const whose = status.scope === "server" ? "" : " Counts cover a single gateway worker: server.pages has no metrics.";
  say(byId("scope-note"), `Rates, quantiles and means cover the last ten seconds.${whose}`);
}
