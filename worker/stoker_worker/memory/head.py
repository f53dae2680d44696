"""HEAD: which version of an agent is the newest. Pure; the rename of this file is the commit of a turn."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from stoker_worker.memory.sealed import Damaged, seal, unseal


@dataclass(frozen=True)
class Head:
    """Version 0 is an agent whose first turn has not been committed yet.

    Attributes:
        record: checksum of the newest record, so that one that was removed, changed or exchanged is noticed.
    """

    version: int
    record: str = ""

    def encode(self) -> bytes:
        return seal("stoker-head", json.dumps(asdict(self)).encode() + b"\n")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises `Damaged`."""
        body = unseal("stoker-head", data)
        try:
            return cls(**json.loads(body))
        except (TypeError, ValueError):
            raise Damaged("its content is not a head") from None
