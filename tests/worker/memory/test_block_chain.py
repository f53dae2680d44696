"""Block addresses: equal for equal model, salt and tokens, and for nothing else."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.memory.blocks import BlockChain
from stoker_worker.ports.cache_spec import BLOCK_TOKENS
from stoker_worker.ports.memory import common_length

token_lists = st.lists(st.integers(0, 3), max_size=700).map(tuple)


@given(token_lists, token_lists)
def test_two_chains_agree_exactly_as_far_as_their_tokens_do(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    same_blocks = common_length(left, right) // BLOCK_TOKENS
    ours, theirs = BlockChain("model", None, left).addresses, BlockChain("model", None, right).addresses
    assert len(ours) == len(left) // BLOCK_TOKENS
    assert ours[:same_blocks] == theirs[:same_blocks]
    assert not set(ours[same_blocks:]) & set(theirs[same_blocks:])


def test_a_model_that_is_no_fingerprint_never_becomes_a_path() -> None:
    def path_of(model: str, address: str) -> Path:
        return Path(model, address)

    tokens = tuple(range(600))
    chain = BlockChain("ab12", None, tokens)
    assert chain.paths(path_of) == tuple(Path("ab12", address) for address in chain.addresses)
    assert BlockChain("../ab", None, tokens).paths(path_of) == ()
