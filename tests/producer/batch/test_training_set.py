"""docs/examples/training_set.py as a user runs it: the folder that it makes of a batch's two files."""

import json

from tests.producer.batch.taught_lines import answered, asked, failed, training_set, user, write

from stoker.api.chat import TEXT_URL

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def called(call_id, arguments='{"order": 7}'):
    function = {"name": "look_up", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": call_id, "type": "function", "function": function}]}  # fmt: skip


def rows_in(folder):
    return {path.relative_to(folder).as_posix(): [json.loads(raw) for raw in path.read_text("ascii").splitlines()]
            for path in sorted(folder.rglob("*.jsonl"))}  # fmt: skip


def prompts_in(folder):
    """The last message asked, by file."""
    return {name: [row["messages"][-2]["content"] for row in rows] for name, rows in rows_in(folder).items()}


def test_accepted_answers_are_written_by_class_each_prompt_once(tmp_path):
    text = asked(11, url=TEXT_URL, prompt="Once")
    del text["body"]["messages"]
    again = asked(3, "again under the id of another line")
    lines = [asked(n, f"{n}") for n in range(1, 10)]
    write(
        tmp_path / "in.jsonl", [*lines, asked(10, "next", context="append", user="a"), text, again, asked(13, " 1\n")]
    )
    ends = [
        answered(3, "3", task="sums", accepted=True), answered(1, task="sums"), answered(2, task="a/../b"),
        answered(4, finish_reason="length"), answered(5, "yes", finish_reason="length", accepted=True),
        answered(6, accepted=False), failed(7), answered(8, "ü"), answered(10), answered(11, url=TEXT_URL),
        answered(13),
    ]  # fmt: skip
    with write(tmp_path / "out.jsonl", ends).open("a") as file:
        file.write(json.dumps(answered(9))[:-20])  # the batch still runs
    code, out, _ = training_set(tmp_path, "--held-out", "0")
    assert code == 0
    assert prompts_in(tmp_path / "training") == {
        "a+%2E%2E+b/train.jsonl": ["2"], "all/train.jsonl": ["5", "8"], "sums/train.jsonl": ["3", "1"]
    }  # fmt: skip
    reasons = ("cut off", "rejected by a check", "failed", "not a chat", "with a prompt that came before")
    assert all(f"1 {reason}" in out for reason in (*reasons, "its prompt is not in the file"))


def test_calls_and_parts_are_taught_as_templates_render_them(tmp_path):
    call = {"id": "call_2", "function": {"name": "look_up", "arguments": '{"order": 8}'}}
    tool = {"role": "tool", "content": "late", "tool_call_id": "call_1"}
    brief = {"role": "developer", "content": "Be brief."}
    parts = user([{"type": "text", "text": "And "}, {"type": "text", "text": "7?"}])
    lines = [asked(1, brief, parts, called("call_1"), tool, "And 8?", tools=TOOLS),
             asked(2, called("call_1", "[7"), "Now?", tools=TOOLS, tool_choice="none")]  # fmt: skip
    write(tmp_path / "in.jsonl", lines)
    thought = {"finish_reason": "tool_calls", "reasoning": "Order 8 is next."}
    write(tmp_path / "out.jsonl", [answered(1, answer="", tool_calls=[call], **thought), answered(2)])
    assert training_set(tmp_path, "--held-out", "0")[0] == 0
    first, second = rows_in(tmp_path / "training")["all/train.jsonl"]
    system, question, before, _, _, last = first["messages"]
    assert (system, question) == ({"role": "system", "content": "Be brief."}, user("And 7?"))
    assert [(each["content"], each["tool_calls"][0]["function"]["arguments"]) for each in (before, last)] == [
        ("", {"order": 7}), ("", {"order": 8})
    ]  # fmt: skip
    assert (last["reasoning_content"], first["tools"]) == ("Order 8 is next.", TOOLS)
    assert second["messages"][0]["tool_calls"][0]["function"]["arguments"] == "[7"
    assert "tools" not in second


def test_a_prompt_is_in_the_same_part_in_every_nights_set_and_an_agents_turns_are_together(tmp_path):
    def prompts_by_part(to, held_out, lines):
        write(tmp_path / "in.jsonl", [asked(n, *messages, **body) for n, (messages, body) in enumerate(lines, 1)])
        write(tmp_path / "out.jsonl", [answered(n) for n in range(1, len(lines) + 1)])
        assert training_set(tmp_path, "--held-out", held_out, to=to)[0] == 0
        return {name.split("/")[1]: {" ".join(prompt.lower().split()) for prompt in prompts}
                for name, prompts in prompts_in(tmp_path / to).items()}  # fmt: skip

    texts = [f"Where is order {n}?" for n in range(400)]
    first = prompts_by_part("first", "0.4", [([text], {}) for text in texts])
    again = prompts_by_part("again", "0.4", [([f"{text.upper()}\n"], {}) for text in reversed(texts)])
    fewer = prompts_by_part("fewer", "0.2", [([text], {}) for text in texts])
    assert first == again
    assert all(40 < len(first[part]) < 120 and fewer[part] < first[part] for part in ("valid.jsonl", "test.jsonl"))
    answer = {"role": "assistant", "content": "Here."}
    turns = [(["Begin", *[answer, "on"] * n], {"user": "agent"}) for n in range(20)]
    assert len(prompts_by_part("turns", "0.9", turns)) == 1
    assert len(prompts_by_part("shots", "0.9", [(["good", answer, text], {}) for text in texts[:20]])) > 1


def test_nothing_is_written_that_was_not_asked_for(tmp_path):
    write(tmp_path / "in.jsonl", [asked(n, f"{n}") for n in range(1, 4)])
    write(tmp_path / "out.jsonl", [answered(1, model="small"), answered(2), answered(3)])
    code, _, err = training_set(tmp_path)
    assert (code, "large and small: choose one" in err) == (1, True)
    assert training_set(tmp_path, "--teacher", "large", "--held-out", "0")[0] == 0
    before = prompts_in(tmp_path / "training")
    assert before == {"all/train.jsonl": ["2", "3"]}
    code, _, err = training_set(tmp_path, "--teacher", "small")
    assert (code, "exists already" in err) == (1, True)
    write(tmp_path / "out.jsonl", [answered(7)])
    assert training_set(tmp_path, to="other")[0] == 1
    assert (prompts_in(tmp_path / "training"), (tmp_path / "other").exists()) == (before, False)
