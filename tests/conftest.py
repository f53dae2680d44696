"""Fixtures for every test. OpenBLAS is preloaded here, because it must come before the first import of MLX."""

from stoker_worker.engine.blas import preload_openblas

preload_openblas()

from tests.model_fixture import smollm2  # noqa: E402, F401
from tests.node_fixture import node_folder  # noqa: E402, F401
from tests.server_fixture import redis_server, redis_url  # noqa: E402, F401
from tests.small_disk import small_disk  # noqa: E402, F401
