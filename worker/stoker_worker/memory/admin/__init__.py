"""The shell's commands on a store, beside a running worker or without one: list, check, carry away, bring in.

Each module is a command or two of `stoker-worker memory`. Built on `stoker_worker.memory`, which knows nothing of it.
"""
