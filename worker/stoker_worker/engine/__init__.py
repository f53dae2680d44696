"""The continuous batch. Engine thread, unless a module names another one. Only `engine` and `models` import mlx_lm."""
