"""The `stoker-worker` command."""
