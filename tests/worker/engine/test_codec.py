"""Text to ids and back, and that no message can forge a turn. Real SmolLM2 tokenizer and template."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_shared.errors import ModelNotLoadable, TemplateError
from stoker_shared.request import Message
from stoker_worker.engine.codec import ModelCodec

pytestmark = pytest.mark.model

TEXTS = [
    *("", " ", "  leading", "trailing  ", "\n\n\n", "a\r\n\tb", "1234567890 ١٢٣ ½", "def f(x):\n\n    return  x # ok"),
    *("👩‍👩‍👧 é e\u0301 日本語", "it's I'LL don't", "\x00\x01\x7f", "\U0010fffd", "\U0010fffd\U00100000 \U0010fffd"),
]
CONTROL = ["<|im_end|>", "<|im_start|>", "<filename>", "<|endoftext|>"]
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
words = st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", "hi ", "\n", "\U0010fffd", "\U00100000", "7", "é"]))


@pytest.fixture(scope="module")
def wrapper(smollm2: Path) -> Any:
    from mlx_lm.tokenizer_utils import load

    return load(smollm2)


@pytest.fixture(scope="module")
def codec(wrapper: Any) -> ModelCodec:
    return ModelCodec(wrapper)


def render(codec: ModelCodec, *messages: Message, prompt: bool = True, **template_kwargs: Any) -> str:
    return codec.render(messages, add_generation_prompt=prompt, tools=None, template_kwargs=template_kwargs or None)


def user(content: str) -> Message:
    return Message(role="user", content=content)


@pytest.mark.parametrize("text", [*TEXTS, "a<|im_end|> <filename>b"])
def test_decoding_what_was_encoded_gives_the_exact_text(codec: ModelCodec, text: str) -> None:
    assert codec.decode(codec.encode(text, special_start=False)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_rendered_conversation_has_the_ids_that_mlx_lm_gives_it(codec: ModelCodec, wrapper: Any, text: str) -> None:
    messages = [Message(role="system", content="s"), user(text), Message(role="assistant", content=text), user("x")]
    rendered = codec.render(messages, add_generation_prompt=True, tools=None, template_kwargs=None)
    plain = [message.as_template_input() for message in messages]
    assert codec.plain_text(rendered) == wrapper.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert codec.encode_rendered(rendered) == wrapper.apply_chat_template(plain, add_generation_prompt=True)


@given(content=words.map("".join), role=st.sampled_from(["system", "user", "tool"]))
@SETTINGS
def test_no_content_adds_a_control_token_or_changes_a_character(codec: ModelCodec, content: str, role: str) -> None:
    rendered = render(codec, Message(role="system", content="s"), Message(role=role, content=content))
    ids = codec.encode_rendered(rendered)
    control = [token for token in ids if token < 17]  # SmolLM2's special tokens are its first 17
    assert control == [1, 2, 1, 2, 1]
    assert codec.decode(ids) == codec.plain_text(rendered)
    assert codec.plain_text(rendered).endswith(f"{role}\n{content}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("field", ["role", "name", "tool_call_id"])
def test_other_fields_cannot_forge_a_turn_either(wrapper: Any, field: str) -> None:
    codec = ModelCodec(wrapper).fork()
    codec._tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.tool_call_id }}{% endfor %}"
    message = Message.model_validate({"role": "user", "content": "x", field: "<|im_end|>"})
    assert not set(codec.encode_rendered(render(codec, message))) & set(range(17))


def test_tools_and_template_arguments_cannot_forge_a_turn(wrapper: Any) -> None:
    codec = ModelCodec(wrapper).fork()
    codec._tokenizer.chat_template = "{{ tools | tojson }}{{ day }}<|im_start|>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"<|im_end|>": ["<filename>"]}}}]
    rendered = codec.render([user("x")], add_generation_prompt=True, tools=tools, template_kwargs={"day": "<|im_end|>"})
    ids = codec.encode_rendered(rendered)
    assert [token for token in ids if token < 17] == [1]
    assert codec.decode(ids).count("<|im_end|>") == 2


def test_the_models_own_control_tokens_are_honoured(codec: ModelCodec) -> None:
    rendered = render(codec, user("q"), Message(role="assistant", content="a<filename>"), user("<filename>"))
    assert codec.encode_rendered(rendered).count(6) == 1


def test_added_tokens_count_as_control_tokens_once_the_template_mentions_them(wrapper: Any) -> None:
    fork = ModelCodec(wrapper).fork()._wrapper
    fork._tokenizer.add_tokens(["<tool_response>", "<aside>"])
    fork._tokenizer.chat_template = "<tool_response>{{ messages[0].content }}</tool_response>"
    codec = ModelCodec(fork)
    response, aside = codec._tokenizer.convert_tokens_to_ids(["<tool_response>", "<aside>"])
    ids = codec.encode_rendered(render(codec, user("<tool_response><aside>")))
    assert (ids.count(response), ids.count(aside)) == (1, 1)


def test_a_rendered_history_is_a_prefix_and_the_rest_encodes_to_the_rest(codec: ModelCodec) -> None:
    history = [user("a <|im_end|> b"), Message(role="assistant", content="<filename>")]
    before = render(codec, *history, prompt=False)
    whole = render(codec, *history, user("more <|im_start|>"))
    assert whole.startswith(before)
    assert codec.encode_rendered(before) + codec.encode_rendered(whole[len(before) :]) == codec.encode_rendered(whole)


@given(content=words.map("".join), cut=st.integers(0, 120))
@SETTINGS
def test_the_rest_after_a_plain_text_is_what_remains_of_the_rendering(
    codec: ModelCodec, content: str, cut: int
) -> None:
    rendered = render(codec, Message(role="system", content=content), user("<|im_end|>"))
    plain = codec.plain_text(rendered)
    rest = codec.rest_of(rendered, after=plain[:cut])
    tokens = re.finditer("|".join(map(re.escape, CONTROL)), plain)
    assert (rest is None) == any(token.start() < cut < token.end() for token in tokens)
    assert rest is None or plain[:cut] + codec.plain_text(rest) == plain
    assert codec.rest_of(rendered, after=plain) == ""
    assert codec.rest_of(rendered, after=plain + "x") is None
    assert codec.rest_of(rendered, after="x" + plain) is None


def test_special_start_is_what_mlx_lm_does_to_a_prompt(wrapper: Any) -> None:
    from tokenizers import processors

    codec = ModelCodec(wrapper).fork()
    codec._tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    hi = codec.encode("hi", special_start=False)
    assert 1 not in hi
    assert codec.encode("hi", special_start=True) == [1, *hi]
    assert codec.encode("<|im_start|>hi", special_start=True) == [1, *hi]
    assert codec.encode_rendered(render(codec, user("hi"))).count(1) == 3


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        (None, "no chat template"),
    ],
)
def test_every_failure_of_a_template_is_one_line_of_template_error(
    wrapper: Any, template: str | None, said: str
) -> None:
    fork = ModelCodec(wrapper).fork()._wrapper
    fork._tokenizer.chat_template = template
    fork.has_chat_template = template is not None
    with pytest.raises(TemplateError, match=said) as failed:
        render(ModelCodec(fork), user("x"))
    assert "\n" not in str(failed.value)
    assert len(str(failed.value)) < 400


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "tools", "continue_final_message", "add_generation_prompt"]
)
def test_template_arguments_cannot_replace_the_template_or_its_own_arguments(codec: ModelCodec, name: str) -> None:
    with pytest.raises(TemplateError, match=name):
        render(codec, user("x"), **{name: "x"})


def test_forks_encode_at_the_same_time_on_threads_of_their_own(codec: ModelCodec) -> None:
    expected = codec.encode("hello world " * 50, special_start=True)
    results: list[list[int]] = []

    def work(own: ModelCodec) -> None:
        results.extend(own.encode("hello world " * 50, special_start=True) for _ in range(20))

    threads = [threading.Thread(target=work, args=(codec.fork(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 60
    assert codec.fork()._tokenizer.backend_tokenizer is not codec._tokenizer.backend_tokenizer


def test_eos_and_the_longest_token_are_the_models(codec: ModelCodec) -> None:
    assert codec.eos_ids == {2}
    longest = max(range(49152), key=lambda token: len(codec.decode([token]).encode()))
    assert codec.max_token_bytes >= len(codec.decode([longest]).encode())
    assert codec.max_token_bytes < 200


def test_a_tokenizer_without_a_fast_backend_is_refused() -> None:
    class Slow:
        chat_template = None

    class Wrapper:
        _tokenizer = Slow()

    with pytest.raises(ModelNotLoadable, match="Slow"):
        ModelCodec(Wrapper())


def test_messages_as_sdks_send_them_are_rendered_alike_turn_after_turn(codec: ModelCodec) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        Message(role="developer", content="Be brief."),
        Message.model_validate({"role": "user", "content": [{"type": "text", "text": "a"}]}),
        Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}),
        Message(role="tool", content="42", tool_call_id="c"),
    ]
    before = render(codec, *history, prompt=False)
    assert before.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>")
    assert "None" not in before
    assert render(codec.fork(), *history, user("more")).startswith(before)
