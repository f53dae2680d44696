"""The header of a GGUF file: the type of each tensor. Owns nothing; any thread, imports no MLX.

MLX reads GGUF files, but it does not tell a tensor's type, and it converts types that it cannot keep packed to float16,
some of them wrongly (Q4_K, seen with mlx 0.32.4). So the types are checked before MLX reads the file.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import BinaryIO, Final

from stoker_shared.errors import ModelNotLoadable

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_COUNT: Final = 1 << 24
"""More tensors, keys or bytes of a name than any real file has: a larger count is damaged."""

_TYPE_NAMES: Final = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 30: "BF16", 39: "MXFP4"},
}


def read_tensor_types(file: Path) -> dict[str, str]:
    """The type of every tensor of `file`, such as ``{"output_norm.weight": "F32"}``.

    Raises:
        ModelNotLoadable: the file cannot be read, is not GGUF version 2 or 3, or ends inside its header.
    """
    try:
        with file.open("rb") as stream:
            return _read(stream)
    except OSError as error:
        raise ModelNotLoadable(f"cannot read {file}: {error.strerror or error}") from None
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelNotLoadable(f"{file} is not a complete GGUF file: {error}") from None


def _read(stream: BinaryIO) -> dict[str, str]:
    if stream.read(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version, n_tensors, n_keys = _numbers(stream, "<IQQ")
    if version not in (2, 3):
        raise ValueError(f"it has version {version}, only 2 and 3 are read")
    for _ in range(_sane(n_keys)):
        _string(stream)
        _skip_value(stream, _numbers(stream, "<I")[0])
    types = {}
    for _ in range(_sane(n_tensors)):
        name = _string(stream)
        (n_dims,) = _numbers(stream, "<I")
        _numbers(stream, f"<{_sane(n_dims)}Q")
        type_id, _offset = _numbers(stream, "<IQ")
        types[name] = _TYPE_NAMES.get(type_id, f"type {type_id}")
    return types


def _skip_value(stream: BinaryIO, value_type: int) -> None:
    if value_type == _STRING:
        stream.seek(_numbers(stream, "<Q")[0], 1)
    elif value_type == _ARRAY:
        item_type, count = _numbers(stream, "<IQ")
        if item_type in _SCALAR_BYTES:
            stream.seek(_SCALAR_BYTES[item_type] * count, 1)
        else:
            for _ in range(_sane(count)):
                _skip_value(stream, item_type)
    elif value_type in _SCALAR_BYTES:
        stream.seek(_SCALAR_BYTES[value_type], 1)
    else:
        raise ValueError(f"metadata type {value_type} is unknown")


def _string(stream: BinaryIO) -> str:
    return stream.read(_sane(_numbers(stream, "<Q")[0])).decode()


def _numbers(stream: BinaryIO, layout: str) -> tuple[int, ...]:
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _sane(count: int) -> int:
    if count > _MAX_COUNT:
        raise ValueError(f"a count of {count} in its header")
    return count
