"""LiteLLM: two turns with its own reply sent back, a tool, a stream, and Anthropic's form through its bridge."""

import os

import litellm

URL = os.environ["STOKER_URL"]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = 'say <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def ask(messages, **options):
    return litellm.completion(model="openai/any", api_base=f"{URL}/v1", api_key="none", messages=messages, **options)


messages = [{"role": "user", "content": "say one"}]
first = ask(messages).choices[0].message
messages += [first, {"role": "user", "content": "say two"}]
assert ask(messages).choices[0].message.content == "two"
again = [first.model_dump(), {"role": "user", "content": "say three"}]  # with all that LiteLLM has added
assert ask([messages[0], *again]).choices[0].message.content == "three"

asked = [{"role": "user", "content": CALL}]
called = ask(asked, tools=[TOOL]).choices[0].message
asked += [called, {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "say sunny"}]
assert ask(asked, tools=[TOOL]).choices[0].message.content == "sunny"

parts = [chunk.choices[0].delta.content or "" for chunk in ask(messages, stream=True)]
assert "".join(parts) == "two"

anthropic = litellm.completion(
    model="anthropic/any",
    api_base=URL,
    api_key="none",
    messages=[{"role": "user", "content": "say four"}],
    max_tokens=9,
)
assert anthropic.choices[0].message.content == "four"
responses = litellm.responses(model="openai/any", api_base=f"{URL}/v1", api_key="none", input="say five")
assert responses.output[0].content[0].text == "five"
print("two turns, a tool, a stream; Messages and Responses")
