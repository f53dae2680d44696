"""The product's engine and store on a real model, with mlx-lm's own run as the reference. Experiments only.

A turn follows a job's way through the worker: `build_prompt`, `AgentCacheStore.restore`, `BlockPoolBatchEngine`,
`next_transcript`, `AgentCacheStore.save`. Only Redis and the threads are left out. MLX is imported after the BLAS
library is loaded.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from command import Render, arguments, finish
from common import Json, machine
from smollm2 import smollm2
from works import Endless, answers

from stoker_shared import build_request
from stoker_shared.request import GenerationRequest
from stoker_worker.memory.store import AgentCacheStore
from stoker_worker.models.blas import preload_blas
from stoker_worker.pipeline.answer import read_answer
from stoker_worker.pipeline.prompt import Prompt, build_prompt, next_transcript
from stoker_worker.ports import AgentVersion, CompletedGeneration, Delivery, GenerationWork, LoadedModel, Restored, Turn
from stoker_worker.ports.cache_spec import StoreDtype

MAX_BATCH = 8
POOL_BLOCKS = 64


@dataclass(frozen=True)
class Prepared:
    """A turn that is ready for the engine, as the loader prepares it."""

    request: GenerationRequest
    agent: AgentVersion
    prompt: Prompt
    restored: Restored
    work: GenerationWork

    @property
    def cached(self) -> int:
        return self.work.prefix.n_tokens if self.work.prefix else 0


@dataclass
class Bench:
    """A loaded model and the operations that experiments run on it.

    Attributes:
        source: the worker's `--model` option; `dtype` is its `--dtype`.
    """

    network: Any
    model: LoadedModel
    tokenizer: Any
    title: str
    source: str
    dtype: Any
    _references: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    @classmethod
    def load(cls, model: str | None, dtype: Any) -> Self:
        preload_blas()
        from mlx_lm.utils import load_tokenizer

        from stoker_worker.models.loading import load_model, local_folder

        name = model or str(smollm2())
        network, loaded = load_model(name, dtype)
        tokenizer = load_tokenizer(local_folder(name) or name, eos_token_ids=sorted(loaded.tokenizer.eos_ids))
        source = str(local_folder(name) or name)
        return cls(network, loaded, tokenizer, loaded.name if model else "SmolLM2-135M-Instruct", source, dtype)

    def storing(self, store_dtype: StoreDtype) -> Self:
        """The same network for a worker with ``--store-dtype``: another fingerprint, so a store never mixes them."""
        from stoker_worker.models.loading import load_model

        return replace(self, model=load_model(self.source, self.dtype, store_dtype=store_dtype)[1])

    def as_computed(self, folder: Path) -> Path:
        """The model for another program, as it is computed with here: in a new folder unless its dtype is ``auto``.
        With packed weights, mlx-lm alone would multiply as they are, which is much slower on a CPU."""
        if self.dtype == "auto":
            return Path(self.source)
        import mlx.core as mx
        from mlx.utils import tree_flatten

        source = Path(self.source)
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
        config = json.loads((source / "config.json").read_text())
        kept = {name: value for name, value in config.items() if not name.startswith("quantization")}
        (folder / "config.json").write_text(json.dumps(kept))
        weights = dict(tree_flatten(self.network.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        return folder

    def with_room(self) -> Self:
        """The same model for stores that restore prefixes into the engine's own memory, as a worker's does."""
        from stoker_worker.engine.transfer import MlxRoom

        return replace(self, model=replace(self.model, room_type=MlxRoom))

    def endless(self) -> Self:
        """The same model without an end of sequence."""
        return replace(self, model=replace(self.model, tokenizer=Endless(self.model.tokenizer)))

    def in_8_bits(self) -> Self:
        """The model for a worker with ``--kv-bits 8``: a network of its own, because it makes other caches."""
        from stoker_worker.models.loading import load_model

        network, loaded = load_model(self.source, self.dtype, kv_bits=8)
        return replace(self, network=network, model=loaded, _references={})

    def engine(self) -> Any:
        """A new engine, small and with small chunks of prefill: to compare tokens, not times."""
        return self._assembled(
            max_bytes=POOL_BLOCKS * self.model.spec.bytes_per_block,
            max_batch=MAX_BATCH,
            prefill_tokens=1024 if self.on_gpu else 128,
            max_step_s=60.0,
        )

    def worker_engine(self, max_batch: int, *, max_step_s: float, draft_ngram: bool = False) -> Any:
        """A new engine at the settings of a worker."""
        return self._assembled(
            max_bytes=8 << 30,
            max_batch=max_batch,
            prefill_tokens=self.worker_chunk,
            max_step_s=max_step_s,
            draft_ngram=draft_ngram,
        )

    def _assembled(self, **settings: Any) -> Any:
        from stoker_worker.engine.batch_engine import assemble

        return assemble(self.network, self.model, **settings)

    def answers(self, works: Sequence[GenerationWork]) -> list[CompletedGeneration]:
        """The ends of all these sequences, in their order, from one batch of a new engine."""
        with closing(self.engine()) as engine:
            return answers(engine, works)

    @property
    def worker_chunk(self) -> int:
        """Most tokens of a prompt that a worker prefills in a step."""
        return 1024 if self.on_gpu else 256

    @property
    def facts(self) -> Json:
        """What a report states about the model, for `machine`."""
        spec = self.model.spec
        return {"model": self.title, "cache_dtype": spec.dtype, "cache_bytes_per_token": spec.bytes_per_token}

    @property
    def on_gpu(self) -> bool:
        import mlx.core as mx

        return bool(mx.default_device() == mx.Device(mx.gpu))

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text, special_start=True)

    def uncached(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """The reference: mlx-lm's `stream_generate`, one sequence, no cache of earlier tokens, greedy."""
        from mlx_lm import stream_generate

        key = (tuple(ids), max_tokens)
        if key not in self._references:
            run = stream_generate(self.network, self.tokenizer, list(ids), max_tokens=max_tokens)
            self._references[key] = [response.token for response in run]
        return list(self._references[key])

    def prepare(self, store: AgentCacheStore, fields: Mapping[str, Any], *, beside_others: bool = False) -> Prepared:
        """Prepare a turn as the loader does; `beside_others` as in `CacheStorePort.restore`."""
        request = build_request({"max_tokens": 12, **fields})
        uses_memory = request.cache != "off"
        agent = store.open_agent(request.agent_id) if uses_memory else AgentVersion(request.agent_id, 0, None)
        prompt = build_prompt(request, agent.transcript, self.model, self.model.tokenizer)
        restored = Restored(prefix=None, source="none")
        if uses_memory:
            restored = store.restore(
                prompt.ids,
                agent=agent,
                model=self.model,
                salt=request.cache_salt,
                max_tokens=request.max_tokens,
                is_saved=request.cache == "readwrite",
                beside_others=beside_others,
            )
        work = GenerationWork(request, prompt.ids, restored.prefix, is_saved=request.cache == "readwrite")
        return Prepared(request, agent, prompt, restored, work)

    def save(self, store: AgentCacheStore, prepared: Prepared, completion: CompletedGeneration) -> float:
        """Save a turn as the finisher does; returns the seconds it took."""
        start = time.perf_counter()
        delivery = Delivery(job_id=f"{prepared.request.agent_id}-{prepared.agent.number}", created_at="0")
        answer = read_answer(prepared.request, prepared.prompt, completion, self.model, delivery.job_id)
        turn = Turn(
            base=prepared.agent,
            delivery=delivery,
            transcript=next_transcript(prepared.prompt, completion, answer.message(), self.model),
            model=self.model,
            cache_salt=prepared.request.cache_salt,
            cache=completion.cache,
            result={"version": prepared.agent.number + 1},
        )
        store.save(turn)
        return time.perf_counter() - start

    def serve(
        self, store: AgentCacheStore, all_fields: Sequence[Mapping[str, Any]]
    ) -> dict[str, tuple[Prepared, CompletedGeneration]]:
        """One turn of each agent in one continuous batch. Each turn is saved when it ends, unless it only reads."""
        engine = self.engine()
        running = {engine.submit(turn.work): turn for turn in [self.prepare(store, fields) for fields in all_fields]}
        done = {}
        while engine.in_flight:
            for completion in engine.step():
                turn = running[completion.uid]
                if turn.request.cache == "readwrite":
                    self.save(store, turn, completion)
                done[turn.request.agent_id] = (turn, completion)
        engine.close()
        return done


def main(about: str, number: str, run: Callable[..., Json], render: Render, **more: Json) -> None:
    """An experiment's command: call `run(bench, folder, quick=...)` on the chosen model, in a temporary folder.

    Args:
        more: options of this experiment alone, as in `arguments`; `run` gets them by name.
    """
    args = arguments(about, model=True, more=more)
    own = {name: getattr(args, name) for name in more}

    def measure(*, quick: bool) -> Json:
        bench = Bench.load(args.model, args.dtype)
        with tempfile.TemporaryDirectory() as folder:
            return {"machine": machine(bench.facts), **run(bench, Path(folder), quick=quick, **own)}

    finish(args, number, measure, render)
