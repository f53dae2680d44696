"""Block addresses: equal for equal model, salt and tokens, and for nothing else."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.cache_spec import BLOCK_TOKENS
from stoker_worker.memory.blocks import chain, chain_root, common_length

ROOT = chain_root("model", None)
token_lists = st.lists(st.integers(0, 3), max_size=700)


def test_addresses_are_made_as_the_format_page_says() -> None:
    # Files outlive releases: if this fails, every cache on every disk is lost.
    root = hashlib.sha256(b"stoker block chain 1\0" + b"\x05\0\0\0model" + b"salt").digest()
    tokens = [*range(255), 70_000]
    block = hashlib.sha256(root + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()
    assert chain(chain_root("model", "salt"), [*tokens, 1]) == [root.hex(), block.hex()]


def test_another_model_or_salt_shares_no_address() -> None:
    roots = {chain_root(model, salt) for model in ("m", "ms", "") for salt in (None, "s", "ms")}
    assert len(roots) == 9


def test_no_salt_is_the_empty_salt() -> None:
    assert chain_root("model", None) == chain_root("model", "")


@given(token_lists, token_lists)
def test_two_chains_agree_exactly_as_far_as_their_tokens_do(left: list[int], right: list[int]) -> None:
    same_blocks = common_length(left, right) // BLOCK_TOKENS
    ours, theirs = chain(ROOT, left), chain(ROOT, right)
    assert len(ours) == len(left) // BLOCK_TOKENS + 1
    assert ours[: same_blocks + 1] == theirs[: same_blocks + 1]
    assert not set(ours[same_blocks + 1 :]) & set(theirs[same_blocks + 1 :])


@given(token_lists, st.integers(0, 2))
def test_a_chain_can_be_continued_from_any_of_its_blocks(tokens: list[int], n_blocks: int) -> None:
    whole = chain(ROOT, tokens)
    n_blocks = min(n_blocks, len(whole) - 1)
    assert chain(whole[n_blocks], tokens[n_blocks * BLOCK_TOKENS :]) == whole[n_blocks:]


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_common_length_is_the_longest_common_prefix(left: str, right: str) -> None:
    length = common_length(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]
