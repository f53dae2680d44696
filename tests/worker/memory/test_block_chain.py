"""Block addresses: equal for equal model, salt and tokens, and for nothing else."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.memory.blocks import BlockChain, common_length
from stoker_worker.ports.cache_spec import BLOCK_TOKENS

token_lists = st.lists(st.integers(0, 3), max_size=700).map(tuple)


def test_no_salt_is_the_empty_salt() -> None:
    assert BlockChain("model", None, ()).root == BlockChain("model", "", ()).root


@given(token_lists, token_lists)
def test_two_chains_agree_exactly_as_far_as_their_tokens_do(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    same_blocks = common_length(left, right) // BLOCK_TOKENS
    ours, theirs = BlockChain("model", None, left).addresses, BlockChain("model", None, right).addresses
    assert len(ours) == len(left) // BLOCK_TOKENS
    assert ours[:same_blocks] == theirs[:same_blocks]
    assert not set(ours[same_blocks:]) & set(theirs[same_blocks:])


@given(token_lists, st.integers(0, 700))
def test_the_start_of_a_chain_is_the_chain_of_the_first_tokens(tokens: tuple[int, ...], n_tokens: int) -> None:
    chain, alone = BlockChain("model", "s", tokens).up_to(n_tokens), BlockChain("model", "s", tokens[:n_tokens])
    assert chain == alone
    assert (chain.addresses, chain.last, chain.rest) == (alone.addresses, alone.last, alone.rest)
    assert chain.last == chain.parent(chain.n_blocks)
    assert (
        tuple(token for index in range(chain.n_blocks) for token in chain.block(index)) + chain.rest == chain.token_ids
    )


def test_a_model_that_is_no_fingerprint_never_becomes_a_path() -> None:
    def path_of(model: str, address: str) -> Path:
        return Path(model, address)

    tokens = tuple(range(600))
    chain = BlockChain("ab12", None, tokens)
    assert chain.paths(path_of) == tuple(Path("ab12", address) for address in chain.addresses)
    assert BlockChain("../ab", None, tokens).paths(path_of) == ()
