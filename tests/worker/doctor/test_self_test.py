"""The doctor's self-test: its figures, and the faults that it has to find."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.worker.models.gguf.gguf_writer import write_gguf
from tests.worker.models.gguf.tiny_gguf import metadata, random_weights

from stoker_shared.errors import ModelNotLoadable
from stoker_worker.doctor import speed
from stoker_worker.doctor.check import Finding, Status
from stoker_worker.doctor.examination import self_test
from stoker_worker.engine.scripted import ScriptedEngine, ScriptedProvider
from stoker_worker.ports import CompletedGeneration, GenerationWork, LoadedModel, ModelProviderPort
from stoker_worker.settings import read_settings

NAMES = [
    *("model loads", "model memory", "batched equals single"),
    *("prefill", "save", "restore", "restored equals fresh"),
    *("decode, batch 1", "decode, batch 8", "decode, batch 16", "decode, batch 32"),
]


class Provider(ModelProviderPort):
    """A scripted engine with a fault."""

    def __init__(self, fault: "Callable[[Faulty], bool]" = lambda engine: False, dtype: str = "float32") -> None:
        self._fault = fault
        self._dtype = dtype

    def load(self) -> tuple[ScriptedEngine, LoadedModel]:
        _, loaded = ScriptedProvider(max_batch=16, steps_per_s=1e6).load()
        return Faulty(self._fault), replace(loaded, spec=replace(loaded.spec, dtype=self._dtype))

    def leave_thread(self) -> None:
        raise AssertionError("the doctor runs on the main thread, which does not end before the process")


class Faulty(ScriptedEngine):
    """It ends sequences with other tokens while its fault says so."""

    def __init__(self, fault: "Callable[[Faulty], bool]") -> None:
        super().__init__(max_batch=16, steps_per_s=1e6)
        self._fault = fault
        self.prefixes: set[int] = set()

    def submit(self, work: GenerationWork) -> int:
        uid = super().submit(work)
        if work.prefix is not None:
            self.prefixes.add(uid)
        return uid

    def step(self) -> list[CompletedGeneration]:
        is_wrong = self._fault(self)
        ended = super().step()
        return [replace(one, generated_ids=one.generated_ids[::-1]) for one in ended] if is_wrong else ended


def found_by(provider: ModelProviderPort, folder: Path) -> dict[str, Finding]:
    found = dict(self_test(provider, folder, seconds=0.01))
    json.dumps([dict(finding.figures) for finding in found.values()])
    return found


def faults(found: dict[str, Finding]) -> list[str]:
    return [name for name, finding in found.items() if finding.status != Status.OK]


def test_a_right_engine_passes_with_figures(tmp_path: Path) -> None:
    provider = Provider()
    found = found_by(provider, tmp_path)
    assert (list(found), faults(found)) == (NAMES, [])
    assert found["restore"].figures["tokens"] >= found["prefill"].figures["prompt_tokens"] >= 256
    assert found["decode, batch 32"].line == "not applicable: the worker would run 16 at once"


def test_the_rate_of_a_batch_is_that_of_all_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()  # the clock of the measurement: each step takes one second
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(seconds), monotonic=time.monotonic))
    engine, loaded = ScriptedProvider(max_batch=16, steps_per_s=1e6).load()
    for width in (1, 8, 16):
        figures = speed.decode(engine, loaded, width, 3.0).figures
        assert figures == {"batch": width, "tokens_per_s": width, "measured_s": 3}
        assert engine.in_flight == 0


def test_an_engine_that_answers_otherwise_in_a_batch_is_found(tmp_path: Path) -> None:
    assert faults(found_by(Provider(lambda engine: engine.in_flight > 1), tmp_path)) == ["batched equals single"]


def test_an_engine_that_answers_otherwise_from_a_cache_is_found(tmp_path: Path) -> None:
    found = found_by(Provider(lambda engine: bool(engine.prefixes & set(engine.progress()))), tmp_path)
    assert faults(found) == ["restored equals fresh"]


def test_in_half_precision_other_tokens_are_counted_and_no_fault(tmp_path: Path) -> None:
    found = found_by(Provider(lambda engine: engine.in_flight > 1, dtype="float16"), tmp_path)
    assert found["batched equals single"].status == Status.OK
    assert found["batched equals single"].figures["same"] < found["batched equals single"].figures["of"]


def test_a_step_that_raises_fails_its_checks_and_no_other(tmp_path: Path) -> None:
    def breaks(engine: Faulty) -> bool:
        if engine.in_flight == 5:
            raise RuntimeError("[metal::malloc] too much")
        return False

    found = found_by(Provider(breaks), tmp_path)
    assert (list(found), faults(found)) == (NAMES, ["batched equals single"])
    assert found["batched equals single"].line == "RuntimeError: [metal::malloc] too much"


def test_a_model_that_does_not_load_ends_the_self_test(tmp_path: Path) -> None:
    class Refusing(Provider):
        def load(self) -> Any:
            raise ModelNotLoadable("no such model")

    provider = Refusing()
    found = found_by(provider, tmp_path)
    assert [(name, finding.status, finding.line) for name, finding in found.items()] == [
        ("model loads", Status.FAIL, "no such model")
    ]


@pytest.mark.mlx
def test_a_tiny_model_passes(tmp_path: Path) -> None:
    from stoker_worker.engine.provider import MlxProvider
    from stoker_worker.models.gguf.importer import import_gguf

    weights, _ = random_weights(biases=True, tied=True)
    write_gguf(tmp_path / "tiny.gguf", metadata("qwen2", pre="qwen2"), weights)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    settings = read_settings({"store": tmp_path / "store", "model": str(tmp_path / "tiny"), "max_batch": 8})
    (tmp_path / "scratch").mkdir()
    found = found_by(MlxProvider(settings), tmp_path / "scratch")
    assert (list(found), faults(found)) == (NAMES, [])
    assert found["batched equals single"].figures == {"same": 5, "of": 5, "exact": True}
    assert found["model memory"].figures["sequences_of_1024_tokens"] > 8
    assert found["restore"].figures["bytes"] > 0
