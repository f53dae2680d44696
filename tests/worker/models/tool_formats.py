"""A call in each tool format of mlx-lm, and tokenizers with its markers. Needs mlx-lm, but runs no MLX."""

import importlib
import json
from typing import Any

from stoker_worker.models.answer_formats import answer_format
from stoker_worker.ports import AnswerFormat

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}
ARGUMENTS = {"city": "São <Paulo>", "days": 3}
_JSON = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
_ARGS = json.dumps(ARGUMENTS, ensure_ascii=False)
_XTML = (
    '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>São <Paulo>'
    '<|close|>argument<|sep|><|open|>argument key="days" type="integer"<|sep|>3<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
_GLM = (
    "weather<{0}arg_key>city</{0}arg_key><{0}arg_value>São <Paulo></{0}arg_value>"
    "<{0}arg_key>days</{0}arg_key><{0}arg_value>3</{0}arg_value>"
)
_XML = '<{0} name="weather"><{1} name="city">São <Paulo></{1}><{1} name="days">3</{1}></{0}>'

CALLS: dict[str, str] = {
    "function_gemma": "call:weather{city:<escape>São <Paulo><escape>,days:3}",
    "gemma4": 'call:weather{city:<|"|>São <Paulo><|"|>,days:3}',
    "glm47": _GLM.format(""),
    "json_tools": f"\n{_JSON}\n",
    "kimi_k2": f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_ARGS}<|tool_call_end|>",
    "kimi_k3": _XTML,
    "laguna": _GLM.format(""),
    "longcat": _GLM.format("longcat_"),
    "minicpm5": '"weather"><param name="city"><![CDATA[São <Paulo>]]></param><param name="days">3</param>',
    "minimax_m2": f"\n{_XML.format('invoke', 'parameter')}\n",
    "mistral": f"weather[ARGS]{_ARGS}",
    "muse_spark": _XML.format("atem:invoke", "atem:parameter"),
    "pythonic": '[weather(city="São <Paulo>", days=3)]',
    "qwen3_coder": (
        "\n<function=weather>\n<parameter=city>\nSão <Paulo>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n"
    ),
}
"""The text between the markers of one call of `TOOL` with `ARGUMENTS`, by the name of the parser."""


def wrapper(
    parser: str | None,
    added: tuple[Any, ...] | None = None,
    *,
    template: str | None = None,
    eos: tuple[str, ...] = ("<eos>",),
) -> Any:
    """mlx-lm's wrapper of a tokenizer with a token for each byte and the added ones, for models with the parser."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if added is None:
        added = () if parser == "muse_spark" else ("<think>", "</think>")
    backend.add_tokens([*added, *eos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos[0], tool_parser_type=parser)
    tokenizer.chat_template = template
    if parser is None:
        return TokenizerWrapper(tokenizer)
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return TokenizerWrapper(
        tokenizer,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        tool_parser=module.parse_tool_call,
        response_format=_response_format(parser),
    )


def _response_format(parser: str) -> Any:
    if parser != "muse_spark":
        return None
    return importlib.import_module("mlx_lm.chat_templates.muse_spark").RESPONSE_FORMAT


def call_text(form: AnswerFormat) -> str:
    """A call with its markers."""
    return f"{form.tool_start}{CALLS[form.tool_parser or '']}{form.tool_end}"


def format_of(parser: str) -> AnswerFormat:
    return answer_format(wrapper(parser))
