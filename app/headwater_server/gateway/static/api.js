// Requests to the server that this page came from, their errors, and the same requests as curl lines.

const JSON_HEADERS = { "Content-Type": "application/json" };

let key = "";
const onUnauthorized = new Set();

/**
 * A failed request: the status, the server's message, and the field that it names in OpenAI's error object.
 * Status 0: there was no answer.
 */
export class Failure extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Use an API key from now on; it is kept only in this variable. */
export function useKey(value) {
  key = value;
}

export const hasKey = () => key !== "";

/** Register a listener that is called whenever the server asks for a key. */
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
    return { message: text.slice(0, 2000) }; // not the server's error object: perhaps a proxy's page
  }
}

// Numbers that the server writes as Triton and Python do, and that JSON doesn't have. A marked string replaces each.
const MARK = "\u0000number:";
const NO_JSON_NUMBERS = /"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity)\b/g;

function revived(_, value, context) {
  if (typeof value === "string" && value.startsWith(MARK)) return Number(value.slice(MARK.length));
  const isLost = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
  return isLost && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value;
}

/** Parse JSON that may contain NaN and infinities. Integers that a float can't hold stay exact. */
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

/** POST a body, which is text. Returns the answer, and the time that it took. */
export async function post(path, body, signal) {
  const begun = performance.now();
  const answer = await ask("POST", path, body, signal);
  const text = await answer.text();
  return { content: parse(text), seconds: (performance.now() - begun) / 1000 };
}

/** POST a body, and yield the events of the answer's stream as they arrive. Throws if the stream breaks. */
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
        signal?.throwIfAborted(); // after a cancellation, drop events that have already arrived
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A curl line for the same request. A key is replaced by the name of a variable. */
export function curl(path, body, { streams = false } = {}) {
  const parts = [`curl -s${streams ? "N" : ""} ${quote(location.origin + path)}`];
  if (key) parts.push('-H "Authorization: Bearer $HEADWATER_KEY"');
  parts.push("-H 'Content-Type: application/json'", `-d ${quote(body)}`);
  return parts.join(" \\\n  ");
}
