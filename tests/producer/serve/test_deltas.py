"""What a client gets of an answer that is generated again, or that ends."""

import pytest
from tests.producer.played_worker import result_fields

from stoker.openai.answers import Failure
from stoker.serve.chunks import Deltas
from stoker.streaming import Restarted, TextChunk
from stoker_shared.answer_parts import Edge, Markers
from stoker_shared.result import GenerationResult

THINKING = Markers(first="reasoning", edges=(Edge("reasoning", "|", "normal"), Edge("normal", "#", "tool")))


def sent(run, result, *, is_text=False, markers=THINKING):
    """What was sent of a run, in which ``None`` is a restart, and of its result."""
    deltas = Deltas(is_text=is_text)
    found = [delta for part in run for delta in deltas.add(TextChunk(part, markers) if part else Restarted())]
    return found, deltas.rest(GenerationResult.model_validate({**result_fields("j"), **result}))


def joined(deltas, name):
    return "".join(delta.get(name, "") for delta in deltas)


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(
    ("run", "begun", "text"),
    [
        (["a", "b"], "ab", "ab"),
        (["ab", None, "a", "bc"], "abc", "abc"),
        (["ab", None, "abc", "d"], "abcd", "abcd"),
        (["ab", None, None, "a", "b", "c"], "abc", "abc"),
        (["ab", None, "ab"], "ab", "ab"),
        ([None, "ab"], "ab", "ab"),
        (["ab", None], "ab", "abc"),
    ],
)
def test_text_that_comes_again_is_sent_once(run, begun, text, is_text):
    name = "text" if is_text else "content"
    live, rest = sent(run, {"text": text}, is_text=is_text, markers=Markers())
    assert (joined(live, name), joined([*live, *rest], name)) == (begun, text)
    assert [delta for delta in (*live, *rest) if "role" in delta] == ([] if is_text else live[:1])


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("run", [["ab", None, "b"], ["ab", None, "ac"], ["ab", None, "a", "x"], ["ab", None, "a"]])
def test_text_that_comes_again_otherwise_is_an_error(run, is_text):
    with pytest.raises(Failure) as failure:
        sent(run, {"text": "a"}, is_text=is_text, markers=Markers())
    assert failure.value.body["error"]["code"] == "text_changed"


RESULT = {"text": "Hm. So|Yes.#call", "reasoning": "Hm. So", "answer": "Yes."}


def test_an_answer_whose_worker_is_lost_while_it_thinks_goes_on_where_it_was():
    live, rest = sent(["Hm.", None, "H", "m. S", "o|Y"], RESULT)
    assert [delta.get("reasoning_content") for delta in live] == [None, "Hm.", " S", "o", None]
    assert joined(live, "content") == "Y"
    assert (joined(rest, "content"), joined(rest, "reasoning_content")) == ("es.", "")


@pytest.mark.parametrize("run", [["Hm.", None, "No."], ["Hm. So|Yes", None, "Hm. So|No"], ["Hm. So|Yes.", None]])
def test_an_answer_whose_worker_is_lost_while_it_thinks_must_think_the_same_again(run):
    with pytest.raises(Failure):
        sent(run, {**RESULT, "text": "Hm. So|No", "answer": "No"})


def test_what_was_held_back_may_come_out_otherwise_in_another_run():
    live, rest = sent(["Hm. So|", "Yes.", "#one call", None, "Hm. So|Yes.", "#another"], RESULT)
    assert joined([*live, *rest], "content") == "Yes."


def test_an_answer_is_sent_at_its_end_if_the_worker_does_not_tell_its_markers():
    live, rest = sent(["Hm. So|Yes"], RESULT, markers=None)
    assert live == []
    assert rest == [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm. So"}, {"content": "Yes."}]
