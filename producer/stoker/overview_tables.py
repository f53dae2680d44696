"""The figures of an overview as ready texts: `stoker status` and the dashboard's page show the same. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Final

from stoker.overview import JobInFlight, Overview, QueueOutlook, WorkerOutlook
from stoker.presence import DataLoss
from stoker.tables import Table, duration

DEAD: Final = "DEAD"
"""The state of a worker without a heartbeat."""
JOBS_HIDDEN: Final = "this user may not read the jobs in flight (ZRANGE of rq:wip:*)"


def queue_table(queues: Sequence[QueueOutlook]) -> Table:
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
    heading = [
        "worker",
        "state",
        "host",
        "lease",
        "model",
        "tokens/s",
        "jobs/min",
        "batch",
        "hits",
        "done",
        "failed",
        "moved in",
    ]
    return Table(heading, [_worker_row(worker) for worker in workers], range(5, 12))


def shared_store_table(workers: Sequence[WorkerOutlook]) -> Table:
    """A line for each worker, if one of them has a shared store: then all of a queue should."""
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
    """Why the server may refuse to write, and what follows; that it lost data; that the workers are suspended. A line
    for each; empty if nothing is known against it."""
    refuses = f"{now.trouble}. A worker shown as {DEAD} may be alive." if now.trouble else ""
    figures = {worker.name: worker.live.now for worker in now.workers if worker.live and worker.live.now}
    is_suspended = any(of_worker.suspended for of_worker in figures.values())
    suspended = "Suspended by `rq suspend`: no job is claimed until `rq resume`." if is_suspended else ""
    lost = _data_loss_text({name: of_worker.data_loss for name, of_worker in figures.items() if of_worker.data_loss})
    return "\n".join(filter(None, (refuses, lost, suspended)))


def _data_loss_text(losses: Mapping[str, DataLoss]) -> str:
    """What the workers, by name, have noticed."""
    if not losses:
        return ""
    ago = duration(min(loss.ago_s for loss in losses.values()))
    times = {name: "once" if loss.times == 1 else f"{loss.times} times" for name, loss in losses.items()}
    noticed = [f"{name}: {times[name]}, {loss.jobs} jobs in flight" for name, loss in losses.items()]
    return f"Redis lost data {ago} ago: jobs and results may be gone, conversations are not. {'; '.join(noticed)}."


def leases_text(worker: WorkerOutlook) -> str:
    """The queues that it holds, each with its fencing number; ``-`` for none."""
    return ", ".join(f"{queue} #{fence}" for queue, fence in worker.leases.items()) or "-"


def rate_text(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:g}"


def _worker_row(worker: WorkerOutlook) -> list[str]:
    live, lease = worker.live, leases_text(worker)
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
