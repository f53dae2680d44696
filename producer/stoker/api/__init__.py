"""The HTTP APIs that callers speak: from a body to requests of stoker's, and from results and errors to bodies and
events. Pure; knows no web framework and no Redis.

`stoker batch` and `stoker serve` share it, so a line of a file and a call over HTTP mean the same.
"""
