"""A producer on the session's server."""

from tests.server_fixture import producer  # noqa: F401
