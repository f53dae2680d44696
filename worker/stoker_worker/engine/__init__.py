"""Everything MLX. Only modules in here import mlx or mlx_lm, and only the engine thread calls into those that do."""
