"""Log lines with fixed words and fields: events of jobs, outages. Any thread; no I/O but the log."""
