// The AI SDK with three of its providers: text, a stream, a tool that it runs, and an object of a schema.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.env.STOKER_URL}/v1`;
const models = [
  createOpenAI({ baseURL, apiKey: "none" })("any"),
  createOpenAICompatible({ name: "stoker", baseURL })("any"),
  createAnthropic({ baseURL, apiKey: "none" })("any"),
];
const call = 'say <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>';
const weather = tool({
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `say sunny in ${city}`,
});
for (const model of models) {
  assert.equal((await generateText({ model, prompt: "say one" })).text, "one");
  let text = "";
  for await (const part of streamText({ model, prompt: "say two" }).textStream) text += part;
  assert.equal(text, "two");
  const ran = await generateText({ model, prompt: call, tools: { weather }, stopWhen: stepCountIs(3) });
  assert.match(ran.text, /sunny in Rome/);
}
const schema = z.object({ name: z.string() });
const { object } = await generateObject({ model: models[0], schema, prompt: 'say {"name": "Elbe"}' });
assert.deepEqual(object, { name: "Elbe" });
console.log("text, a stream, a tool that it runs and an object: Responses, chat and Messages");
