// The AI SDK over chat, responses and messages: tools and reasoning, whole and streamed, and an object by a schema.
import assert from "node:assert/strict";
import { ANSWER, MODEL, TASK, URL, require, run, script, thought } from "./npm_cases.mjs";

const { generateText, streamText, stepCountIs, tool, Output } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { z } = require("zod");

const about = { baseURL: `${URL}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ name: "headwater", ...about, includeUsage: true })(MODEL);
const responses = createOpenAI(about).responses(MODEL);
const anthropic = createAnthropic(about)(MODEL);
const options = {
  headwater: { reasoningEffort: "high" },
  openai: { reasoningEffort: "high", reasoningSummary: "auto", forceReasoning: true, store: false },
  anthropic: { thinking: { type: "enabled", budgetTokens: 2048 } },
};

function asked(model) {
  const sums = [];
  const add = tool({
    description: "Add two numbers",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => (sums.push(a + b), a + b),
  });
  return [sums, { model, prompt: TASK, tools: { add }, stopWhen: stepCountIs(3), providerOptions: options, maxRetries: 0 }];
}

function check(sums, text, steps, usage) {
  assert.equal(text.trim(), ANSWER);
  assert.deepEqual(sums, [5, 42]);
  assert.equal(steps.length, 2);
  steps.forEach((step, n) => assert.equal(step.reasoningText?.trim(), thought(n + 1)));
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
}

async function whole(model) {
  const [sums, given] = asked(model);
  const result = await generateText(given);
  check(sums, result.text, result.steps, result.usage);
}

async function streamed(model) {
  const [sums, given] = asked(model);
  const errors = [];
  const result = streamText({ ...given, onError: ({ error }) => errors.push(error) });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  if (errors.length) throw errors[0];
  check(sums, text, await result.steps, await result.usage);
}

async function object(model) {
  const schema = z.object({ city: z.string(), days: z.number().int() });
  const prompt = script('{"city": "Oslo", "days": 3}');
  const result = await generateText({ model, prompt, output: Output.object({ schema }), maxRetries: 0 });
  assert.deepEqual(result.output, { city: "Oslo", days: 3 });
}

const structured = createOpenAICompatible({ name: "headwater", ...about, supportsStructuredOutputs: true })(MODEL);
await run(
  async function chat() { await whole(compatible); },
  async function chat_streamed() { await streamed(compatible); },
  async function chat_by_a_schema() { await object(structured); },
  async function responses_whole() { await whole(responses); },
  async function responses_streamed() { await streamed(responses); },
  async function responses_by_a_schema() { await object(responses); },
  async function messages() { await whole(anthropic); },
  async function messages_streamed() { await streamed(anthropic); },
);
