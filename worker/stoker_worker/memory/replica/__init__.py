"""Agent memory that outlives its machine: versions and caches in a bucket that several workers share.

`SharedReplica` is the way in; ``docs/storage-format.md`` describes every object. No MLX, no Redis, no rq.
"""
