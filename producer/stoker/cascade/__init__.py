"""Cheaper models first: the route of a job, and how far each model is trusted. Whether an answer passes is for the
worker to tell (`stoker_shared.check`), and so is sending the job on."""
