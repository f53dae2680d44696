"""What is known of a waiting job before it is claimed: how it uses memory, and what it needs. Pure, no I/O.

Our own producer notes both in fields of the job's hash. Of other producers' jobs the request itself is read.
"""

from typing import NamedTuple

from stoker_shared.foreign_json import read_json
from stoker_shared.job_data import MAX_DATA_BYTES, unpacked
from stoker_shared.needs import NOTHING, Needs
from stoker_shared.request import Access
from stoker_shared.wire import REQUEST_KWARG
from stoker_worker.ports import UNUSED, MemoryUse


class Hint(NamedTuple):
    use: MemoryUse
    needs: Needs


def hint_in(data: bytes | None, needs_noted: bytes = b"") -> Hint:
    """Of a job with this stored `data`; `UNUSED` and `NOTHING` if it cannot be read.

    Args:
        needs_noted: the end of `FIELD_NEEDS`, if the job has it. It comes before what the request has: a worker that
            sent the job on to the next model of its route has written it.
    """
    try:
        call = read_json(unpacked(data or b""), MAX_DATA_BYTES)
        task_path, request = call[0], call[3][REQUEST_KWARG]
        needs = _noted(needs_noted) if needs_noted else Needs.of(task_path, request)
        agent_id, cache, action, context = (request.get(name) for name in ("agent_id", "cache", "action", "context"))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return Hint(UNUSED, NOTHING)
    access: Access = "none" if cache == "off" else "read" if cache == "read" or action == "info" else "write"
    continues = context == "append" or action is not None
    return Hint(MemoryUse.of(access, agent_id if isinstance(agent_id, str) else None, continues=continues), needs)


def hint_noted(agent: bytes, needs: bytes) -> Hint:
    """From the ends of `FIELD_AGENT`, in one of the forms that `READ` lets pass, and of `FIELD_NEEDS`."""
    word, _, agent_id = agent.decode(errors="replace").partition(" ")
    access: Access = "read" if word in ("read", "ask") else "write"
    use = MemoryUse(access, agent_id, word in ("append", "ask")) if agent_id else UNUSED
    return Hint(use, _noted(needs))


def _noted(needs: bytes) -> Needs:
    return Needs.noted(needs.decode(errors="replace"))
