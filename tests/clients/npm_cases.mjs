// What the cases of npm's packages use: see cases.py. The packages lie in the folder that HEADWATER_PACKAGES names.
import { createRequire } from "node:module";
import { join } from "node:path";

export const URL = process.env.HEADWATER_URL;
export const MODEL = "obedient";
export const require = createRequire(join(process.env.HEADWATER_PACKAGES, "package.json"));

/** What a prompt must have for these answers, in order: texts, or lists of [name, arguments]. */
export function script(...steps) {
  const text = Buffer.from(JSON.stringify(steps)).toString("base64url");
  return `script.${text}.end`;
}

/** The task of sums.py. */
export const TASK = `Add the numbers. ${script([["add", { a: 2, b: 3 }], ["add", { a: 40, b: 2 }]], "The sum is {result}")}`;
export const ANSWER = "The sum is 42";

/** What the model thinks before its answer of this number, from 1. */
export const thought = (number) => `This is answer ${number}.`;

/** Run cases, each of which passes unless it throws. */
export async function run(...cases) {
  for (const one of cases) {
    let error = null;
    try {
      await one();
    } catch (failure) {
      error = String(failure?.stack ?? failure).slice(0, 3000) + JSON.stringify(failure?.responseBody ?? "");
    }
    process.stdout.write(JSON.stringify({ case: one.name, error }) + "\n");
  }
}
