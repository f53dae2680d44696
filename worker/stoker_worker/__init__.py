"""The resident worker: Redis queue in, one continuous batch, agent memory on disk, results out.

Read `inbox.py` first (the loop), then `docs/lifecycle.md`. Importing this package imports neither mlx nor rq.
"""
