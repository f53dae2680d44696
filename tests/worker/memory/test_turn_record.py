"""Rows of turns: any conversation comes back exactly, whatever was rewritten; every change of a row is noticed."""

import dataclasses
import itertools
import json
import math
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_shared.message import Message
from stoker_worker.memory.database import Damaged
from stoker_worker.memory.transcripts import COLUMNS, About, TurnRecord, delta, replay
from stoker_worker.ports import CachedPrefix, Transcript
from stoker_worker.ports.memory import OwnMessage

any_text = st.text(st.sampled_from("a\x00\ud800\udfff\U0001f600\n'\""), max_size=4)
"""With NUL and lone surrogates, which JSON can carry into a tool call."""

json_values: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0.0, -0.0, 1.0, 1e300, math.nan, math.inf, -math.inf])
    | any_text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(any_text, inner, max_size=2),
    max_leaves=4,
)
plain_text = st.text(max_size=5)
"""Without lone surrogates: requests with them are refused."""

messages = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=plain_text,
    name=st.none() | st.just("n"),
    tool_calls=st.none() | st.lists(st.dictionaries(st.just("f"), json_values), max_size=2),
    tool_call_id=st.none() | plain_text,
)
own_messages = st.builds(
    OwnMessage,
    role=st.just("assistant"),
    content=plain_text,
    reasoning_content=st.none() | plain_text,
    tool_calls=st.none() | st.lists(st.dictionaries(st.just("f"), json_values), max_size=2),
    generated=any_text,
    opened=st.just("") | st.just("<think>\n"),
)
transcripts = st.builds(
    Transcript,
    token_ids=st.lists(st.integers(0, 2) | st.just(2**32 - 1), max_size=8).map(tuple),
    tokenizer_fingerprint=st.sampled_from(["t", "u"]),
    messages=st.none() | st.lists(messages | own_messages, max_size=3).map(tuple),
    text=st.none() | st.text("ab\U0001f600\n\x00", max_size=6),
    ended_by=st.sampled_from(["eos", "stop", "length"]),
    carry_text=plain_text,
)


def make_about(transcript: Transcript, **fields: Any) -> About:
    about = About(
        ended_by=transcript.ended_by,
        carry_text=transcript.carry_text,
        tokenizer=transcript.tokenizer_fingerprint,
        cache=CachedPrefix("model", "a salt", 300, "root", (7, 9)),
        made_by="turn",
        job_id="job",
        finish_reason="stop",
        answer_until=1.5,
        saved_at=0.5,
        tokens=len(transcript.token_ids),
        since_full=3,
    )
    return dataclasses.replace(about, **fields)


def make_record(base: Transcript | None, new: Transcript, version: int = 1, **fields: Any) -> TurnRecord:
    return TurnRecord(
        agent_id=fields.pop("agent_id", "agent"),
        version=version,
        delivery=b"delivery",
        about=make_about(new, **fields),
        **delta(base, new, b"parent"),
    )


def through_database(row: tuple[Any, ...]) -> tuple[Any, ...]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"CREATE TABLE turns ({COLUMNS})")
        connection.execute(f"INSERT INTO turns VALUES (?{', ?' * (len(row) - 1)})", row)
        return tuple(connection.execute("SELECT * FROM turns").fetchone())


def exact(transcript: Transcript) -> object:
    """With the type of every number: 1 == 1.0 == True in Python, but not in a rendered tool call; and NaN is NaN."""
    shown = transcript.messages and [json.dumps(message.model_dump()) for message in transcript.messages]
    return dataclasses.replace(transcript, messages=None), shown


@given(st.lists(transcripts, min_size=1, max_size=6))
def test_any_sequence_of_transcripts_replays_to_each_of_them(versions: list[Transcript]) -> None:
    records: list[TurnRecord] = []
    for number, (base, new) in enumerate(zip([None, *versions], versions, strict=False), start=1):
        row = through_database(make_record(base, new, number).to_row())
        records.append(TurnRecord.of_row("agent", number, row))
        assert exact(replay(records)) == exact(new)


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations([1, True, 1.0, "1"], 2), (math.nan, None)])
def test_a_tool_call_that_changed_only_the_type_of_a_value_is_new(one: object, other: object) -> None:
    base, new = (
        Transcript((1,), "t", (Message(role="assistant", content="", tool_calls=({"x": value},)),), None, "eos")
        for value in (one, other)
    )
    assert delta(base, new)["keep_messages"] == 0
    assert delta(base, base)["keep_messages"] == 1


def test_an_answer_of_the_same_parts_that_was_generated_otherwise_is_new() -> None:
    answers = [
        Message(role="assistant", content=""),
        *(OwnMessage(role="assistant", content="", generated=text, opened=opened) for text in "ab" for opened in "cd"),
    ]
    for one, other in itertools.product(answers, repeat=2):
        base, new = (Transcript((1,), "t", (answer,), None, "eos") for answer in (one, other))
        assert delta(base, new)["keep_messages"] == (one is other)


def test_columns_that_only_changed_places_are_noticed() -> None:
    row = make_record(None, Transcript((5,), "t", None, "text", "eos")).to_row()
    for left, right in itertools.combinations(range(len(row)), 2):
        swapped = list(row)
        swapped[left], swapped[right] = swapped[right], swapped[left]
        if (row[left], type(row[left])) != (row[right], type(row[right])):
            with pytest.raises(Damaged):
                TurnRecord.of_row("agent", 1, swapped)
