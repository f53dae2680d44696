"""Reads the worker's settings from a TOML file. Owns its place and its syntax, and knows no setting. No state."""

import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

USUAL_PLACE: Final = "~/.config/stoker/worker.toml"
"""Read if it exists and no other file is named."""


def settings_file(named: object) -> Path | None:
    """The file to read.

    Args:
        named: ``None`` for the usual place, an empty text for no file.
    """
    if named is None:
        usual = Path(USUAL_PLACE).expanduser()
        return usual if usual.exists() else None
    return Path(str(named)).expanduser() if str(named) else None


def read_settings_file(path: Path, known: Collection[str]) -> dict[str, Any]:
    """The settings in the file, by name, as an option or a variable would give them.

    Args:
        known: the names that it may have; ``-`` in the file counts as ``_``.

    Raises:
        ValueError: it cannot be read, is no TOML, or has an unknown name.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # TOML's errors, and text that is not UTF-8
        raise ValueError(f"{path} is not TOML: {error}") from None
    values = {name.replace("-", "_"): _as_given(value) for name, value in content.items()}
    if unknown := sorted(values.keys() - set(known)):
        raise ValueError(
            f"{path} has unknown settings: {', '.join(_with_the_nearest(name, known) for name in unknown)}"
        )
    return values


def _as_given(value: object) -> object:
    """Options have no lists and no tables: they are ``a,b`` and ``key=value,...`` there."""
    match value:
        case list():
            return ",".join(map(str, value))
        case Mapping():
            return ",".join(f"{key}={part}" for key, part in value.items())
    return value


def _with_the_nearest(name: str, known: Collection[str]) -> str:
    nearest = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name
