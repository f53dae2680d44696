"""pydantic-ai with its default settings: a tool, and a typed output by a forced call, over Responses and over chat."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ["STOKER_URL"]
openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


class River(BaseModel):
    name: str


for model in (OpenAIResponsesModel("any", provider=openai), OpenAIChatModel("any", provider=openai)):
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        return f"say sunny in {city}"

    called = 'say <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    first = agent.run_sync(called)
    assert first.output == "sunny in Rome", first.output
    assert agent.run_sync("say two", message_history=first.all_messages()).output == "two"
    typed = Agent(model, output_type=River)
    found = typed.run_sync('say <tool_call>{"name": "final_result", "arguments": {"name": "Elbe"}}</tool_call>')
    assert found.output == River(name="Elbe"), found.output
print("a tool, two turns and a typed output over Responses and over chat")
