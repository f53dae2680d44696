// The openai package for Node: chat, a stream, Responses with a second turn by its id, and an error of its class.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.STOKER_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "say one" }];
const first = await client.chat.completions.create({ model: "any", messages });
assert.equal(first.choices[0].message.content, "one");

let text = "";
for await (const chunk of await client.chat.completions.create({ model: "any", messages, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, "one");

const begun = await client.responses.create({ model: "any", input: "say two" });
const next = await client.responses.create({ model: "any", input: "say three", previous_response_id: begun.id });
assert.deepEqual([begun.output_text, next.output_text], ["two", "three"]);
const stream = client.responses.stream({ model: "any", input: "say four" });
assert.equal((await stream.finalResponse()).output_text, "four");

await assert.rejects(client.chat.completions.create({ model: "any", messages, colour: "red" }), OpenAI.BadRequestError);
console.log("chat, a stream, Responses with a second turn, an error");
