"""RQ under a worker that runs many jobs at once. In the worker, only these modules import rq."""
