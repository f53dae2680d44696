"""The stages that a job passes through, from the claim to its end: one stage a file, each holding the next."""
