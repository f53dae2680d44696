"""A producer on the session's server."""

from tests.support.server_fixture import producer  # noqa: F401
