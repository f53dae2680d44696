"""The stages that a job passes through, from the claim to its end: one a file, each with a reference to the next."""
