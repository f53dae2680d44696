"""Agent memory on disk: transcripts, which are the truth, and caches, which only save time.

`store.AgentCacheStore` is the way in; ``docs/storage-format.md`` describes every file. No MLX, no Redis, no rq.
"""
