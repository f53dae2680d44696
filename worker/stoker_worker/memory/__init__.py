"""Agent memory on disk: transcripts, which are the truth, and cache blocks, which only save time.

`store.AgentStore` is the way in; ``docs/storage-format.md`` describes every file. No MLX, no Redis, no rq.
"""
