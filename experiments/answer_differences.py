"""Why two servers of one model gave different greedy answers, proved on a third. Experiments only.

The proof does not rest on either server: mlx-lm's own uncached run must give each answer to the tokens that the server
was given. Where two tokens are within float noise of each other, either is right, and the run goes on from the one
that the server took.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench import Bench
from common import Json

from stoker_worker.memory.store import AgentCacheStore

NOISE = 1e-3
"""Logits closer than this count as equal. A choice, not a measurement: how close they were is in the results."""

EQUAL = "equal"
TOKENS = "the same conversation, in other tokens"
TRIMMED = "an earlier answer without its outer white space"
CONVERSATION = "an earlier answer of the conversation differs"
TIE = "the same tokens, and two logits within float noise"
UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Said:
    """An answer, and what it answers.

    Attributes:
        history: the answers before it in the conversation.
        prompt: the tokens that the server was given.
        n_prompt: how many it has counted.
    """

    history: Sequence[str]
    prompt: Sequence[int]
    n_prompt: int
    text: str


def cause(bench: Bench, ours: Said, theirs: Said, max_tokens: int) -> Json:
    """Why `theirs` is not `ours`, with the evidence."""
    if _is_same(ours.text, theirs.text):
        return {"cause": EQUAL}
    if not all(map(_is_same, ours.history, theirs.history)):
        return {"cause": CONVERSATION}
    margins = [margin(bench, said, max_tokens) for said in (ours, theirs)]
    found: Json = {"cause": UNEXPLAINED, "margins": margins, "texts": [ours.text, theirs.text]}
    if list(ours.prompt) != list(theirs.prompt):
        found |= _first_difference(bench, ours.prompt, theirs.prompt)
    if None not in margins:
        same_tokens, same_text = list(ours.prompt) == list(theirs.prompt), list(ours.history) == list(theirs.history)
        found["cause"] = TIE if same_tokens else TOKENS if same_text else TRIMMED
    return found


def transcript(memory: AgentCacheStore, agent: str) -> Sequence[int]:
    """Every token that the agent's model has seen or made."""
    found = memory.open_agent(agent).transcript
    assert found is not None
    return found.token_ids


def rendered(bench: Bench, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """What a peer makes of messages: the template's text in tokens."""
    return list(bench.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))


def margin(bench: Bench, said: Said, max_tokens: int) -> float | None:
    """How close two logits were where the answer leaves the uncached run: 0 where it does not leave it.

    ``None`` if that run does not give this answer even so, or the server counts another number of tokens.
    """
    if len(said.prompt) != said.n_prompt:
        return None
    ids = bench.uncached(said.prompt, max_tokens)
    if _is_same(_text(bench, ids), said.text):
        return 0.0
    for index, (other, distance) in enumerate(_runners_up(bench, said.prompt, ids)):
        if distance <= NOISE:
            begun = [*ids[:index], other]
            rest = [] if len(begun) == max_tokens else bench.uncached([*said.prompt, *begun], max_tokens - len(begun))
            if _is_same(_text(bench, [*begun, *rest]), said.text):
                return distance
    return None


def _runners_up(bench: Bench, prompt: Sequence[int], ids: Sequence[int]) -> list[tuple[int, float]]:
    """For each of `ids`: the best token beside it, and how far its logit is from its own."""
    import mlx.core as mx

    logits = bench.network(mx.array([[*prompt, *ids]]))[0, len(prompt) - 1 : -1]
    at, own = mx.arange(len(ids)), mx.array(list(ids))
    taken = logits[at, own]
    logits[at, own] = -mx.inf
    others = mx.argmax(logits, axis=-1)
    distances = mx.abs(taken - logits[at, others])
    return list(zip(others.tolist(), distances.tolist(), strict=True))


def _first_difference(bench: Bench, ours: Sequence[int], theirs: Sequence[int]) -> Json:
    """The tokens around the first that differs, as text."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    pieces = [[_text(bench, [token]) for token in ids[first : first + 4]] for ids in (ours, theirs)]
    return {"first_difference": first, "lengths": [len(ours), len(theirs)], "pieces": pieces}


def _text(bench: Bench, ids: Sequence[int]) -> str:
    tokenizer = bench.model.tokenizer
    return tokenizer.decode([token for token in ids if token not in tokenizer.eos_ids])


def _is_same(one: str, other: str) -> bool:
    """Both peers take white space off: mlx-lm a first space, vllm-mlx all that is outside."""
    return one.strip() == other.strip()
