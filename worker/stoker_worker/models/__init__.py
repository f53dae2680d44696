"""A model's files, tokenizer, identity and cache layout, without the engine that runs it."""
