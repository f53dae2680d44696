"""A connection to the session's server."""

from tests.server_fixture import connection  # noqa: F401
