"""The resident worker: takes jobs from Redis, runs them in one batch, keeps agent memory on disk, posts results.

Read `pipeline/worker.py` first, then `docs/lifecycle.md`. Importing this package imports neither mlx nor rq.
"""
