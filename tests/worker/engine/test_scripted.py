"""The scripted engine's texts can be read as they grow, with characters and stop strings that cross tokens."""

from typing import Any

import pytest
from tests.worker.engine.reading import read_along

from stoker_shared import Message, build_request
from stoker_shared.errors import TemplateError
from stoker_worker.engine.scripted import END, ScriptedEngine, ScriptedTokenizer
from stoker_worker.ports import GenerationWork


def work(prompt, **fields):
    request = build_request({"agent_id": "a", "prompt": prompt, "max_tokens": 400, **fields})
    return GenerationWork(request, tuple(prompt.encode()))


def test_texts_grow_by_whole_characters_and_never_show_a_stop_string():
    engine = ScriptedEngine(max_batch=2, steps_per_s=1e9)
    works = [work("say héllo \U0001f469\u200d\U0001f4bb"), work("say a <s<st><stop>b", stop=["<stop>"]), work("x")]
    done, read, stages = read_along(engine, works)
    assert [one.text for one in done[:2]] == ["héllo \U0001f469\u200d\U0001f4bb", "a <s<st>"]
    assert stages[2][0] == "waiting"
    assert stages[2][-1] == "decode"
    assert "\ufffd" not in "".join(read[0])
    assert not any(text.endswith("<") for text in read[1])
    assert (
        max(len(text) for text in read[2]) == len(done[2].text) - 1
    )  # the last character comes in the step that ends it


@pytest.mark.parametrize("max_tokens", [400, len("ab\ufffd".encode())])
def test_a_stop_string_that_is_the_end_of_an_answer_is_found_in_it(max_tokens):
    engine = ScriptedEngine(max_batch=1, steps_per_s=1e9)
    ((done, *_), *_) = read_along(engine, [work("say ab\ufffd", stop=["\ufffd"], max_tokens=max_tokens)])
    assert (done.text, done.ended_by, done.kept) == ("ab", "stop", 2)


def test_an_answer_with_an_end_in_it_goes_on_and_a_question_with_one_is_refused():
    tokenizer = ScriptedTokenizer()
    answer = Message(role="assistant", content=tokenizer.decode([*b"a", END, *b"a"]))
    options: dict[str, Any] = {"add_generation_prompt": False, "tools": None, "template_kwargs": None}
    assert END in tokenizer.encode_rendered(tokenizer.render([answer], **options))
    with pytest.raises(TemplateError):
        tokenizer.render([answer.model_copy(update={"role": "user"})], **options)
