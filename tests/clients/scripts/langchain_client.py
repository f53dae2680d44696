"""LangChain: a chain, a stream, tools bound to a model, structured output by a forced call, and its Anthropic class."""

import os

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = os.environ["STOKER_URL"]
chat = ChatOpenAI(model="any", base_url=f"{URL}/v1", api_key="none")


class River(BaseModel):
    name: str


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"say sunny in {city}"


assert chat.invoke("say one").content == "one"
assert "".join(part.content for part in chat.stream("say two")) == "two"

asked = [HumanMessage('say <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>')]
called = chat.bind_tools([weather]).invoke(asked)
asked += [called, ToolMessage(weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"])]
assert chat.bind_tools([weather]).invoke(asked).content == "sunny in Rome"

forced = chat.with_structured_output(River, method="function_calling")
found = forced.invoke('say <tool_call>{"name": "River", "arguments": {"name": "Elbe"}}</tool_call>')
assert found == River(name="Elbe")
assert chat.with_structured_output(River).invoke('say {"name": "Oder"}') == River(name="Oder")

responses = ChatOpenAI(model="any", base_url=f"{URL}/v1", api_key="none", use_responses_api=True)
assert responses.invoke("say three").text == "three"
claude = ChatAnthropic(model="any", base_url=URL, api_key="none", max_tokens=20)
assert claude.invoke("say four").content == "four"
print("chat, stream, tools, structured output twice; Responses and Messages")
