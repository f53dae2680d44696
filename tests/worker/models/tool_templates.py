"""Small chat templates that treat tools and thinking as the named families do, and a conversation with each."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tests.worker.models.tool_formats import wrapper
from tests.worker.pipeline.answers import SCRIPTED

from stoker_shared import build_request
from stoker_worker.models.answer_formats import answer_format
from stoker_worker.models.tokenizer import ModelTokenizer
from stoker_worker.pipeline.answer import read_answer
from stoker_worker.pipeline.prompt import Prompt, build_prompt, next_transcript
from stoker_worker.ports import CompletedGeneration, LoadedModel, Transcript

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city in the next days.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
THOUGHT = "The user asks for the weather, and I do not know it. There is a tool for it, so I call that with the city."
_JSON_CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        ends: the token that ends a call, and the one that ends any other answer.
        said: the model's answer, from its thinking, whether it calls the tool, and its text.
    """

    parser: str | None
    added: tuple[str, ...]
    ends: tuple[str, str]
    template: str
    said: Callable[[str, bool, str], str]

    def load(self) -> tuple[LoadedModel, ModelTokenizer]:
        made = wrapper(self.parser, self.added, template=self.template, eos=self.ends)
        tokenizer = ModelTokenizer(made)
        form = answer_format(made)
        return dataclasses.replace(SCRIPTED, tokenizer=tokenizer, answer_format=form), tokenizer


