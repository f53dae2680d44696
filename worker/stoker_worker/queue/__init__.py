"""RQ for a worker that runs many jobs at once. In the worker, only this package imports rq."""
