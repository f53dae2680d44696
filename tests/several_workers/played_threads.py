"""Threads of which one goes on at a time, and only when it is told to, on a clock that stands still meanwhile.

After `Stage.open`, what threads are made of is played: locks, and so conditions, events, semaphores, queues and
futures; `threading.Thread`; the clocks and `sleep` of `time`. A played thread stops at each gate, and
where it waits for another one. Threads that are not played are not touched.
"""

import _thread
import queue
import sys
import threading
import time
from contextlib import contextmanager

PLAYED = ("stoker_", "queue", "threading", "time")  # modules whose clocks are the stage's
GRID_S = 1.0  # whoever waits for a while goes on at such a time: a loop that looks often costs no steps


class Crashed(BaseException):
    """The process of this thread is dead. Each further operation of it raises this."""


class PlayedThread:
    """
    Attributes:
        operation: what it will do next.
        fault: what happens to it: given by whoever tells it to go on.
        since: when it came to that operation.
        label: what its next requests are part of.
    """

    label = "redis"

    def __init__(self, stage, process, run, name):
        self.stage, self.process, self.name = stage, process, name
        self.operation, self.fault, self.since = "start", None, stage.now
        self.is_over, self._ready, self._until = False, None, None
        self._turn = stage.real_lock()
        self._turn.acquire()
        self._run = run
        process.threads.append(self)
        stage.real_start(self._begin, ())

    def __repr__(self):
        return f"<{self.name}: {self.operation}>"

    @property
    def may_go(self):
        return self._ready is None or self.process.is_dead or self._ready() or self.stage.now >= self.wakes_at

    @property
    def wakes_at(self):
        return float("inf") if self._until is None else self._until

    def go(self, fault=None):
        """To its next gate, or its end."""
        self.fault, self.stage.running = fault, self
        self._turn.release()
        if not self.stage.turn.acquire(timeout=60):
            raise RuntimeError(f"{self} waits for something that is not played")
        self.stage.running = None

    def gate(self, operation):
        """Wait for one's turn; returns the fault."""
        self.operation, self.since = operation, self.stage.now
        if not self.process.is_dead:
            self.stage.turn.release()
            self._turn.acquire()
        if self.process.is_dead:
            raise Crashed
        return self.fault

    def wait(self, ready, timeout_s=None):
        """Until it is so, or the time is over."""
        self._ready = ready
        if timeout_s is not None:
            self._until = -(-(self.stage.now + max(timeout_s, 1e-6)) // GRID_S) * GRID_S
        try:
            self.gate("wait")
        finally:
            self._ready = self._until = None

    def _begin(self):
        self.stage.local.thread = self
        self._turn.acquire()
        try:
            if not self.process.is_dead:
                self._run()
        except BaseException as error:  # of a dead process; any other one is the member's own end
            if not self.process.is_dead:
                self.process.ended_with(error)
        self.is_over = True
        self.process.threads.remove(self)
        self.stage.turn.release()


class PlayedLock:
    """A lock, also a reentrant one."""

    def __init__(self, stage, *, reentrant):
        self._stage, self._reentrant, self._owner, self._depth = stage, reentrant, None, 0

    def acquire(self, blocking=True, timeout=-1):
        me = self._stage.running
        if me is not None and me.process.is_dead:
            return True
        if self._reentrant and self._depth and self._owner is me:
            self._depth += 1
            return True
        if self._depth and not blocking:
            return False
        if self._depth:
            if me is None:
                raise RuntimeError(f"the play would wait for {self._owner}")
            end = None if timeout < 0 else self._stage.now + timeout
            while self._depth and (end is None or self._stage.now < end):
                me.wait(lambda: not self._depth, None if end is None else end - self._stage.now)
            if self._depth:
                return False
        self._owner, self._depth = me, 1
        return True

    def release(self):
        self._depth = max(0, self._depth - 1)

    def locked(self):
        return bool(self._depth)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()

    # For `threading.Condition`.

    def _is_owned(self):
        return bool(self._depth) and (not self._reentrant or self._owner is self._stage.running)

    def _release_save(self):
        depth, self._depth = self._depth, 0
        return depth

    def _acquire_restore(self, depth):
        self.acquire()
        self._depth = depth


class Stage:
    """The clock, and whose turn it is.

    Attributes:
        now: in seconds.
    """

    def __init__(self, now=0.0):
        self.now, self.running, self.local = now, None, threading.local()
        self.epoch_s = time.time()
        self.real_lock, self.real_start = _thread.allocate_lock, _thread.start_new_thread
        self.turn = self.real_lock()
        self.turn.acquire()

    def current(self):
        """The played thread that runs; ``None`` for any other."""
        return getattr(self.local, "thread", None)

    @contextmanager
    def aside(self):
        """What the played thread does inside is not part of the play."""
        thread, self.local.thread = self.current(), None
        try:
            yield
        finally:
            self.local.thread = thread

    def open(self, patch):
        """`patch`: a `pytest.MonkeyPatch`, undone by the caller."""
        stage = self
        patch.setattr(threading, "Lock", lambda: PlayedLock(stage, reentrant=False))
        patch.setattr(threading, "_allocate_lock", threading.Lock)
        patch.setattr(threading, "RLock", lambda: PlayedLock(stage, reentrant=True))
        self._play_thread_class(patch)
        real_sleep = time.sleep
        played = {
            queue.SimpleQueue: queue._PySimpleQueue,
            time.time: lambda: stage.epoch_s + stage.now,
            time.monotonic: lambda: stage.now,
            time.perf_counter: lambda: stage.now,
            time.sleep: lambda s: me.wait(lambda: False, s) if (me := stage.current()) else real_sleep(s),
        }
        for module in [m for name, m in list(sys.modules.items()) if name.startswith(PLAYED)]:
            for name, value in list(vars(module).items()):
                if callable(value) and value in played:
                    patch.setattr(module, name, played[value])
                for function in [value, *(vars(value).values() if isinstance(value, type) else ())]:
                    for argument, default in list((getattr(function, "__kwdefaults__", None) or {}).items()):
                        if any(default is one for one in played):
                            patch.setitem(function.__kwdefaults__, argument, played[default])

    def _play_thread_class(self, patch):
        stage, real = self, threading.Thread
        real_methods = real.start, real.join, real.is_alive

        def start(thread):
            if (me := stage.current()) is None:
                return real_methods[0](thread)
            thread._ident, thread.played = id(thread), PlayedThread(stage, me.process, thread.run, thread.name)
            thread._started.set()
            thread._is_stopped = True  # for whoever joins it after the play

        def join(thread, timeout=None):
            if not hasattr(thread, "played"):
                return real_methods[1](thread, timeout)
            if not thread.played.is_over and (me := stage.current()) is not None:
                me.wait(lambda: thread.played.is_over, timeout)

        def is_alive(thread):
            return not thread.played.is_over if hasattr(thread, "played") else real_methods[2](thread)

        for name, method in (("start", start), ("join", join), ("is_alive", is_alive)):
            patch.setattr(real, name, method)
