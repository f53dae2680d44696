"""Which agents have work, as another thread sees it while that changes: `--agent-ttl` removes those without."""

import pytest

from stoker_worker.memory.store_parts import Holds

NOBODY = frozenset[str]()
AGENT = frozenset({"agent"})
PINNED = [(NOBODY, NOBODY, False), (AGENT, NOBODY, False), (AGENT, NOBODY, True), (NOBODY, AGENT, True)]

Pinned = tuple[frozenset[str], frozenset[str], bool]


class Watched(Holds):
    """Another thread looks after each step of `pin`."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if "_held" in vars(self):  # the last one that it begins with
            self.seen.append(self.has_work("agent"))


@pytest.mark.parametrize("after", PINNED)
@pytest.mark.parametrize("before", PINNED)
def test_an_agent_with_work_never_looks_idle_while_the_work_of_all_changes(before: Pinned, after: Pinned) -> None:
    holds = Watched()
    for running, waiting, is_all in (before, after):
        holds.pin(running, waiting, is_all=is_all)
    assert holds.seen
    assert all(holds.seen)


def test_an_agent_never_looks_idle_when_it_begins_to_run_during_the_look() -> None:
    class Looked(frozenset[str]):
        def __contains__(self, name: object) -> bool:
            holds.pin(AGENT, NOBODY)
            return False

    holds = Holds()
    holds.pin(Looked(), AGENT)
    assert holds.has_work("agent")
