"""Finds, for every architecture, the widest mode in which all histories are right, and the mode the proof takes.

`python -m tests.zoo.survey NAME ...` prints a JSON line for each. Child processes survey the architectures, so that
an architecture that kills its process becomes a line of the result and does not end the survey.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from tests.zoo.histories import faults
from tests.zoo.specimen import Specimen

from stoker_worker.ports.model import WIDEST_FIRST, Batching, ServingMode

ROOT: Final = Path(__file__).parents[2]
PADDED: Final = (Batching.ROWS, Batching.BATCHED)
"""Modes in which a mask hides padding from unequal sequences."""


@dataclass
class Surveyed:
    """
    Attributes:
        layers: the kinds of its layers' caches.
        mode: the widest mode that is right.
        wrong: for each wider mode that was tried, the histories with an answer unlike that of the sequence alone.
        proved: the mode that the proof at load takes.
        why: the proof's reasons against wider modes.
        sees_padding: whether a history is wrong when masks let padding through: otherwise they prove nothing.
        died: the way the process ended, if it ended early.
    """

    name: str
    layers: list[str] = field(default_factory=list)
    mode: str = ""
    wrong: dict[str, list[str]] = field(default_factory=dict)
    proved: str = ""
    why: list[str] = field(default_factory=list)
    sees_padding: bool = True
    died: str = ""


def survey(name: str) -> Surveyed:
    """Try one architecture in this process."""
    from stoker_worker.engine.proof import prove

    specimen = Specimen(name)
    found = Surveyed(name, layers=sorted({str(layer.kind) for layer in specimen.spec.layers}))
    for mode in _modes(specimen):
        wrong = [str(fault) for fault in faults(specimen, mode)]
        if not wrong:
            found.mode = str(mode)
            found.sees_padding = mode.batching not in PADDED or _sees_padding(specimen, mode)
            break
        found.wrong[str(mode)] = wrong
    verdict = prove(specimen.model, specimen.loaded, max_batch=16, most_s=1e6)
    found.proved, found.why = str(verdict.mode), list(verdict.why)
    return found


def survey_all(names: Sequence[str], *, processes: int = 2) -> dict[str, Surveyed]:
    """Survey `names` in child processes."""
    shares = [list(names[number::processes]) for number in range(processes)]
    with ThreadPoolExecutor(processes) as threads:
        return dict(chain.from_iterable(threads.map(lambda share: [*_in_children(share)], shares)))


def _modes(specimen: Specimen) -> Iterator[ServingMode]:
    from stoker_worker.models.cache_probe import can_be_batched

    one_by_one = not can_be_batched(specimen.model)
    for mode in WIDEST_FIRST:
        if one_by_one and mode.batching in (Batching.ROWS, Batching.BATCHED, Batching.SINGLE_PREFILL):
            continue  # the engine runs such a model one sequence at a time anyway
        if specimen.spec.can_be_stored or not mode.memory:
            yield mode


def _sees_padding(specimen: Specimen, mode: ServingMode) -> bool:
    with _masks_that_let_padding_through():
        return any(True for _ in faults(specimen, mode))


@contextmanager
def _masks_that_let_padding_through() -> Iterator[None]:
    from mlx_lm.models import cache

    from stoker_worker.engine.rows.groups import RowGroup

    begin_step = RowGroup.begin_step

    def begin_unmasked(self: RowGroup, n_tokens: int = 1) -> None:
        begin_step(self, n_tokens)
        self.mask = None

    causal, of_arrays = cache.create_causal_mask, cache.ArraysCache.make_mask

    def unpadded(*args: Any, left_padding: Any = None, **kwargs: Any) -> Any:
        return causal(*args, **kwargs)

    cache.create_causal_mask, cache.ArraysCache.make_mask = unpadded, lambda self, n_tokens: None
    RowGroup.begin_step = begin_unmasked  # type: ignore[method-assign]
    try:
        yield
    finally:
        cache.create_causal_mask, cache.ArraysCache.make_mask = causal, of_arrays
        RowGroup.begin_step = begin_step  # type: ignore[method-assign]


def _in_children(names: list[str]) -> Iterator[tuple[str, Surveyed]]:
    """Use one child for all names, and a new child for the rest if it dies."""
    while names:
        command = [sys.executable, "-m", "tests.zoo.survey", *names]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            for line in child.stdout:
                surveyed = Surveyed(**json.loads(line))
                names = names[1:]
                yield surveyed.name, surveyed
            said = child.stderr.read().strip().splitlines()
        if names:
            died = f"exit status {child.returncode}" + (f": {said[-1]}" if said else "")
            yield names[0], Surveyed(names[0], died=died)
            names = names[1:]


def main(names: Sequence[str]) -> None:
    from stoker_worker.models.blas import preload_blas

    preload_blas()
    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # float32 is exact enough there to tell rounding from a fault, on any machine
    logging.disable(logging.CRITICAL)
    for name in names:
        print(json.dumps(asdict(survey(name))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
