"""`stoker-worker doctor`: looks at the machine, the queue's server, the store and a model, and measures the model."""
