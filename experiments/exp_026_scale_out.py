"""EXP-026: what do 1 to 1,000 workers make of a million agents, and where does one Redis end? Measured once.

The fleets were simulated by scripts that drove classes inside the queue with a played Redis, and each change there
broke them. What a call costs a real server was multiplied by the calls that those fleets made, so a new measurement
would mix two versions. Only the report is made here.
"""

from pathlib import Path

from command import main
from common import Json
from report import Report, say

SUMMARY = (
    "{last[workers]:,} workers and {last[agents]:,} agents, with {last[deaths_per_min]:g} deaths a minute: "
    "{last[hit_share]:.1%} of the prompt tokens come from a cache (at best {last[best_hit_share]:.1%}), the median "
    "wait is {last[wait_s][p50]:.2f} s, {last[over_10_s]:.1%} of the jobs wait for more than 10 s. A job costs this "
    "machine's Redis {cost[job][server_us]:.0f} µs alone. By computation, one queue on it ends at {ends_at_workers} "
    "workers."
)
NUMBER = (
    "hit share {last[hit_share]:.1%} with {last[workers]:,} workers; one Redis ends at {ends_at_workers} workers of "
    "one queue"
)


def run(folder: Path, *, quick: bool) -> Json:
    raise SystemExit("EXP-026 was measured once; --render writes its report")


def render(content: Json, results: Path) -> Report:
    known = {**content["one_server"], "last": content["fleets"][-1]}
    return Report("scale out", say(known, NUMBER), {"summary": say(known, SUMMARY)})


if __name__ == "__main__":
    main(__doc__ or "", "026", run, render)
