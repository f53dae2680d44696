"""Makes a training set for `mlx_lm.lora` of a batch's two files. Needs nothing but Python; see docs/distillation.md.

``python training_set.py IN.jsonl OUT.jsonl DIR`` writes ``DIR/TASK/train.jsonl``, ``valid.jsonl`` and ``test.jsonl``.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import quote


def lines_of(path):
    """The lines that are objects: half a line may be the last one, because the batch may still run."""
    for raw in path.open(encoding="utf-8", errors="replace"):
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def as_taught(message):
    """A message as chat templates expect it: its content is a string, and the arguments of calls are objects."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    taught = {"role": message["role"], "content": content}
    if message["role"] == "developer":
        taught["role"] = "system"
    taught |= {name: message[name] for name in ("name", "reasoning_content", "tool_call_id") if message.get(name)}
    if calls := message.get("tool_calls"):
        taught["tool_calls"] = [{**call, "function": with_object(call["function"])} for call in calls]
    return taught


def with_object(function):
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function


def key_of(messages):
    """A number below 1, equal for prompts that differ only in case, in white space and in the random ids of calls."""
    said = [[each["role"], " ".join(each["content"].split()).casefold(), calls_in(each)] for each in messages]
    return int(hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12], 16) / 16**12


def calls_in(message):
    return [call["function"] for call in message.get("tool_calls", ())]


def part_of(prompt, held_out, is_turn_of_an_agent):
    """Of the same prompt always the same part. All turns of an agent's conversation are in one part, because each of
    them repeats the answers before it."""
    if is_turn_of_an_agent:
        users = [n for n, message in enumerate(prompt) if message["role"] == "user"]
        prompt = prompt[: users[0] + 1] if users else prompt
    place = key_of(prompt)
    return "valid" if place < held_out / 2 else "test" if place >= 1 - held_out / 2 else "train"


def why_left_out(asked, answer):
    if answer["error"] or answer["response"]["status_code"] != 200:
        return "failed"
    if asked is None:
        sys.exit(f"no line of the input has the custom_id {answer['custom_id']!r}")
    if "messages" not in asked:
        return "not a chat"
    if asked.get("context") == "append":
        return "its prompt is not in the file"
    body = answer["response"]["body"]
    if body.get("attempts"):
        return None if body["attempts"][-1]["accepted"] else "rejected by a check"
    return None if body["choices"][0]["finish_reason"] in ("stop", "tool_calls") else "cut off"


def examples_in(options, left_out):
    """Yields the model, the class, the part and the row of each answer that teaches; counts the others."""
    bodies, seen = {}, set()
    for line in lines_of(options.inputs):
        bodies.setdefault(line.get("custom_id"), line.get("body"))  # only the first line with an id is run
    for answer in lines_of(options.answers):
        asked = bodies.get(answer["custom_id"])
        if why := why_left_out(asked, answer):
            left_out[why] += 1
            continue
        body = answer["response"]["body"]
        prompt = [as_taught(message) for message in asked["messages"]]
        if options.teacher not in (None, body["model"]):
            left_out["by another model"] += 1
        elif key_of(prompt) in seen:
            left_out["with a prompt that came before"] += 1
        else:
            seen.add(key_of(prompt))
            agent = asked.get("user") or (asked.get("metadata") or {}).get("agent_id")
            row = {"messages": [*prompt, as_taught(body["choices"][0]["message"])]}
            if asked.get("tools") and asked.get("tool_choice") != "none":
                row["tools"] = asked["tools"]
            task = body.get("task") or asked.get("task") or "all"
            yield body["model"], task, part_of(prompt, options.held_out, is_turn_of_an_agent=bool(agent)), row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", type=Path, metavar="IN.jsonl")
    parser.add_argument("answers", type=Path, metavar="OUT.jsonl")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder")
    parser.add_argument("--teacher", metavar="MODEL", help="needed if several models have answered")
    parser.add_argument("--held-out", type=float, default=0.1, metavar="SHARE", help="not trained on  [0.1]")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder} exists already")
    models, rows, left_out = set(), {}, Counter()
    for model, task, part, row in examples_in(options, left_out):
        models.add(model)
        rows.setdefault((task, part), []).append(json.dumps(row) + "\n")
    if len(models) > 1:
        sys.exit(f"several models have answered, {' and '.join(sorted(models))}: choose one with --teacher")
    for (task, part), lines in sorted(rows.items()):
        path = options.folder / quote(task.replace("/", "+"), safe="+").replace(".", "%2E") / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="ascii")  # mlx-lm reads it in the locale's encoding
        print(f"{len(lines):,} {path}")
    print("left out:", ", ".join(f"{count:,} {why}" for why, count in left_out.items()) or "none")


if __name__ == "__main__":
    main()
