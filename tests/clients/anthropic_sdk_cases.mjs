// Anthropic's SDK for JavaScript: messages whole and streamed, tools and thinking, its tool runner, token counts, models.
import assert from "node:assert/strict";
import { ANSWER, MODEL, TASK, URL, require, run, script, thought } from "./npm_cases.mjs";

const { Anthropic } = require("@anthropic-ai/sdk");
const { betaZodTool } = require("@anthropic-ai/sdk/helpers/beta/zod");
const { z } = require("zod");

const client = new Anthropic({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const schema = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] };
const add = { name: "add", description: "Add two numbers", input_schema: schema };
const thinking = { type: "enabled", budget_tokens: 2048 };
const given = { model: MODEL, max_tokens: 4096, tools: [add], thinking };
const asked = { ...given, messages: [{ role: "user", content: TASK }] };

/** The content without ids. */
const parts = (message) => message.content.map(({ id, signature, caller, ...part }) => part);

/** The conversation after the results of a message's calls. */
function answered(message) {
  const results = message.content
    .filter(({ type }) => type === "tool_use")
    .map(({ id, input }) => ({ type: "tool_result", tool_use_id: id, content: String(input.a + input.b) }));
  const turn = { role: "assistant", content: message.content };
  return { ...given, messages: [...asked.messages, turn, { role: "user", content: results }] };
}

function check_calls(message) {
  assert.equal(message.stop_reason, "tool_use");
  const [thought_part, ...calls] = message.content;
  assert.equal(thought_part.thinking.trim(), thought(1));
  assert.deepEqual(calls.map(({ type, name, input }) => [type, name, input]), [
    ["tool_use", "add", { a: 2, b: 3 }],
    ["tool_use", "add", { a: 40, b: 2 }],
  ]);
}

function check_answer(message) {
  assert.equal(message.stop_reason, "end_turn");
  assert.equal(message.content.at(-1).text.trim(), ANSWER);
  assert.ok(message.usage.input_tokens + message.usage.cache_read_input_tokens > 0 && message.usage.output_tokens > 0);
}

async function messages() {
  const first = await client.messages.create(asked);
  check_calls(first);
  check_answer(await client.messages.create(answered(first)));
}

async function messages_streamed() {
  const whole = await client.messages.create(asked);
  const kinds = new Set();
  const stream = client.messages.stream(asked).on("streamEvent", (event) => kinds.add(event.type));
  const first = await stream.finalMessage();
  check_calls(first);
  assert.deepEqual(parts(first), parts(whole));
  for (const kind of ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_stop"])
    assert.ok(kinds.has(kind), kind);
  check_answer(await client.messages.stream(answered(first)).finalMessage());
}

async function tool_runner() {
  const sums = [];
  const tool = betaZodTool({
    name: "add",
    description: "Add two numbers",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    run: ({ a, b }) => (sums.push(a + b), String(a + b)),
  });
  for (const stream of [false, true]) {
    const runner = client.beta.messages.toolRunner({ ...asked, tools: [tool], max_iterations: 4, stream });
    check_answer(await runner.runUntilDone());
  }
  assert.deepEqual(sums, [5, 42, 5, 42]);
}

async function parsed() {
  const { zodOutputFormat } = require("@anthropic-ai/sdk/helpers/zod");
  const format = zodOutputFormat(z.object({ city: z.string(), days: z.number().int() }));
  const content = script('{"city": "Oslo", "days": 3}');
  const messages = [{ role: "user", content }];
  const answer = await client.messages.parse({ model: MODEL, max_tokens: 99, messages, output_config: { format } });
  assert.deepEqual(answer.parsed_output, { city: "Oslo", days: 3 });
}

async function count_tokens() {
  const { model, messages, tools, thinking } = asked;
  const { input_tokens } = await client.messages.countTokens({ model, messages, tools, thinking });
  const { usage } = await client.messages.create(asked);
  assert.equal(usage.input_tokens + (usage.cache_read_input_tokens ?? 0), input_tokens);
}

async function models() {
  const ids = [];
  for await (const { id } of client.models.list()) ids.push(id);
  assert.ok(ids.includes(MODEL), ids.join());
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
}

async function errors() {
  await assert.rejects(client.messages.create({ ...asked, model: "absent" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...asked, max_tokens: -1 }), Anthropic.BadRequestError);
}

await run(messages, messages_streamed, tool_runner, parsed, count_tokens, models, errors);
