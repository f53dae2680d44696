"""OpenAI's HTTP bodies: from a request body to a request of stoker's, and from a result or an error to a body. Pure.

`stoker batch` and `stoker serve` share it, so a line of a file and a call over HTTP mean the same.
"""
