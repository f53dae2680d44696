"""Decides which worker an agent's next job may go to. Knows two hashes in Redis, and no queue's lists."""
