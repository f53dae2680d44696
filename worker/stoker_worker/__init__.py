"""The resident worker: Redis queue in, one continuous batch, agent memory on disk, results out.

Read `pipeline/worker.py` first, then `docs/lifecycle.md`. Importing this package imports neither mlx nor rq.
"""
