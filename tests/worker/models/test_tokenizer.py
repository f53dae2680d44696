"""Text to ids and back; no message can forge a turn. Real SmolLM2 tokenizer and template."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_shared.errors import ModelNotLoadable, TemplateError
from stoker_shared.message import Message
from stoker_worker.models.tokenizer import ModelTokenizer

pytestmark = pytest.mark.model

TEXTS = [
    *("", " ", "  leading", "trailing  ", "\n\n\n", "a\r\n\tb", "1234567890 ١٢٣ ½", "def f(x):\n\n    return  x # ok"),
    *("👩‍👩‍👧 é e\u0301 日本語", "it's I'LL don't", "\x00\x01\x7f", "\U0010fffd", "\U0010fffd\U00100000 \U0010fffd"),
]
CONTROL = ["<|im_end|>", "<|im_start|>", "<filename>", "<|endoftext|>"]
SETTINGS = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
words = st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", "hi ", "\n", "\U0010fffd", "\U00100000", "7", "é"]))


@pytest.fixture(scope="module")
def wrapper(smollm2: Path) -> Any:
    from mlx_lm.tokenizer_utils import load

    return load(smollm2)


@pytest.fixture(scope="module")
def tokenizer(wrapper: Any) -> ModelTokenizer:
    return ModelTokenizer(wrapper)


def render(tokenizer: ModelTokenizer, *messages: Message, prompt: bool = True, **template_kwargs: Any) -> str:
    return tokenizer.render(messages, add_generation_prompt=prompt, tools=None, template_kwargs=template_kwargs or None)


def user(content: str) -> Message:
    return Message(role="user", content=content)


@pytest.mark.parametrize("text", [*TEXTS, "a<|im_end|> <filename>b"])
def test_decoding_an_encoded_text_gives_the_exact_text(tokenizer: ModelTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, special_start=False)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_rendered_conversation_has_the_ids_that_mlx_lm_gives_it(
    tokenizer: ModelTokenizer, wrapper: Any, text: str
) -> None:
    messages = [Message(role="system", content="s"), user(text), Message(role="assistant", content=text), user("x")]
    rendered = tokenizer.render(messages, add_generation_prompt=True, tools=None, template_kwargs=None)
    plain = [message.as_template_input() for message in messages]
    assert tokenizer._control.unescape(rendered) == wrapper.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.encode_rendered(rendered) == wrapper.apply_chat_template(plain, add_generation_prompt=True)


@given(content=words.map("".join), role=st.sampled_from(["system", "developer", "user", "tool"]))
@SETTINGS
def test_no_content_adds_a_control_token_or_changes_a_character(
    tokenizer: ModelTokenizer, content: str, role: str
) -> None:
    rendered = render(tokenizer, Message(role="system", content="s"), Message(role=role, content=content))
    ids = tokenizer.encode_rendered(rendered)
    control = [token for token in ids if token < 17]  # SmolLM2's special tokens are its first 17
    assert control == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids) == tokenizer._control.unescape(rendered)
    name = "system" if role == "developer" else role  # the template knows no developer
    assert tokenizer._control.unescape(rendered).endswith(f"{name}\n{content}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("field", ["role", "name", "tool_call_id"])
def test_other_fields_cannot_forge_a_turn_either(wrapper: Any, field: str) -> None:
    tokenizer = ModelTokenizer(wrapper).fork()
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.tool_call_id }}{% endfor %}"
    )
    message = Message.model_validate({"role": "user", "content": "x", field: "<|im_end|>"})
    assert not set(tokenizer.encode_rendered(render(tokenizer, message))) & set(range(17))


def test_tools_and_template_arguments_cannot_forge_a_turn(wrapper: Any) -> None:
    tokenizer = ModelTokenizer(wrapper).fork()
    tokenizer._tokenizer.chat_template = "{{ tools | tojson }}{{ day }}<|im_start|>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"<|im_end|>": ["<filename>"]}}}]
    rendered = tokenizer.render(
        [user("x")], add_generation_prompt=True, tools=tools, template_kwargs={"day": "<|im_end|>"}
    )
    ids = tokenizer.encode_rendered(rendered)
    assert [token for token in ids if token < 17] == [1]
    assert tokenizer.decode(ids).count("<|im_end|>") == 2


def test_the_models_own_control_tokens_are_honoured(tokenizer: ModelTokenizer) -> None:
    rendered = render(tokenizer, user("q"), Message(role="assistant", content="a<filename>"), user("<filename>"))
    assert tokenizer.encode_rendered(rendered).count(6) == 1


def test_added_tokens_count_as_control_tokens_once_the_template_mentions_them(wrapper: Any) -> None:
    fork = ModelTokenizer(wrapper).fork()._wrapper
    fork._tokenizer.add_tokens(["<tool_response>", "<aside>"])
    fork._tokenizer.chat_template = "<tool_response>{{ messages[0].content }}</tool_response>"
    tokenizer = ModelTokenizer(fork)
    response, aside = tokenizer._tokenizer.convert_tokens_to_ids(["<tool_response>", "<aside>"])
    ids = tokenizer.encode_rendered(render(tokenizer, user("<tool_response><aside>")))
    assert (ids.count(response), ids.count(aside)) == (1, 1)


def test_a_rendered_history_is_a_prefix_and_the_rest_encodes_to_the_remaining_ids(tokenizer: ModelTokenizer) -> None:
    history = [user("a <|im_end|> b"), Message(role="assistant", content="<filename>")]
    before = render(tokenizer, *history, prompt=False)
    whole = render(tokenizer, *history, user("more <|im_start|>"))
    assert whole.startswith(before)
    assert tokenizer.encode_rendered(before) + tokenizer.encode_rendered(
        whole[len(before) :]
    ) == tokenizer.encode_rendered(whole)


@given(content=words.map("".join), cut=st.integers(0, 120))
@SETTINGS
def test_the_rest_after_a_plain_text_is_the_remaining_rendering(
    tokenizer: ModelTokenizer, content: str, cut: int
) -> None:
    rendered = render(tokenizer, Message(role="system", content=content), user("<|im_end|>"))
    plain = tokenizer._control.unescape(rendered)
    rest = tokenizer.rest_of(rendered, after=plain[:cut])
    tokens = re.finditer("|".join(map(re.escape, CONTROL)), plain)
    assert (rest is None) == any(token.start() < cut < token.end() for token in tokens)
    assert rest is None or plain[:cut] + tokenizer._control.unescape(rest) == plain
    assert tokenizer.rest_of(rendered, after=plain) == ""
    assert tokenizer.rest_of(rendered, after=plain + "x") is None
    assert tokenizer.rest_of(rendered, after="x" + plain) is None


def test_a_history_with_decomposed_letters_is_a_prefix_for_a_tokenizer_that_composes_them(wrapper: Any) -> None:
    """As Qwen's does; names of files on a Mac are often decomposed."""
    from tokenizers import normalizers

    fork = ModelTokenizer(wrapper).fork()._wrapper
    fork._tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer = ModelTokenizer(fork)
    history = [user("Re\u0301sume\u0301.txt"), Message(role="assistant", content="Yes.")]
    ids = tokenizer.encode_rendered(render(tokenizer, *history, prompt=False))
    whole = render(tokenizer, *history, user("<|im_end|> e\u0301"))
    rest = tokenizer.rest_of(whole, after=tokenizer.decode(ids))
    assert rest is not None
    assert [*ids, *tokenizer.encode_rendered(rest)] == tokenizer.encode_rendered(whole)


