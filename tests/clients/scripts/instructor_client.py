"""instructor with its default mode, which forces a call, and its JSON modes."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{os.environ['STOKER_URL']}/v1", api_key="none")


class River(BaseModel):
    name: str


def ask(mode, text):
    made = instructor.from_openai(client, **({} if mode is None else {"mode": mode}))
    messages = [{"role": "user", "content": text}]
    return made.chat.completions.create(model="any", messages=messages, response_model=River, max_retries=1)


call = 'say <tool_call>{"name": "River", "arguments": {"name": "Elbe"}}</tool_call>'
assert ask(None, call).name == "Elbe"
assert ask(instructor.Mode.JSON_SCHEMA, 'say {"name": "Oder"}').name == "Oder"
print("its default mode (a forced call) and JSON_SCHEMA")
