"""GGUF files as mlx-lm folders."""
