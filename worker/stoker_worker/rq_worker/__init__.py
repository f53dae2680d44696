"""RQ 3 as a durable queue under a concurrent worker: the only package here that imports rq."""
