"""`stoker serve`: OpenAI's HTTP in front of the queue. All but `command` needs the packages of the extra ``serve``.

A call becomes a job, and a job's result becomes a response. Nothing is kept here: the jobs and the limits are in Redis,
files and batches in the batch store, so several processes can serve the same queue and the same store.
"""
