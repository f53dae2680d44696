"""A draft is what came after an earlier occurrence of a row's newest tokens, once they have repeated long enough."""

import random

from stoker_worker.engine.rows.row import NgramLookup

WORDS = list(range(10, 30))


def lookup_of(*tokens):
    lookup = NgramLookup()
    lookup.follow(tokens)
    return lookup


def test_a_text_that_repeats_itself_is_drafted_from_its_earlier_copy():
    lookup = lookup_of(*WORDS, 1, *WORDS[:8])
    assert lookup.is_repeating
    assert lookup.draft(4) == WORDS[8:12]


def test_a_repetition_that_reaches_its_own_end_goes_round():
    lookup = lookup_of(*([5, 6, 7] * 4))
    assert lookup.is_repeating
    assert lookup.draft(7) == [5, 6, 7, 5, 6, 7, 5]


def test_the_newest_of_several_earlier_copies_is_followed():
    lookup = lookup_of(*WORDS, 1, *WORDS[:10], 2, 3, *WORDS[:8])
    assert lookup.draft(4) == [WORDS[8], WORDS[9], 2, 3]


def test_text_without_repetition_and_a_short_repetition_get_no_draft():
    rng = random.Random(1)
    lookup = lookup_of()
    for token in rng.sample(range(10_000), 2000):
        lookup.add(token)
        assert not lookup.is_repeating
    assert not lookup_of(*WORDS, 1, *WORDS[:3]).is_repeating


def test_a_row_whose_drafts_are_wrong_must_repeat_itself_for_longer_and_a_right_one_makes_up_for_it():
    lookup = lookup_of(*WORDS, 1, *WORDS[:8])
    for _ in range(10):
        lookup.note(4, 0)
    assert not lookup.is_repeating
    lookup.follow(list(range(100, 200)) * 2 + WORDS)
    lookup.note(4, 4)
    again = WORDS[:8]
    for token in (1, *again):
        lookup.add(token)
    assert lookup.is_repeating


def test_tokens_that_it_has_seen_are_not_taken_in_twice():
    tokens = [*WORDS, 1, *WORDS[:8]]
    lookup = lookup_of(*tokens)
    lookup.add(WORDS[8])  # its next token, before it is in the row's cache
    lookup.follow(tokens)
    lookup.follow([*tokens, WORDS[8], WORDS[9]])
    assert lookup.draft(99) == WORDS[10:]  # the ten tokens that are repeated, and no more
