"""The worker as a service of the user's own: a launchd agent on a Mac, a systemd user unit on Linux."""
