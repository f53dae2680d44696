"""The device that MLX computes on, and the memory that it has for models. Any thread; imports MLX when it is called."""

import os


def is_gpu() -> bool:
    """Whether MLX computes on Metal or CUDA."""
    import mlx.core as mx

    return bool(mx.default_device() == mx.Device(mx.gpu))


def memory_for_models() -> int:
    """Bytes that weights and caches may take together: those of a Mac's GPU, of a CUDA card, or the RAM."""
    import mlx.core as mx

    info = mx.device_info() if is_gpu() else {}
    of_gpu = (info[key] for key in ("max_recommended_working_set_size", "memory_size", "total_memory") if key in info)
    return int(next(of_gpu, ram_bytes()))


def ram_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
