"""Every tool format of mlx-lm: whole calls are read, and cut off anywhere no character is lost and nothing raises."""

import json
import pkgutil
import sys

import pytest
from tests.worker.models.tool_formats import ARGUMENTS, CALLS, TOOL, call_text, format_of, wrapper
from tests.worker.models.tool_templates import Conversation, Family
from tests.worker.pipeline.answers import answer_to

from stoker_shared.answer_parts import cut
from stoker_worker.models.answer_formats import answer_format, with_time_limit
from stoker_worker.ports import AnswerFormat

pytestmark = pytest.mark.mlx


@pytest.fixture(params=CALLS, scope="module")
def form(request: pytest.FixtureRequest) -> AnswerFormat:
    return format_of(request.param)


def test_every_parser_of_mlx_lm_is_tried() -> None:
    import mlx_lm.tool_parsers

    assert {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)} == CALLS.keys()


def test_a_call_between_thinking_and_text_is_read(form: AnswerFormat) -> None:
    if form.first_state == "header":
        text = f"to=self<|message|>Hm.<|eom|><|start|>assistant to=weather<|message|>{call_text(form)}"
    else:
        text = f"<think>\nHm.\n</think>\n\nI look.\n{call_text(form)}"
    answer = answer_to(text, form, tools=[TOOL]).choice
    assert (answer.text, answer.reasoning, answer.finish_reason) == (text, "Hm.", "tool_calls")
    assert answer.content == ("" if form.first_state == "header" else "I look.")
    (call,) = answer.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    assert "São" in call.function.arguments


@pytest.mark.parametrize("ended_by", ["length", "eos"])
def test_cut_off_after_any_character_nothing_raises_and_nothing_is_lost(form: AnswerFormat, ended_by: str) -> None:
    whole = f"<think>Hm.</think>Look.{call_text(form)}{call_text(form)}."
    one_call = len(whole) - len(call_text(form)) - 1
    for stop in range(len(whole)):
        text = whole[:stop]
        taken: list[str] = []

        def take(inside: str, _is_closed: bool, taken: list[str] = taken) -> str | None:
            taken.append(inside)
            return "odd" if len(taken) % 2 else None

        parts = cut(text, form.markers(form.first_state, with_calls=True), take, form.tool_end)
        assert "".join(part.text for part in parts.found) == text
        answer = answer_to(text, form, ended_by=ended_by, tools=[TOOL]).choice
        calls = answer.tool_calls or ()
        for call in calls:
            assert call.function.name == "weather"
            if ended_by == "length":
                assert json.loads(call.function.arguments) == ARGUMENTS
        if form.first_state == "normal":
            assert answer.content.startswith("Look."[: max(0, stop - len("<think>Hm.</think>"))])
            assert len(calls) >= (1 if form.tool_end and stop >= one_call else 0)
            assert answer.tool_error is None or str(form.tool_start) in answer.content


def test_text_is_split_as_mlx_lms_state_machine_splits_it(form: AnswerFormat) -> None:
    from mlx_lm.generate import TextStateMachine, make_text_state_machine

    text = f"a<think>b</think>c{call_text(form)}d"
    if form.first_state == "header":
        text = f"to=self<|message|>b<|eom|>to=f<|message|>{call_text(form)}d<|eom|>to=user<|message|>e"
    machine = make_text_state_machine(wrapper(form.tool_parser or ""))
    state, segments = TextStateMachine.split(machine.make_state(form.first_state), text)
    _, rest, last = TextStateMachine.flush(state)
    theirs: dict[str, str] = {}
    for name, said in [*segments, (last, rest)]:
        theirs[name] = theirs.get(name, "") + said
    ours: dict[str, str] = {}
    markers = form.markers(form.first_state, with_calls=True)
    for kind, said in cut(text, markers, lambda _, __: None, form.tool_end).found:
        ours[kind] = ours.get(kind, "") + said
    assert ours.get("text", "") == theirs.get("normal", "")
    assert ours.get("reasoning", "") == theirs.get("reasoning", "")
    assert ours["call"] == f"{form.tool_start}{theirs['tool']}{form.tool_end}"


def test_markers_of_several_tokens_and_of_messages_are_known() -> None:
    vocabulary = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    form = answer_format(wrapper("kimi_k3", vocabulary))
    text = f"Hm.<|close|>think<|sep|><|open|>response<|sep|>Hi.<|close|>response<|sep|>{call_text(form)}"
    opening = "<|open|>think<|sep|>"
    answer = answer_to(text, form, opened=opening, tools=[TOOL]).choice
    assert (answer.reasoning, answer.content, len(answer.tool_calls or ())) == ("Hm.", "Hi.", 1)
    assert form.opening((1, 2, *form.think_start_ids)) == form.think_start_ids
    assert len(form.think_start_ids) > 1


