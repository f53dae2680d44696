"""openai-agents: a tool and a second turn over Responses, its default, and over chat completions."""

import os

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{os.environ['STOKER_URL']}/v1", api_key="none")


@function_tool
def weather(city: str) -> str:
    return f"say sunny in {city}"


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    agent = Agent(name="a", instructions="Be short.", tools=[weather], model=kind("any", client))
    asked = 'say <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    first = Runner.run_sync(agent, asked)
    assert first.final_output == "sunny in Rome", first.final_output
    second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "say two"}])
    assert second.final_output == "two", second.final_output
print("a tool and two turns, over Responses and over chat")
