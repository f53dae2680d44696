"""Self-test: sequences in a batch give the tokens that they give alone."""

from collections.abc import Sequence
from typing import Final

from stoker_worker.doctor.check import Finding, fail, ok
from stoker_worker.doctor.sequences import Texts, run, run_together, work_of
from stoker_worker.ports import GenerationEnginePort, LoadedModel

_LENGTHS: Final = (20, 131, 47, 300, 75)
_FIRST: Final = 2
_ANSWER: Final = 24


def batched_equals_single(engine: GenerationEnginePort, model: LoadedModel) -> Finding:
    """Raises `EngineFailed`."""
    texts = Texts(model)
    works = [
        work_of(texts.ids(texts.fitting(length, _ANSWER), begin=number), _ANSWER)
        for number, length in enumerate(_LENGTHS)
    ]
    alone = [run(engine, work).generated_ids for work in works]
    together = [done.generated_ids for done in run_together(engine, works[:_FIRST], works[_FIRST:])]
    return compared(model, together, alone, "batched", "alone")


def compared(
    model: LoadedModel, found: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]], this: str, that: str
) -> Finding:
    """Equal tokens are demanded of float32 only: in half precision the order of a sum changes its last place."""
    n_same = sum(one == other for one, other in zip(found, wanted, strict=True))
    exact = is_exact(model)
    line = f"the same tokens {this} as {that} in {n_same} of {len(wanted)}"
    figures = {"same": n_same, "of": len(wanted), "exact": exact}
    if n_same == len(wanted):
        return ok(line, **figures)
    if exact:
        return fail(line, "answers depend on the batch: send this file with the model's name to the project", **figures)
    return ok(f"{line}; in {model.spec.dtype} some may differ", **figures)


def is_exact(model: LoadedModel) -> bool:
    return model.spec.dtype == "float32" and not any(layer.is_packed for layer in model.spec.layers)
