// Requests to the server that this page came from, the errors they end in, and the same as a curl line.

const JSON_HEADERS = { "Content-Type": "application/json" };

let key = "";
const onUnauthorized = new Set();

/**
 * An answer that is none: its status, what the server says of it, and of which field, if OpenAI's error object names
 * one. Status 0: there was no answer.
 */
export class Failure extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Use an API key from now on; it is kept nowhere else. */
export function useKey(value) {
  key = value;
}

export const hasKey = () => key !== "";

/** Have something called whenever the server asks for a key. */
export function whenUnauthorized(listener) {
  onUnauthorized.add(listener);
}

async function ask(method, path, body, signal) {
  let answer;
  const headers = { ...(body === undefined ? {} : JSON_HEADERS), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  try {
    answer = await fetch(path, { method, body, signal, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The server doesn't answer.");
  }
  if (answer.ok) return answer;
  if (answer.status === 401) for (const listener of onUnauthorized) listener();
  const { message, param } = await reason(answer);
  throw new Failure(answer.status, `${answer.status} ${answer.statusText}: ${message}`.trim(), param);
}

async function reason(answer) {
  const text = await answer.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? { message: error } : { message: error.message, param: error.param };
  } catch {
    return { message: text.slice(0, 2000) }; // no error object of ours: a proxy's page, perhaps
  }
}

// What the server writes, as Triton and Python do, and JSON has no form for; a marked string stands for it.
const MARK = "\u0000number:";
const NO_JSON_NUMBERS = /"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity)\b/g;

function revived(_, value, context) {
  if (typeof value === "string" && value.startsWith(MARK)) return Number(value.slice(MARK.length));
  const isLost = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
  return isLost && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value;
}

/** Parse JSON, NaN and infinities in it; whole numbers that a float can't hold stay exact. */
export function parse(text) {
  try {
    return JSON.parse(text, revived);
  } catch (error) {
    const marked = text.replace(NO_JSON_NUMBERS, (one) => (one[0] === '"' ? one : JSON.stringify(MARK + one)));
    if (marked === text) throw error;
    return JSON.parse(marked, revived);
  }
}

export async function get(path, signal) {
  return parse(await (await ask("GET", path, undefined, signal)).text());
}

/** POST a body, which is text; gives what came back, and how long that took. */
export async function post(path, body, signal) {
  const begun = performance.now();
  const answer = await ask("POST", path, body, signal);
  const text = await answer.text();
  return { content: parse(text), seconds: (performance.now() - begun) / 1000 };
}

/** POST a body, and take the events of the stream that answers, as they come; a broken one throws. */
export async function* events(path, body, signal) {
  const answer = await ask("POST", path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Failure(0, "The connection was lost before the stream's end.");
      }
      if (part.done) return;
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        signal?.throwIfAborted(); // what has come already isn't wanted any more, either
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** What does the same in a shell. A key is named, not shown. */
export function curl(path, body, { streams = false } = {}) {
  const parts = [`curl -s${streams ? "N" : ""} ${quote(location.origin + path)}`];
  if (key) parts.push('-H "Authorization: Bearer $HEADWATER_KEY"');
  parts.push("-H 'Content-Type: application/json'", `-d ${quote(body)}`);
  return parts.join(" \\\n  ");
}
