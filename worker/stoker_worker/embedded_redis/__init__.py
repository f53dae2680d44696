"""A Redis server of the worker's own."""
