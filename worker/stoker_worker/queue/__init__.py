"""RQ under a worker that runs many jobs at once. Only modules in here import rq."""
