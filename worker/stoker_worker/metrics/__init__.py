"""Counts the worker's work, and shows it: to Prometheus, to health checks, and to `stoker status`."""