def test_calls_of_mistrals_with_ids_have_their_names_and_these_ids() -> None:
    calls = '{0}weather[CALL_ID]VvvODy9mT[ARGS]{{"days": 3}}{0}look[CALL_ID]0123abcDE[ARGS]{{}}'.format("[TOOL_CALLS]")
    found = answer_to(calls, format_of("mistral"), tools=[TOOL]).choice.tool_calls or []
    assert [(call.function.name, call.id) for call in found] == [("weather", "VvvODy9mT"), ("look", "0123abcDE")]
    assert [json.loads(call.function.arguments) for call in found] == [{"days": 3}, {}]


CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
IN_CHANNELS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"


def test_the_channels_of_gpt_oss_are_thinking_and_text() -> None:
    made = wrapper(None, CHANNELS)
    form = answer_format(made)
    preamble = "<|end|><|start|>assistant<|channel|>commentary<|message|>I look. "
    for text, content in (
        (IN_CHANNELS.format("Hm.", "Hi."), "Hi."),
        (IN_CHANNELS.format("Hm." + preamble, "Hi."), "I look. Hi."),
    ):
        ids = tuple(made._tokenizer.encode(text + "<eos>", add_special_tokens=False))
        answer = answer_to(text, form, ids=ids)
        assert (answer.choice.text, answer.choice.reasoning, answer.choice.content) == (text, "Hm.", content)
        assert answer.reasoning_tokens == len("Hm.")
    assert answer_to("<|channel|>final<|message|>Hi.", form).choice.content == "Hi."
    call = '{"name": "weather", "arguments": {}}'
    forced = answer_to(f"<|channel|>analysis<|message|>Hm.<|end|>{call}", form, tools=[TOOL], tool_choice="required")
    assert (forced.choice.reasoning, len(forced.choice.tool_calls or ())) == ("Hm.", 1)


def test_an_agent_of_gpt_oss_goes_on_although_its_template_refuses_channels_in_an_answer() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
        "{% elif '<|channel|>' in m.content %}{{ raise_exception('channels') }}"
        "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    family = Family(None, CHANNELS, ("<|call|>", "<|return|>"), template, lambda *said: IN_CHANNELS.format(*said[::2]))
    for context in ("append", "full"):
        agent = Conversation(family, context)
        agent.turn([{"role": "user", "content": "One?"}], calls=False, text="One.")
        agent.turn([{"role": "user", "content": "Two?"}], calls=False, text="Two.")
        text = agent.tokenizer.decode(agent.prompts[1][0].ids)
        answered = "<|start|>user<|message|>One?<|end|><|start|>assistant<|channel|>final<|message|>One.<|end|>"
        assert text == f"{answered}<|start|>user<|message|>Two?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "function",
    [
        {"name": "weather"},
        {"name": "weather", "parameters": None},
        {"name": "weather", "parameters": {"properties": None}},
        {"name": "weather", "parameters": {"properties": {"city": True, "days": {"type": "integer"}}}},
        "weather",
    ],
    ids=str,
)
def test_a_call_is_read_whatever_schema_the_tool_has(form: AnswerFormat, function: object) -> None:
    tools = [{"type": "web_search"}, {"type": "function", "function": function}, {"function": {"name": 5}}]
    answer = answer_to(call_text(form), form, tools=tools).choice
    (call,) = answer.tool_calls or []
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, arguments["city"], int(arguments["days"])) == ("weather", "São <Paulo>", 3)


@pytest.mark.parametrize(
    ("parser", "looping"),
    [("gemma4", "call:x{"), ("kimi_k3", "<|open|>call "), ("muse_spark", "<atem:invoke a")],
)
def test_a_text_on_which_a_parser_takes_for_ever_stays_text(
    parser: str, looping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = format_of(parser)
    limited = vars(sys.modules[form.parse_call.__module__])
    for name, value in [*limited.items()]:
        if type(value).__name__ == "_LimitedPattern":
            monkeypatch.setitem(limited, name, value._pattern)
    with_time_limit(form.parse_call, 0.05)
    text = f"{form.tool_start}{looping * 30_000}{form.tool_end}"
    answer = answer_to(text, form, tools=[TOOL]).choice
    assert (answer.tool_calls, answer.text) == (None, text)
    assert "TimeoutError" in (answer.tool_error or "")
