"""Which streams are sent as they are generated, without a server."""

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.producer.played_worker import result_fields

from stoker.serve.chunks import DONE, Chunks
from stoker.serve.generation import _events
from stoker_shared.result import GenerationResult


def test_a_stream_that_finds_no_place_is_sent_at_its_end():
    asyncio.run(two_streams_and_one_place())


async def two_streams_and_one_place():
    async def endless():
        await asyncio.Event().wait()
        yield

    async def result():
        return GenerationResult.model_validate(result_fields("j"))

    settings = SimpleNamespace(timeout_s=60)
    backend: Any = SimpleNamespace(live=asyncio.Semaphore(1), settings=settings)
    call: Any = SimpleNamespace(result=result, ticket=SimpleNamespace(stream=lambda timeout_s: endless()))
    chunks = Chunks("j", "m", 0, is_text=False, with_usage=False)

    async def all_events():
        return [event async for event in _events(backend, call, chunks, is_one=True)]

    streams = [asyncio.ensure_future(all_events()) for _ in range(2)]
    ended, waiting = await asyncio.wait(streams, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    for stream in waiting:
        stream.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [stream.result()[-1] for stream in ended] == [DONE]
