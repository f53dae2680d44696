"""Counts the worker's work, and shows it to Prometheus, health checks and `stoker status`."""
