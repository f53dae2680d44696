"""EXP-023, guides: are answers that follow a schema valid, and what does following one cost a full batch?

Schemas of the JSON Schema test suite are answered by the product's engine, greedy and at temperature 1.5, and checked
by the `jsonschema` library. Then eight rows decode with and without guides, in turn. The suite is in the source archive
of `jsonschema` (`json/tests/draft2020-12`): ``JSON_SCHEMA_SUITE=FOLDER python experiments/exp_023_guides.py``.
"""

import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from bench import Bench, main
from common import Json, note, ratios, spread, take_turns
from report import Report, columns
from works import answers, chat_work, let_decode

from stoker_shared.errors import GuideRefused
from stoker_worker.ports import GenerationWork

SCHEMAS, ANSWER_TOKENS, ROWS, TURN_STEPS = 40, 64, 8, 8
MOST_LOST = 0.05
RECORDS: Final[Json] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
"""Long enough that no answer ends while it is measured."""

OWN: Final[Sequence[Json]] = (RECORDS["items"], {"enum": ["a", None, 1.5]}, {"type": "array", "items": {"const": 3}})


def work(bench: Bench, schema: Mapping[str, Any], *, max_tokens: int, temperature: float, seed: int) -> GenerationWork:
    """
    Raises:
        GuideRefused: llguidance does not support the schema.
    """
    text = f"Write a short JSON value that is valid for this JSON schema: {json.dumps(schema)}"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": dict(schema)}}
    fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "response_format": form}
    return chat_work(bench.model, text, **fields)


