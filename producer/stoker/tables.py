"""Figures as tables of text: `stoker status` and the dashboard's pages show the same. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stoker.overview import JobInFlight, Overview, QueueStatus, WorkerOutlook
from stoker.presence import DataLossFigures
from stoker_shared.text import printable


@dataclass(frozen=True)
class Table:
    """`numbers`: the columns that are aligned on the right."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: range

    def text(self) -> str:
        """Lines with columns two spaces apart, the heading in capitals. Control characters are escaped."""
        rows = [[name.upper() for name in self.heading], *([printable(cell) for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [
                cell.rjust(width) if index in self.numbers else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """A short text: ``42 s``, ``3 min``, ``5 h`` or ``12 d``; ``-`` for ``None``."""
    if seconds is None:
        return "-"
    for unit, size, until in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < until:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


DEAD: Final = "DEAD"
"""The state of a worker without a heartbeat."""


def queue_table(queues: Sequence[QueueStatus]) -> Table:
    rows = [
        [
            queue.name,
            str(queue.waiting),
            str(queue.running),
            duration(queue.oldest_wait_s),
            duration(queue.left_s),
            ", ".join(queue.workers) or "none",
        ]
        for queue in queues
    ]
    return Table(["queue", "waiting", "running", "oldest", "left", "workers"], rows, range(1, 5))


def worker_table(workers: Sequence[WorkerOutlook]) -> Table:
    heading = ["worker", "state", "host", "lease", "model", "tokens/s", "jobs/min", "batch", "hits", "done", "failed"]
    return Table([*heading, "moved in"], [_worker_row(worker) for worker in workers], range(5, 12))


def shared_store_table(workers: Sequence[WorkerOutlook]) -> Table:
    """A line for each worker if any of them has a shared store, because then all workers of a queue should have it."""
    rows = []
    known = {worker.name: worker.live.now.shared_store for worker in workers if worker.live and worker.live.now}
    for name, shared in known.items() if any(known.values()) else ():
        state = "none" if shared is None else f"away for {duration(shared.away_s)}" if shared.away_s else "answers"
        rows.append([name, state])
    return Table(["worker", "shared store"], rows, range(0))


def job_table(jobs: Sequence[JobInFlight]) -> Table:
    rows = []
    for job in jobs:
        progress = job.progress
        shown = [progress.stage, str(progress.tokens), f"{progress.tokens_per_s:g}"] if progress else ["-"] * 3
        rows.append([job.job_id, job.queue, job.worker or "-", duration(job.running_s), *shown])
    return Table(["job", "queue", "worker", "for", "stage", "tokens", "tokens/s"], rows, range(5, 7))


def trouble_text(now: Overview) -> str:
    """A line for each trouble, empty without any: why the server may refuse to write, and the effect; lost data;
    suspended workers."""
    refuses = f"{now.trouble}. A worker shown as {DEAD} may be alive." if now.trouble else ""
    figures = {worker.name: worker.live.now for worker in now.workers if worker.live and worker.live.now}
    is_suspended = any(of_worker.suspended for of_worker in figures.values())
    suspended = "Suspended by `rq suspend`: no job is claimed until `rq resume`." if is_suspended else ""
    lost = _data_loss_text({name: of_worker.data_loss for name, of_worker in figures.items() if of_worker.data_loss})
    return "\n".join(filter(None, (refuses, lost, suspended)))


def _data_loss_text(losses: Mapping[str, DataLossFigures]) -> str:
    """The losses by worker, as one sentence; empty without any."""
    if not losses:
        return ""
    ago = duration(min(loss.ago_s for loss in losses.values()))
    times = {name: "once" if loss.times == 1 else f"{loss.times} times" for name, loss in losses.items()}
    noticed = [f"{name}: {times[name]}, {loss.jobs} jobs in flight" for name, loss in losses.items()]
    return f"Redis lost data {ago} ago: jobs and results may be gone, conversations are not. {'; '.join(noticed)}."


def rate_text(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:g}"


def _worker_row(worker: WorkerOutlook) -> list[str]:
    live, lease = worker.live, ", ".join(f"{queue} #{fence}" for queue, fence in worker.leases.items()) or "-"
    if live is None:
        return [worker.name, DEAD, "-", lease, *["-"] * 8]
    state = "leaving" if live.leaving else "serving" if live.model else "loading"
    row = [worker.name, state, live.host, lease, live.model or "-"]
    if (figures := live.now) is None:
        return [*row, *["-"] * 7]
    hits = "-" if figures.hit_share is None else f"{figures.hit_share:.0%}"
    batch = f"{figures.in_batch}/{live.max_batch or '-'}"
    rates = [rate_text(figures.tokens_per_s), rate_text(figures.jobs_per_min)]
    return [*row, *rates, batch, hits, str(figures.done), str(figures.failed), str(figures.moved_in)]