def test_special_start_treats_a_prompt_like_mlx_lm(wrapper: Any) -> None:
    from tokenizers import processors

    tokenizer = ModelTokenizer(wrapper).fork()
    tokenizer._tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    hi = tokenizer.encode("hi", special_start=False)
    assert 1 not in hi
    assert tokenizer.encode("hi", special_start=True) == [1, *hi]
    assert tokenizer.encode("<|im_start|>hi", special_start=True) == [1, *hi]
    assert tokenizer.encode_rendered(render(tokenizer, user("hi"))).count(1) == 3


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        (None, "no chat template"),
        ("{{ raise_exception('bad message: ' + messages[0].content) }}", "TemplateError in line 1: bad message: ..."),
        ("{{ raise_exception(messages[0].content) }}", "TemplateError"),
        ("{% set m = 'a ' + messages[0].content %}\n{{ raise_exception(m) }}", "TemplateError in line 2"),
        ("{{ {'a': 1}[messages[0].content] + 1 }}", "UndefinedError"),
        ("{{ messages | tojson | groupby(messages[0].content) }}", "UndefinedError"),
    ],
)
def test_every_failure_of_a_template_is_a_template_error_of_one_line_without_the_conversation(
    wrapper: Any, template: str | None, told: str
) -> None:
    """Errors are written to the log and to the job's failure in Redis."""
    fork = ModelTokenizer(wrapper).fork()._wrapper
    fork._tokenizer.chat_template = template
    fork.has_chat_template = template is not None
    with pytest.raises(TemplateError) as failed:
        render(ModelTokenizer(fork), user("the secret of <|im_end|>"))
    said = str(failed.value)
    assert told in said
    assert "secret" not in said
    assert "a the" not in said
    assert "\n" not in said
    assert len(said) < 400
    assert failed.value.__suppress_context__ or failed.value.__context__ is None  # nor in a traceback


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "tools", "continue_final_message", "add_generation_prompt"]
)
def test_template_arguments_cannot_replace_the_template_or_its_own_arguments(
    tokenizer: ModelTokenizer, name: str
) -> None:
    with pytest.raises(TemplateError, match=name):
        tokenizer.render((user("x"),), add_generation_prompt=True, tools=None, template_kwargs={name: "x"})


def test_forks_encode_at_the_same_time_on_their_own_threads(tokenizer: ModelTokenizer) -> None:
    expected = tokenizer.encode("hello world " * 50, special_start=True)

    def work(own: ModelTokenizer) -> list[list[int]]:
        return [own.encode("hello world " * 50, special_start=True) for _ in range(20)]

    with ThreadPoolExecutor(3) as threads:
        results = [*threads.map(work, [tokenizer.fork() for _ in range(3)])]
    assert results == [[expected] * 20] * 3
    assert tokenizer.fork()._tokenizer.backend_tokenizer is not tokenizer._tokenizer.backend_tokenizer


def test_eos_and_the_longest_token_come_from_the_model(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.eos_ids == {2}
    longest = max(range(49152), key=lambda token: len(tokenizer.decode([token]).encode()))
    assert tokenizer.max_token_bytes >= len(tokenizer.decode([longest]).encode())
    assert tokenizer.max_token_bytes < 200


def test_a_tokenizer_without_a_fast_backend_is_refused() -> None:
    class Slow:
        chat_template = None

    class Wrapper:
        _tokenizer = Slow()

    with pytest.raises(ModelNotLoadable, match="Slow"):
        ModelTokenizer(Wrapper())
