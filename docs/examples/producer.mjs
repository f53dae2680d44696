// A producer for Node on ioredis: submit, result, cancel. Copy the file; it needs nothing else of stoker.
// `redis` is your connection, `new Redis("redis://...")`. docs/producers.md has the same commands for redis-cli.
import { randomUUID } from "node:crypto";
import { inflateSync } from "node:zlib";

const TASK = "stoker_shared.task.generate";
const ENDED = ["finished", "failed", "canceled", "stopped"];
const [SUCCESSFUL, FAILED, RETRIES_EXCEEDED] = ["1", "2", "5"]; // `type` of a result

/** It ended without a result: `state` is failed, canceled, stopped, or missing (it never was, or has expired). */
export class JobEnded extends Error {
  constructor(jobId, state, reason) {
    super(`job ${jobId}: ${state}${reason ? `: ${reason}` : ""}`);
    Object.assign(this, { name: "JobEnded", jobId, state, reason });
  }
}

/** The id that was given names a job with another request. */
export class DuplicateJob extends Error {}

/**
 * Enqueue one job; returns its id. With a `jobId` of your own the call may be made again, after an error or a crash:
 * the same id and request make no second job.
 */
export async function submit(redis, request, { jobId = randomUUID(), queue = "generate", timeoutS = 3600 } = {}) {
  if (!/^[\w-]+$/.test(jobId)) throw new RangeError("a job id has letters, digits, '-' and '_' only");
  const key = `rq:job:${jobId}`;
  const data = JSON.stringify([TASK, null, [], { request }]);
  for (let tries = 5; ; tries--) {
    try {
      return await alone(redis, async (connection) => {
        await connection.watch(key); // of all transactions that make this job, the server takes one
        const there = await connection.hget(key, "data");
        if (there !== null && there !== data) throw new DuplicateJob(`${jobId} names a job with another request`);
        if (there !== null) return jobId;
        const now = new Date().toISOString();
        const job = { status: "queued", origin: queue, created_at: now, enqueued_at: now, data };
        const kept = { timeout: timeoutS, result_ttl: 86400, failure_ttl: 604800, description: "from node" };
        const replies = await connection
          .multi()
          .hset(key, { ...job, ...kept })
          .sadd("rq:queues", `rq:queue:${queue}`)
          .rpush(`rq:queue:${queue}`, jobId)
          .exec();
        if (replies === null) throw new Error("somebody else wrote the job just now");
        return jobId;
      });
    } catch (error) {
      // A reply that was lost leaves it open whether the job is there: look again, never just send again.
      if (error instanceof DuplicateJob || tries === 1) throw error;
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }
}

/** Wait for the job's end; returns the result, or throws JobEnded, or an Error when `timeoutMs` is over. */
export async function result(redis, jobId, { timeoutMs = 600_000 } = {}) {
  const end = Date.now() + timeoutMs;
  return alone(redis, async (connection) => {
    for (let seen = "0-0"; ; ) {
      const state = await connection.hget(`rq:job:${jobId}`, "status");
      if (state === null) throw new JobEnded(jobId, "missing");
      if (ENDED.includes(state)) return outcome(connection, jobId, state);
      const left = end - Date.now();
      if (left <= 0) throw new Error(`job ${jobId}: still ${state} after ${timeoutMs / 1000} s; it goes on`);
      // One second at most: a cancel or an expiry writes nothing to the stream. Retries leave entries that are no end.
      const block = Math.ceil(Math.min(1000, left));
      const streams = await connection.xread("BLOCK", block, "STREAMS", `rq:results:${jobId}`, seen);
      if (streams) seen = streams[0][1].at(-1)[0];
    }
  });
}

/** Cancel a job; false if it had ended, or its agent's turn is being saved. After true, `result` throws JobEnded. */
export async function cancel(redis, jobId) {
  const key = `rq:job:${jobId}`;
  return alone(redis, async (connection) => {
    for (;;) {
      await connection.watch(key); // it must not end between the look and the mark
      const fields = ["status", "origin", "created_at", "stoker_saving"];
      const [state, queue, createdAt, saving] = await connection.hmget(key, ...fields);
      if (state === null) throw new JobEnded(jobId, "missing");
      if (ENDED.includes(state) || saving === (createdAt ?? "-")) return false;
      const replies = await connection
        .multi()
        .hset(key, { status: "canceled" })
        .expire(key, 604800)
        .lrem(`rq:queue:${queue}`, 0, jobId)
        .zadd(`rq:canceled:${queue}`, Math.floor(Date.now() / 1000), jobId)
        .exec();
      if (replies !== null) return true;
    }
  });
}

/** Runs `use` on a connection of its own: WATCH and a blocking read are not for a shared one. It resends nothing. */
async function alone(redis, use) {
  const once = { retryStrategy: null, maxRetriesPerRequest: 0, autoResendUnfulfilledCommands: false };
  const connection = redis.duplicate({ lazyConnect: true, ...once });
  connection.on("error", () => {}); // every command that it fails rejects
  try {
    await connection.connect();
    return await use(connection);
  } finally {
    connection.disconnect();
  }
}

async function outcome(connection, jobId, state) {
  const newestFirst = await connection.xrevrange(`rq:results:${jobId}`, "+", "-", "COUNT", 10);
  const fields = newestFirst.map(([, flat]) => Object.fromEntries(pairs(flat)));
  if (state === "finished") {
    const entry = fields.find(({ type }) => type === SUCCESSFUL);
    if (!entry) throw new JobEnded(jobId, "missing", "its result has expired");
    return JSON.parse(Buffer.from(entry.return_value, "base64").toString());
  }
  const entry = state === "failed" && fields.find(({ type }) => type === FAILED || type === RETRIES_EXCEEDED);
  const text = entry ? inflateSync(Buffer.from(entry.exc_string, "base64")).toString() : "";
  throw new JobEnded(jobId, state, text.trim().split("\n").at(-1));
}

function* pairs(flat) {
  for (let i = 0; i < flat.length; i += 2) yield [flat[i], flat[i + 1]];
}
