// The page's start: its two views, the request for the server's status each second, and the key.

import { Failure, get, hasKey, useKey, whenUnauthorized } from "./api.js";
import { byId, say } from "./dom.js";
import * as playground from "./playground.js";
import * as status from "./status.js";

const EVERY_MS = 1000;
const ANSWER_WITHIN_MS = 5000;

let failedSince = null;

const viewed = () => (location.hash.startsWith("#/playground") ? "playground" : "status");

function show() {
  const view = viewed();
  for (const name of ["status", "playground"]) byId(name).hidden = name !== view;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "status" ? "Headwater" : "Playground · Headwater";
  if (view === "playground") playground.choose(decodeURIComponent(location.hash.split("/").slice(2).join("/")));
}

function sayTrouble(text) {
  say(byId("banner"), text);
  byId("banner").classList.toggle("bad", text !== "");
}

async function ask() {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), ANSWER_WITHIN_MS);
  try {
    const answer = await get("/v2/status", abort.signal);
    failedSince = null;
    byId("status").classList.remove("stale");
    say(byId("version"), answer.version);
    sayTrouble(answer.draining ? "The server is stopping: it answers running requests, and accepts no new requests." : "");
    status.update(answer, viewed() === "status");
    playground.update(answer);
  } catch (error) {
    if (!(error instanceof Failure) && error.name !== "AbortError") {
      console.error(error);
      sayTrouble(`This page failed to show the server's answer: ${error}. Trying again each second.`);
    } else if (error.status === 401 || error.status === 403) {
      sayTrouble(hasKey() ? error.message : "The server requires an API key.");
    } else {
      failedSince ??= new Date();
      byId("status").classList.add("stale");
      const reason = error.status ? ` (${error.message})` : "";
      sayTrouble(`No answer from the server since ${failedSince.toLocaleTimeString()}${reason}. Trying again each second.`);
    }
  } finally {
    clearTimeout(timer);
  }
}

async function poll() {
  for (;;) {
    const begun = performance.now();
    // Nothing is requested while the tab is hidden: the charts' lines have a gap there.
    if (!document.hidden) await ask();
    await new Promise((done) => setTimeout(done, Math.max(100, EVERY_MS - (performance.now() - begun))));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  playground.refresh();
  ask();
});
whenUnauthorized(() => {
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  if (document.activeElement === document.body) byId("key").focus();
});
byId("metrics-link").addEventListener("click", (event) => {
  if (!hasKey()) return;
  // A link can't send a key.
  event.preventDefault();
  sayTrouble("With a key, get /metrics with curl: a link sends no key.");
});
window.addEventListener("hashchange", show);
status.setUp();
show();
poll();