def suite_schemas(*, quick: bool) -> list[Json]:
    """Each schema of the suite once, in a random order; those of references to other documents are left out."""
    folder = os.environ.get("JSON_SCHEMA_SUITE")
    if folder is None:
        if not quick:
            raise SystemExit("set JSON_SCHEMA_SUITE to the suite's folder json/tests/draft2020-12")
        return list(OWN)
    found = {}
    for file in sorted(Path(folder).glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            text = json.dumps(schema)
            others = "http" in text.replace("https://json-schema.org", "")
            if isinstance(schema, dict) and not others and len(text) < 600:
                found[text] = {key: value for key, value in schema.items() if key != "$schema"}
    schemas = list(found.values())
    random.Random(23).shuffle(schemas)
    return schemas


def supported(bench: Bench, schemas: Sequence[Json]) -> Iterator[Json]:
    """Those that llguidance supports."""
    for schema in schemas:
        with suppress(GuideRefused):
            work(bench, schema, max_tokens=1, temperature=0.0, seed=0)
            yield schema


def validity(bench: Bench, schemas: Sequence[Json], temperature: float) -> Json:
    from jsonschema import Draft202012Validator

    works = [work(bench, schema, max_tokens=ANSWER_TOKENS, temperature=temperature, seed=n)
             for n, schema in enumerate(schemas)]  # fmt: skip
    with closing(bench.worker_engine(2 * ROWS, max_step_s=60.0)) as engine:
        ends, wrong = answers(engine, works), []
    for schema, end in zip(schemas, ends, strict=True):
        if end.ended_by != "eos":
            continue
        try:
            Draft202012Validator(schema).validate(json.loads(end.text))
        except Exception as error:  # not JSON, or not valid
            wrong.append({"schema": schema, "text": end.text, "why": f"{type(error).__name__}: {error}"[:200]})
    found = {
        "temperature": temperature,
        "answers": len(ends),
        "whole": sum(end.ended_by == "eos" for end in ends),
        "cut_off": sum(end.ended_by == "length" for end in ends),
        "failed": sum(end.outcome == "failed" for end in ends),
        "failures": sorted({str(end.error) for end in ends if end.error is not None}),
        "wrong": wrong,
    }
    note(f"temperature {temperature}: {found['whole']} whole, {found['cut_off']} cut off, {len(wrong)} wrong")
    return found


def step_ms(engine: Any, n_steps: int) -> float:
    """Milliseconds of a step, over `n_steps` of them."""
    import mlx.core as mx

    begin = time.perf_counter()
    for _ in range(n_steps):
        assert not engine.step()
    mx.synchronize()  # the pass that was begun ahead must not run in the other side's time
    return 1000 * (time.perf_counter() - begin) / n_steps


def cost(bench: Bench, temperature: float, turns: int) -> Json:
    """Both sides decode at once and take turns of a few steps, so that a slow second of the machine falls on both."""
    note(f"temperature {temperature}: {turns} turns")
    fields = {"max_tokens": 8 + TURN_STEPS * turns, "temperature": temperature}
    guided = [work(bench, RECORDS, seed=n, **fields) for n in range(ROWS)]
    with ExitStack() as engines:
        sides = {}
        for name, works in {"plain": [replace(one, guide=None) for one in guided], "guided": guided}.items():
            engine = engines.enter_context(closing(bench.endless().worker_engine(ROWS, max_step_s=60.0)))
            for one in works:
                engine.submit(one)
            let_decode(engine, 2)
            step_ms(engine, 1)
            sides[name] = partial(step_ms, engine, TURN_STEPS)
        taken = take_turns(sides, turns)
    speed = ratios(taken["plain"], taken["guided"])
    return {
        "rows": ROWS,
        "temperature": temperature,
        "turns": turns,
        "speed": speed | {"middle_half": [round(one, 3) for one in statistics.quantiles(speed["samples"])[::2]]},
        **{f"{name}_step_ms": spread(found, digits=1) for name, found in taken.items()},
    }


def beside(bench: Bench, max_tokens: int) -> Json:
    """A batch of eight with one guided row: are the others as they are alone?"""
    works = [work(bench, {"type": "object"}, max_tokens=max_tokens, temperature=0.0, seed=n) for n in range(ROWS)]
    texts = [tuple(bench.encode(f"Once upon a time, {n} little pigs")) for n in range(ROWS)]
    works = [one if n == 3 else replace(one, prompt_ids=texts[n], guide=None) for n, one in enumerate(works)]
    ends = bench.answers(works)
    same = sum(
        list(end.generated_ids) == bench.uncached(one.prompt_ids, max_tokens)
        for n, (one, end) in enumerate(zip(works, ends, strict=True))
        if n != 3
    )
    return {"plain_rows": ROWS - 1, "same": same}


def run(bench: Bench, folder: Path, *, quick: bool) -> Json:
    taken = list(islice(supported(bench, suite_schemas(quick=quick)), 2 if quick else SCHEMAS))
    valid = [validity(bench, taken, temperature) for temperature in (0.0, 1.5)]
    costs = [cost(bench, temperature, 2 if quick else 14) for temperature in (0.0, 1.0)]
    same = beside(bench, 8 if quick else 12)
    verdict = {
        "every_whole_answer_is_valid": all(not one["wrong"] and not one["failed"] for one in valid),
        "at_most_5_percent_of_the_speed_lost": min(one["speed"]["median"] for one in costs) >= 1 - MOST_LOST,
        "rows_beside_a_guided_one_are_as_alone": same["same"] == same["plain_rows"],
    }
    return {"verdict": verdict, "validity": valid, "costs": costs, "beside": same}


def render(content: Json, results: Path) -> Report:
    found = [{**one, "valid": one["whole"] - len(one["wrong"])} for one in content["validity"]]
    whole, valid = (sum(one[key] for one in found) for key in ("whole", "valid"))
    worst = min(content["costs"], key=lambda one: one["speed"]["median"])
    beside = content["beside"]
    summary = "\n".join((
        f"Of {whole} answers that ended by themselves, {valid} are valid for their schema.",
        f"With {worst['rows']} guided rows, a step takes {1 / worst['speed']['median']:.3f} times as long as with "
        f"{worst['rows']} plain ones, in the slower of the two loads.",
        f"{beside['same']} of {beside['plain_rows']} rows beside a guided one have the tokens they have alone.",
    ))  # fmt: skip
    all_valid = "all valid" if valid == whole else f"{whole - valid} not valid"
    number = f"{whole} whole answers, {all_valid}; {worst['speed']['median']} of the speed"
    return Report("answers that follow a schema", number, {
        "summary": summary, "validity": columns(found, VALIDITY), "costs": columns(content["costs"], COSTS),
    })  # fmt: skip


VALIDITY = {
    "temperature": "{temperature}", "answers": "{answers}", "whole": "{whole}", "of these valid": "{valid}",
    "cut off by max_tokens": "{cut_off}", "failed": "{failed}",
}  # fmt: skip
COSTS = {
    "temperature": "{temperature}", "turns": "{turns}", "ms a step: plain": "{plain_step_ms}",
    "guided": "{guided_step_ms}", "speed of the guided rows": "{speed}",
    "the middle half of it": "{speed[middle_half][0]} to {speed[middle_half][1]}",
}  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", "023", run, render)
