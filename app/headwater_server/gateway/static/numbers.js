// Numbers formatted for people.

const trim = (value, digits) => Number(value.toPrecision(digits));

/** Three digits, with large numbers in thousands or millions. */
export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 1e6) return `${trim(value / 1e6, 3)} M`;
  if (value >= 1e4) return `${trim(value / 1e3, 3)} k`;
  return value >= 100 ? String(Math.round(value)) : String(trim(value, value < 0.01 ? 1 : 3));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.995) return `${trim(seconds * 1e3, 2)} ms`;
  return `${trim(seconds, 3)} s`;
}

/** How long ago, roughly. */
export function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 2 ** 30) return `${trim(value / 2 ** 30, 3)} GiB`;
  return `${Math.round(value / 2 ** 20)} MiB`;
}

/** A tensor's element: fractions with four digits, integers in full. */
export function element(value) {
  return typeof value === "number" && !Number.isInteger(value) ? String(trim(value, 4)) : String(value);
}

/** How versions share requests, in words. */
export const shares = (traffic) =>
  Object.entries(traffic).map(([name, share]) => `${count(100 * share)}\u00a0% to ${name}`).join(", ");
