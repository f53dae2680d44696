"""`llm`, the command: a model of one line in its configuration, and a conversation that goes on."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = """\
- model_id: stoker
  model_name: any
  api_base: {url}/v1
  api_key_name: stoker
"""
with tempfile.TemporaryDirectory() as home:
    Path(home, "extra-openai-models.yaml").write_text(MODELS.format(url=os.environ["STOKER_URL"]))
    environment = {**os.environ, "LLM_USER_PATH": home, "LLM_LOAD_PLUGINS": ""}

    def llm(*arguments):
        command = [str(Path(sys.executable).with_name("llm")), "-m", "stoker", "--key", "none", *arguments]
        output = subprocess.check_output(command, env=environment, text=True, timeout=60, stdin=subprocess.DEVNULL)
        return output.strip()

    assert llm("say one") == "one"
    assert llm("-c", "say two") == "two"
print("a prompt, and a conversation that goes on")
