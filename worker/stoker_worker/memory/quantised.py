"""K/V in 8 or 4 bits per element, for blocks on disk: affine, in groups of neighbours along the head's dim.

Pure NumPy, any thread. An element is ``q * scale + bias`` with its group's float32 scale and bias. The error is at most
half a scale, and the rounding of the element's dtype. No group spans two tokens, so elements that were read from one
block and written to another do not change again.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from stoker_worker.ports import Array
from stoker_worker.ports.cache_spec import group_size

BITS: Final = {"q8": 8, "q4": 4}
"""Bits per element, by `StoreDtype`."""

_WIDE: Final = 1e35
"""From this scale on `q * scale` could exceed float32, so it is computed in float64. No real model comes near."""

_MOST: Final = {"float32": float(np.finfo(np.float32).max), "float16": 65504.0, "uint16": (2 - 2**-7) * 2.0**127}
"""Largest number of each dtype; uint16 holds bfloat16."""

Quantised = tuple[Array, Array, Array]
"""(elements as uint8, scales, biases): shapes (heads, tokens, bytes), and twice (heads, tokens, groups) in float32."""


def packed_shapes(shape: tuple[int, int, int], bits: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of the elements and of the scales (and biases) of an array of `shape`."""
    heads, tokens, dim = shape
    return (heads, tokens, -(-dim * bits // 8)), (heads, tokens, dim // group_size(dim))


def quantise(array: Array, bits: int) -> Quantised:
    """
    Args:
        array: (heads, tokens, dim) in float32, float16, or uint16 that holds bfloat16. No working model has elements
            that are not finite: NaN becomes 0, infinity the largest number of the dtype.
    """
    heads, tokens, dim = array.shape
    group = group_size(dim)
    wide = _as_float32(array).reshape(heads, tokens, dim // group, group)
    low, high = wide.min(axis=-1, initial=np.inf), wide.max(axis=-1, initial=-np.inf)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        wide = np.nan_to_num(wide, posinf=_MOST[array.dtype.name], neginf=-_MOST[array.dtype.name])
        low, high = wide.min(axis=-1), wide.max(axis=-1)
    levels = 2**bits - 1
    exact = (high.astype(np.float64) - low) / levels
    scales = exact.astype(np.float32)
    # Rounded up, so that the levels span from the lowest element to the highest, subnormal or not.
    scales = np.where(scales < exact, np.nextafter(scales, np.float32(np.inf)), scales)
    steps = np.where(scales > 0, scales, 1)[..., None]
    offsets = wide - (low if scales.max(initial=0) < _WIDE else low.astype(np.float64))[..., None]
    elements = np.rint(offsets / steps).clip(0, levels).astype(np.uint8).reshape(heads, tokens, dim)
    return (_packed(elements) if bits == 4 else elements), scales, low


def dequantise(quantised: Quantised, bits: int, target: Array) -> None:
    """Fill `target` (heads, tokens, dim), in a dtype as `quantise` takes them; bfloat16 is rounded to nearest even."""
    elements, scales, biases = quantised
    heads, tokens, dim = target.shape
    if bits == 4:
        elements = _unpacked(elements, dim)
    wide = target if target.dtype == np.float32 else np.empty(target.shape, np.float32)
    grouped = wide.reshape(heads, tokens, scales.shape[-1], -1)  # a view: only the last axis is split
    elements = elements.reshape(grouped.shape)
    if scales.max(initial=0) < _WIDE:
        np.multiply(elements, scales[..., None], out=grouped)
        grouped += biases[..., None]
    else:
        most = _MOST["float32"]
        exact = elements * scales[..., None].astype(np.float64) + biases[..., None]
        np.copyto(grouped, exact.clip(-most, most), casting="same_kind")
    if target.dtype == np.uint16:
        target[:] = _to_bfloat16(wide)
    elif wide is not target:
        np.copyto(target, wide, casting="same_kind")


def _as_float32(array: Array) -> Array:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _to_bfloat16(array: Array) -> Array:
    """The upper halves of float32, rounded to nearest even; the elements are finite."""
    bits: NDArray[np.uint32] = array.view(np.uint32)
    rounded: Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return rounded


def _packed(elements: Array) -> Array:
    """Two elements per byte, the first in the low half; the last element of an odd dim has a byte of its own."""
    packed = elements[..., 0::2].copy()
    packed[..., : elements.shape[-1] // 2] |= elements[..., 1::2] << 4
    return packed


def _unpacked(packed: Array, dim: int) -> Array:
    elements: Array = np.empty((*packed.shape[:-1], dim), np.uint8)
    elements[..., 0::2] = packed & 15
    elements[..., 1::2] = (packed >> 4)[..., : dim // 2]
    return elements
