"""The contract of `GenerationEnginePort.text` and `progress`, checked for every sequence of any engine."""

from itertools import pairwise

STAGES = ["waiting", "prefill", "decode"]


def read_along(engine, works):
    """Step until every sequence has ended, and read all texts after each step; return completions and texts read."""
    uids = [engine.submit(one) for one in works]
    done, read, stages = {}, {uid: [""] for uid in uids}, {uid: [] for uid in uids}
    while engine.in_flight:
        done |= {completion.uid: completion for completion in engine.step()}
        progress = engine.progress()
        for uid in uids:
            read[uid].append(engine.text(uid))
            if uid in progress:
                stages[uid].append(progress[uid].stage)
                assert progress[uid].tokens_per_s >= 0
                assert (progress[uid].tokens > 0) >= (read[uid][-1] != "")
        assert progress.keys() == set(uids) - done.keys()
        assert all(engine.text(uid) == "" for uid in done)
    engine.close()
    for uid in uids:
        texts = [text for text in read[uid] if text]
        grown = [*texts, done[uid].text]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(grown)), grown
        assert set(stages[uid]) <= set(STAGES)
    return [done[uid] for uid in uids], [read[uid] for uid in uids], [stages[uid] for uid in uids]
