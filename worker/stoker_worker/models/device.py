"""The device that MLX computes on, and its memory for models. Any thread; imports MLX when it is called."""

import os


def is_gpu() -> bool:
    """True if MLX computes on Metal or CUDA."""
    import mlx.core as mx

    return bool(mx.default_device() == mx.Device(mx.gpu))


def memory_for_models() -> int:
    """Bytes for weights and caches together: those of a Mac's GPU, of a CUDA card, or the RAM."""
    import mlx.core as mx

    info = mx.device_info() if is_gpu() else {}
    of_gpu = (info[key] for key in ("max_recommended_working_set_size", "memory_size", "total_memory") if key in info)
    return int(next(of_gpu, ram_bytes()))


def ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
