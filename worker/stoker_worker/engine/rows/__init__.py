"""Rows with caches of their own: a batch that neither pads nor copies."""
