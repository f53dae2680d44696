"""How templates render messages as SDKs send them. The templates treat tool calls as the named families do."""

import pytest
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker_shared.message import Message
from stoker_worker.models.tokenizer import TemplateForms


def each(body):
    return "{% for m in messages %}<{{ m.role }}>" + body + "{% endfor %}"


PLAIN = each("{{ m['content'] }}")  # SmolLM2: ignores calls
ADDING = each("{{ '' + m['content'] + '' }}")  # ChatML of many: breaks on None
LLAMA = each(
    "{% if 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m['content'] | trim }}{% endif %}"
)
QWEN = each(
    "{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}'
)
XML = each(
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>"
    "{% for k, v in call.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}{% endfor %}"
)
MISTRAL = each(
    "{% if m.tool_calls is defined and m.tool_calls is not none %}{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{{ call.function | tojson }}{% endfor %}{% else %}{{ m['content'] + '</s>' }}{% endif %}"
)
DEEPSEEK = each(  # needs text, and renders a call only where content is none
    "{% if m['content'] is none %}{% for call in m['tool_calls'] %}"
    "{{ call['function']['name'] + '\n' + call['function']['arguments'] }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}"
)
ABSENT = each(
    "{% if 'content' in m %}{{ m.content ~ '' }}{% else %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}"
)
CHOOSY = "{% if tools %}" + DEEPSEEK + "{% else %}" + LLAMA + "{% endif %}"  # two templates in one


def forms_of(template):
    def refuse(why):
        raise JinjaError(why)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    compiled = environment.from_string(template)

    def apply(messages, tools):
        return compiled.render(messages=messages, tools=tools)

    return TemplateForms(apply, template), apply


def rendered(template, *messages, tools=None):
    forms, apply = forms_of(template)
    taken = [Message.model_validate(message).as_template_input() for message in messages]
    return apply([forms.fit(message, with_tools=bool(tools)) for message in taken], tools)


def call(arguments, **fields):
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
        **fields,
    }


WHOLE = {
    LLAMA: '{"name": "look", "parameters": {"at": "sky"}}',
    QWEN: '{"name": "look", "arguments": {"at": "sky"}}',
    XML: "<function=look><parameter=at>sky</parameter>",
    MISTRAL: '{"arguments": {"at": "sky"}, "name": "look"}',
    DEEPSEEK: 'look\n{"at": "sky"}',
    ABSENT: '{"arguments": {"at": "sky"}, "name": "look"}',
}


@pytest.mark.parametrize("template", WHOLE)
@pytest.mark.parametrize("arguments", ['{"at": "sky"}', {"at": "sky"}], ids=["text", "object"])
@pytest.mark.parametrize("silent", [{"content": None}, {}], ids=["null", "absent"])
def test_a_call_without_content_is_rendered_completely(template, arguments, silent):
    assert rendered(template, call(arguments, **silent)) == f"<assistant>{WHOLE[template]}"


@pytest.mark.parametrize("template", [PLAIN, ADDING])
def test_a_template_without_calls_renders_nothing_for_the_missing_content(template):
    assert rendered(template, call("{}")) == "<assistant>"


@pytest.mark.parametrize("arguments", ["", "not json", "[1]", '{"at": NaN}', '{"a":' * 5000])
def test_arguments_that_are_no_object_are_passed_unchanged(arguments):
    forms, _ = forms_of(QWEN)
    fitted = forms.fit(call(arguments), with_tools=False)
    assert fitted["tool_calls"][0]["function"]["arguments"] == arguments


def test_content_beside_a_call_is_kept():
    assert rendered(QWEN, call("{}", content="I look.")) == '<assistant>I look.{"name": "look", "arguments": {}}'


def test_each_of_two_templates_gets_its_own_form():
    assert rendered(CHOOSY, call('{"at": "sky"}')) == f"<assistant>{WHOLE[LLAMA]}"
    assert rendered(CHOOSY, call({"at": "sky"}), tools=[{}]) == f"<assistant>{WHOLE[DEEPSEEK]}"


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (PLAIN, "system"),
        ("{% if messages[0].role in ('system', 'developer') %}{% endif %}" + PLAIN, "developer"),
        ('{% if messages[0].role == "developer" %}{% endif %}' + PLAIN, "developer"),
        ("You help a developer. " + PLAIN, "system"),
    ],
)
def test_the_developer_role_becomes_system_unless_the_template_handles_it(template, role):
    assert rendered(template, {"role": "developer", "content": "Be brief."}).endswith(f"<{role}>Be brief.")


@pytest.mark.parametrize("read", ["m.{}", "m['{}']", 'm.get("{}")'])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_has_the_name_that_the_template_reads(name, read):
    field = read.format(name)
    prose = "{# enable_thinking, reasoning effort #}"  # gpt-oss's has these words, and reads `thinking`
    template = each("{{ '<' ~ " + field + " ~ '>' if " + field + " }}{{ m.content }}" + prose)
    assert rendered(template, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}) == "<assistant><Hm.>Yes."
