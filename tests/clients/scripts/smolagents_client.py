"""smolagents' ToolCallingAgent, which forces a call in each step."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent

model = OpenAIServerModel(model_id="any", api_base=f"{os.environ['STOKER_URL']}/v1", api_key="none")
agent = ToolCallingAgent(tools=[], model=model, max_steps=2)
asked = 'say <tool_call>{"name": "final_answer", "arguments": {"answer": "forty-two"}}</tool_call>'
assert agent.run(asked) == "forty-two"
print("a forced call that ends the run")
