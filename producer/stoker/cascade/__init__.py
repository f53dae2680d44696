"""Cheaper models first: the route of a job, and how far each model is trusted. The worker decides whether an answer
passes (`stoker_shared.check`), and sends the job on."""
