"""`stoker serve`: OpenAI's and Anthropic's HTTP APIs in front of the queue. All modules but `batch_runner`, `command`,
`settings` and `store` need the packages of the extra ``serve``.

A call becomes a job, and a job's result becomes a response. This process keeps nothing: jobs and limits are in Redis,
files, batches and responses in the batch store, so several processes can serve the same queue and the same store.
"""
