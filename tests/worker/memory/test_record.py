"""Records: any conversation comes back exactly, whatever was rewritten."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_shared.request import Message
from stoker_worker.memory.checksummed_file import Damaged
from stoker_worker.memory.record import CachedPrefix, TurnRecord, delta, record_checksum, replay
from stoker_worker.ports import AgentVersion, Delivery, Transcript

json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.0, -0.0, 1.0, 1e300]) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.text(max_size=5),
    name=st.none() | st.just("n"),
    tool_calls=st.none() | st.lists(st.dictionaries(st.just("f"), json_values), max_size=2),
)
transcripts = st.builds(
    Transcript,
    token_ids=st.lists(st.integers(0, 2), max_size=8).map(tuple),
    tokenizer_fingerprint=st.sampled_from(["t", "u"]),
    messages=st.none() | st.lists(messages, max_size=3).map(tuple),
    text=st.none() | st.text("ab\U0001f600\n", max_size=6),
    ended_by=st.sampled_from(["eos", "stop", "length"]),
    carry_text=st.text(max_size=2),
)


def encode(base: Transcript | None, new: Transcript, *, version: int = 1, agent_id: str = "agent") -> bytes:
    record = TurnRecord(
        agent_id=agent_id,
        version=version,
        delivery=Delivery("job", "now", 3),
        result={"text": "hi", "logprob": float("-inf"), "nothing": None},
        cache=CachedPrefix("model", None, 300, "root"),
        **delta(base, new, "x"),
    )
    return record.encode()


def exact(transcript: Transcript) -> object:
    """With the type of every number: 1 == 1.0 == True in Python, but not in a rendered tool call."""
    shown = transcript.messages and [message.model_dump_json() for message in transcript.messages]
    return dataclasses.replace(transcript, messages=None), shown


@given(st.lists(transcripts, min_size=1, max_size=6))
def test_any_sequence_of_transcripts_replays_to_each_of_them(versions: list[Transcript]) -> None:
    records: list[TurnRecord] = []
    for base, new in zip([None, *versions], versions, strict=False):
        data = encode(base, new, version=len(records) + 1)
        records.append(TurnRecord.decode(data, agent_id="agent", version=len(records) + 1))
        assert exact(replay(records)) == exact(new)


def test_a_tool_call_that_changed_only_the_type_of_a_number_is_new() -> None:
    versions = [
        Transcript((1,), "t", (Message(role="assistant", content="", tool_calls=({"x": value},)),), None, "eos")
        for value in (1, True, 1.0)
    ]
    for base, new in itertools.pairwise(versions):
        assert delta(base, new)["keep_messages"] == 0


def test_a_record_contains_only_the_change() -> None:
    long = Transcript(tuple(range(10_000)), "t", None, "x" * 50_000, "eos")
    longer = dataclasses.replace(long, token_ids=(*long.token_ids, 7), text=f"{long.text}y")
    assert len(encode(long, longer)) < 1000


def test_a_record_comes_back_with_its_result_and_delivery() -> None:
    data = encode(None, Transcript((1,), "t", None, None, "stop"))
    record = TurnRecord.decode(data, agent_id="agent", version=1)
    assert record.delivery == Delivery("job", "now", 3)
    assert record.result == {"text": "hi", "logprob": float("-inf"), "nothing": None}
    assert record.cache == CachedPrefix("model", None, 300, "root")


def test_a_changed_byte_anywhere_in_a_record_is_noticed() -> None:
    data = encode(None, Transcript((1, 2, 3), "t", None, "text", "eos"))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 4
        with pytest.raises(Damaged):
            TurnRecord.decode(bytes(changed), agent_id="agent", version=1)
        with pytest.raises(Damaged):
            TurnRecord.decode(data[:position], agent_id="agent", version=1)


def test_another_agents_or_versions_record_is_refused() -> None:
    data = encode(None, Transcript((1,), "t", None, None, "eos"))
    with pytest.raises(Damaged, match="another agent"):
        TurnRecord.decode(data, agent_id="other", version=1)
    with pytest.raises(Damaged, match="version 1"):
        TurnRecord.decode(data, agent_id="agent", version=2)


def test_a_record_of_a_later_format_is_refused_by_its_format() -> None:
    data = encode(None, Transcript((1,), "t", None, None, "eos")).replace(b"stoker-record 1", b"stoker-record 2", 1)
    with pytest.raises(Damaged, match="format"):
        TurnRecord.decode(data, agent_id="agent", version=1)


def test_equal_records_have_equal_checksums_and_others_do_not() -> None:
    one = Transcript((1,), "t", None, None, "eos")
    other = dataclasses.replace(one, token_ids=(2,))
    assert record_checksum(encode(None, one)) == record_checksum(encode(None, one))
    assert record_checksum(encode(None, one)) != record_checksum(encode(None, other))


OLD = Delivery("job", "2026", 1)
NEW = Delivery("job", "2026", 1, "digest")


@pytest.mark.parametrize(
    ("remembered", "asked", "is_answered"),
    [
        (NEW, NEW, True),
        (NEW, dataclasses.replace(NEW, request="other"), False),
        (NEW, dataclasses.replace(NEW, repeats_left=0), False),
        (NEW, dataclasses.replace(NEW, created_at="2027"), False),
        (OLD, NEW, True),
        (OLD, dataclasses.replace(NEW, created_at="2027"), False),
        (dataclasses.replace(OLD, created_at=""), dataclasses.replace(NEW, created_at=""), False),
        (dataclasses.replace(NEW, created_at=""), dataclasses.replace(NEW, created_at=""), True),
    ],
)
def test_a_delivery_is_answered_if_every_field_that_the_record_has_matches(
    remembered: Delivery, asked: Delivery, is_answered: bool
) -> None:
    version = AgentVersion("a", 1, None, {remembered: {"text": "then"}})
    assert (version.answer_to(asked) is not None) == is_answered


def test_a_record_without_the_digest_of_its_request_is_read() -> None:
    data = encode(None, Transcript((1,), "t", None, "x", "eos"))
    assert b'"request"' not in data
    assert TurnRecord.decode(data, agent_id="agent", version=1).delivery.request == ""
