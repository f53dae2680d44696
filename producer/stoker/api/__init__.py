"""The HTTP APIs of `stoker batch` and `stoker serve`: from a body to stoker's requests, and from results and errors to
bodies and events. A line of a file and a call over HTTP mean the same. Pure; knows no web framework and no Redis."""
