// Anthropic's package for Node: a message, a stream, a tool and its result, tokens counted, and an error of its class.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.STOKER_URL, apiKey: "none", maxRetries: 0 });
const ask = (content) => ({ model: "any", max_tokens: 200, messages: [{ role: "user", content }] });
assert.equal((await client.messages.create(ask("say one"))).content[0].text, "one");
assert.equal(await client.messages.stream(ask("say two")).finalText(), "two");

const tools = [{ name: "weather", input_schema: { type: "object", properties: { city: { type: "string" } } } }];
const call = 'say <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>';
const called = await client.messages.stream({ ...ask(call), tools }).finalMessage();
const use = called.content.find((block) => block.type === "tool_use");
assert.deepEqual([called.stop_reason, use.input], ["tool_use", { city: "Rome" }]);
const result = [{ type: "tool_result", tool_use_id: use.id, content: "say sunny" }];
const messages = [
  { role: "user", content: call },
  { role: "assistant", content: called.content },
  { role: "user", content: result },
];
assert.equal((await client.messages.create({ model: "any", max_tokens: 20, messages, tools })).content[0].text, "sunny");

assert.ok((await client.messages.countTokens({ model: "any", messages, tools })).input_tokens > 20);
await assert.rejects(client.messages.create({ ...ask("x"), top_p: 7 }), Anthropic.BadRequestError);
console.log("a message, a stream, a tool and its result, tokens counted, an error");
