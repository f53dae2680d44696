"""A model's identity: cached bytes and token ids are usable only where it is equal. Owns the digests; imports no MLX.
Engine thread, while the model is loaded.

Weight files are hashed with xxh3 (they are tens of gigabytes, and nobody attacks their own cache); SHA-256 joins the
parts. A file's digest is remembered by path, size, time and inode, so unchanged files are not read again.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from stoker_worker.models.extras import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NO_EXTRAS, ModelExtras
from stoker_worker.models.memo_file import read_memo, write_memo
from stoker_worker.ports.model import ServingMode

_CHUNK_BYTES: Final = 1 << 22

_TOKENIZER_FILES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "*.tiktoken"),
)
"""Patterns of a tokenizer's files. The chat template may be in any of several, so the loaded tokenizer gives it."""


@dataclass(frozen=True)
class ModelFolder:
    """A model's files. The JSON file `memo` remembers digests of weights; ``None``: each start reads all weights."""

    path: Path
    memo: Path | None = None

    def tokenizer_fingerprint(self, chat_template: str) -> str:
        """Hex SHA-256 over the tokenizer's files and the chat template."""
        files = sorted({file for pattern in _TOKENIZER_FILES for file in self.path.glob(pattern)})
        parts = {file.name: _sha256(file) for file in files}
        return _digest({"files": parts, "chat_template": chat_template})

    def model_fingerprint(
        self, *, tokenizer_fingerprint: str, cache_spec: str, dtype: str, extras: ModelExtras = NO_EXTRAS
    ) -> str:
        """Hex SHA-256 over weights, config, tokenizer and template, cache layout and dtype, and over an adapter and
        trusted code if there are any.

        Args:
            cache_spec: `ModelCacheSpec.describe()`.
            dtype: how the weights were loaded (`native` or `float32`).
        """
        # Exactly the files that mlx-lm loads weights from.
        weights = sorted(self.path.glob("model*.safetensors"))
        adapter = extras.adapter_folder
        files = {file.name: file for file in weights}
        if adapter:
            files[ADAPTER_WEIGHTS] = adapter / ADAPTER_WEIGHTS
        digests = dict(zip(files, self._weight_digests([*files.values()]), strict=True))
        parts: dict[str, Any] = {
            "weights": {file.name: digests[file.name] for file in weights},
            "config": _read_json(self.path / "config.json"),
            "tokenizer": tokenizer_fingerprint,
            "cache": cache_spec,
            "dtype": dtype,
        }
        if adapter:
            parts["adapter"] = {"weights": digests[ADAPTER_WEIGHTS], "config": _read_json(adapter / ADAPTER_CONFIG)}
        if extras.trust_remote_code:
            code = sorted(self.path.rglob("*.py"))
            parts["code"] = {str(file.relative_to(self.path)): _sha256(file) for file in code}
        return _digest(parts)

    def _weight_digests(self, files: Sequence[Path]) -> list[str]:
        known = read_memo(self.memo)
        fresh: dict[str, Any] = {}
        paths = [os.path.realpath(file) for file in files]
        for path in paths:
            stat = os.stat(path)
            identity = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
            entry = known.get(path)
            if not isinstance(entry, dict) or entry.get("identity") != identity:
                entry = {"identity": identity, "xxh3_128": _xxh3_128(Path(path))}
            fresh[path] = entry
        if any(known.get(path) != entry for path, entry in fresh.items()):
            write_memo(self.memo, {**known, **fresh})
        return [str(fresh[path]["xxh3_128"]) for path in paths]


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _xxh3_128(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def in_mode(fingerprint: str, mode: ServingMode) -> str:
    """The fingerprint of a model that is served in `mode`: a cache made in one mode may be wrong in another one."""
    return _digest({"model": fingerprint, "mode": str(mode)})


def _digest(parts: Mapping[str, Any]) -> str:
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