def _chatml(assistant: str, tool: str) -> str:
    """Tools in the system message. `tool` renders a tool message, `assistant` an answer up to its end."""
    return (
        "{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{{ tools | tojson }}"
        "{{ '\n<|im_end|>\n' }}{% endif %}" + _LAST_QUESTION + "{%- for m in messages %}"
        "{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}" + assistant + "{{ '<|im_end|>\n' }}"
        "{%- elif m.role == 'tool' %}" + tool + "{%- else %}"
        "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


_LAST_QUESTION = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_CALLS = (
    "{%- for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' ~ (call.function.arguments | tojson)'
    " ~ '}\n</tool_call>' }}{% endfor %}"
)
_TOOL_AS_USER = (
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_SPLIT = (
    "{%- set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}"
)
_QWEN3 = (
    _SPLIT + "{%- if loop.index0 > ns.last and thought %}{{ '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' }}"
    "{% endif %}{{ said.lstrip('\n') }}" + _CALLS
)
_MISTRAL = (
    "{{ '<s>' }}" + _LAST_QUESTION + "{%- for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{%- elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] ~ ', \"id\": \"' ~ call.id ~ '\"}' }}{% endfor %}]</s>"
    "{%- elif m.role == 'tool' %}"
    "{% if not loop.previtem.tool_calls %}{{ raise_exception('a result without its call') }}{% endif %}"
    "[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{%- else %}{{ ' ' ~ m.content ~ '</s>' }}{% endif %}{% endfor %}"
)
_DEEPSEEK = (
    "{{ '<bos>' }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|User|>' ~ m.content }}"
    "{%- elif m.role == 'tool' %}{{ '<|tool_output|>' ~ m.content }}"
    "{%- else %}{{ '<|Assistant|>' ~ (m.content or '').split('</think>')[-1].strip() }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</tool_call>' }}"
    "{%- endfor %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
_LLAMA = (
    "{{ '<bos>' }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|start|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end|>\n\n' }}"
    "{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' ~ f.name ~ '\", \"parameters\": ' ~ (f.arguments | tojson) ~ '}' }}"
    "{%- else %}{{ m.content | trim }}{% endif %}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
_GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role != 'tool' %}"
    "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}{% endif %}"
    "{%- if loop.first and tools %}{{ tools | tojson }}{% endif %}"
    "{%- if m.role == 'tool' %}{{ '<start_of_turn>tool\n' ~ m.content ~ '<end_of_turn>\n' }}"
    "{%- else %}{{ (m.content or '') | trim }}{% for call in m.tool_calls or [] %}"
    "{{ '<start_function_call>call:' ~ call.function.name ~ '{' }}"
    "{% for key, x in call.function.arguments | dictsort %}{% if not loop.first %},{% endif %}"
    "{{ key ~ ':' ~ ('<escape>' ~ x ~ '<escape>' if x is string else x) }}{% endfor %}{{ '}<end_function_call>' }}"
    "{% endfor %}{{ '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_GLM_CALL = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
_GLM = (
    "{{ '[gMASK]' }}{% if tools %}{{ '<|system|>' ~ tools | tojson }}{% endif %}"
    + _LAST_QUESTION
    + "{%- for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' ~ m.content }}"
    "{%- elif m.role == 'tool' %}{{ '<|observation|>\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{%- else %}{{ '<|assistant|>\n' }}" + _SPLIT + "{{ '<think>' ~ (thought.strip() if loop.index0 > ns.last else '')"
    " ~ '</think>' }}{% if said.strip() %}{{ '\n' ~ said.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' ~ call.function.name ~ '\n' }}"
    "{% for key, x in call.function.arguments | items %}{{ '<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' ~ x ~ "
    "'</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_GEMMA4 = (
    "{{ '<bos>' }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{{ '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</tool_call>' }}"
    "{% endfor %}{% if m.tool_calls %}{% for result in messages[loop.index:] if result.role == 'tool' %}"
    "{{ '<|response>' ~ result.content ~ '<response|>' }}{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)


def _hermes(thought: str, calls: bool, text: str) -> str:
    return f"<tool_call>\n{_JSON_CALL}\n</tool_call>" if calls else text


def _thinking(thought: str, calls: bool, text: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{_hermes(thought, calls, text)}"


_QWEN2 = _chatml("{{ m.content or '' }}" + _CALLS, _TOOL_AS_USER)
_CHAT = ("<|im_start|>", "<tool_call>", "</tool_call>")
_THINK = ("<think>", "</think>")

FAMILIES = {
    "Qwen 2.5: keeps all": Family("json_tools", _CHAT, ("<|im_end|>", "<|im_end|>"), _QWEN2, _hermes),
    "the same, calls written without spaces": Family(
        "json_tools",
        _CHAT,
        ("<|im_end|>", "<|im_end|>"),
        _QWEN2,
        lambda thought, calls, text: _hermes(thought, calls, text).replace('": ', '":').replace(", ", ","),
    ),
    "Qwen 3: drops the thinking of earlier turns": Family(
        "json_tools", (*_CHAT, *_THINK), ("<|im_end|>", "<|im_end|>"), _chatml(_QWEN3, _TOOL_AS_USER), _thinking
    ),
    "GLM: the same, in XML": Family(
        "glm47",
        ("<|assistant|>", *_THINK),
        ("<|observation|>", "<|user|>"),
        _GLM,
        lambda thought, calls, text: f"<think>{thought}</think>\n{_GLM_CALL if calls else text}",
    ),
    "DeepSeek R1: opens the thinking, drops all of it": Family(
        "json_tools",
        ("<|User|>", "<|Assistant|>", "<|tool_output|>", *_CHAT[1:], *_THINK),
        ("<eos>", "<eos>"),
        _DEEPSEEK,
        lambda thought, calls, text: f"{thought}\n</think>\n\n{_hermes(thought, calls, text)}",
    ),
    "Mistral: tools before the last question": Family(
        "mistral",
        ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
        ("</s>", "</s>"),
        _MISTRAL,
        lambda thought, calls, text: f"[TOOL_CALLS][{_JSON_CALL}]" if calls else f" {text}",
    ),
    "Gemma: arguments sorted": Family(
        "function_gemma",
        ("<start_of_turn>", "<start_function_call>", "<end_function_call>"),
        ("<end_of_turn>", "<end_of_turn>"),
        _GEMMA,
        lambda thought, calls, text: (
            "<start_function_call>call:weather{days:3,city:<escape>Oslo<escape>}<end_function_call>" if calls else text
        ),
    ),
    "Gemma 4: results in the turn of their call": Family(
        "json_tools", ("<|turn>", *_CHAT[1:]), ("<turn|>", "<turn|>"), _GEMMA4, _hermes
    ),
    "Llama 3: no parser in mlx-lm, calls are text": Family(
        None,
        ("<|start|>", "<|end|>"),
        ("<|eot|>", "<|eot|>"),
        _LLAMA,
        lambda thought, calls, text: _JSON_CALL.replace("arguments", "parameters") if calls else text,
    ),
}


@dataclass
class Conversation:
    """One agent's jobs on a model of a family.

    Attributes:
        sent: all messages so far, as a producer keeps them.
        prompts: of each job, and how many of its tokens the agent's cache had.
    """

    family: Family
    context: str
    keeps_thinking: bool = True

    def __post_init__(self) -> None:
        self.model, self.tokenizer = self.family.load()
        self.transcript: Transcript | None = None
        self.sent: list[dict[str, Any]] = []
        self.prompts: list[tuple[Prompt, int]] = []
        self.calls: Sequence[Any] = ()

    def turn(self, messages: list[dict[str, Any]], *, calls: bool, text: str = "") -> None:
        self.sent += messages
        fields = {"agent_id": "a", "context": self.context, "tools": TOOLS}
        request = build_request({**fields, "messages": messages if self.context == "append" else self.sent})
        prompt = build_prompt(request, self.transcript, self.model, self.tokenizer)
        had = self.transcript.token_ids if self.transcript else ()
        same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt.ids, had, strict=False))
        self.prompts.append((prompt, len([*same])))
        said = self.family.said(THOUGHT, calls, text)
        ids = self.tokenizer.encode(said + self.family.ends[not calls], special_start=False)
        done = CompletedGeneration(0, "finished", tuple(ids), said, "eos", len(ids))
        answer = read_answer(request, prompt, done, self.model, f"{len(self.prompts)}")
        choice = answer.choice
        self.calls = choice.tool_calls or []
        self.transcript = next_transcript(prompt, done, answer.message(), self.model)
        back: dict[str, Any] = {
            "role": "assistant",
            "content": choice.content or None if self.calls else choice.content,
        }
        if self.calls:
            back["tool_calls"] = [call.model_dump(mode="json") for call in self.calls]
        if self.keeps_thinking and choice.reasoning:
            back["reasoning"] = choice.reasoning
        self.sent.append(back)

    def tool_result(self) -> list[dict[str, Any]]:
        call_id = self.calls[0].id if self.calls else "none00000"
        return [{"role": "tool", "content": json.dumps({"sky": "clear", "celsius": 4}), "tool_call_id": call_id}]

    def run(self) -> "Conversation":
        """A question, its call, the result, the answer, and another question."""
        self.turn([{"role": "user", "content": "What is the weather in Oslo?"}], calls=True)
        self.turn(self.tool_result(), calls=False, text="Clear, at 4 degrees.")
        self.turn([{"role": "user", "content": "And do I need a coat?"}], calls=False, text="Yes.")
        return self
