"""The continuous batch. Only the engine thread uses this package; only it and `models` import mlx or mlx_lm."""
