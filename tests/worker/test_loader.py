"""The loader: what it tells the engine loop and the store about the jobs around one."""

from queue import Queue

from stoker_shared import build_request
from stoker_shared.errors import AgentNotFound, AgentVersionConflict, WorkerLostTooOften
from stoker_worker.engine.scripted import ScriptedProvider
from stoker_worker.loader import Loader
from stoker_worker.ports import AgentVersion, ClaimedJob, Delivery, Restored


class Store:
    """Has nothing, and remembers how it was asked."""

    def __init__(self):
        self.beside_others = []

    def open_agent(self, agent_id):
        return AgentVersion(agent_id, 0, None)

    def restore(self, prompt_ids, *, agent, model, salt, beside_others):
        self.beside_others.append(beside_others)
        return Restored(None, "none")


def claimed(agent_id, attempt=1, lost_alone=0):
    request = build_request({"agent_id": agent_id, "prompt": "p"})
    delivery = Delivery(agent_id, "2026")
    return ClaimedJob(agent_id, "q", request, delivery, attempt, 0.0, 0.0, 0, None, None, lost_alone)


def test_a_job_says_whether_another_is_right_behind_it_and_the_store_hears_whether_rows_run():
    _, model = ScriptedProvider(max_batch=4, steps_per_s=1000).load()
    store, ready, ended, runs = Store(), Queue(), Queue(), iter([False, True])
    loader = Loader(store, model, to_engine=ready.put, to_finaliser=ended.put, rows_run=lambda: next(runs))
    loader.put(claimed("a"))
    loader.put(claimed("b"))
    loader.start()
    assert [ready.get(timeout=30).has_next for _ in range(2)] == [True, False]
    assert store.beside_others == [False, True]
    loader.finish()
    loader.join(30)
    assert ended.empty()


def test_a_job_is_given_up_for_what_happened_while_it_was_alone_only():
    _, model = ScriptedProvider(max_batch=4, steps_per_s=1000).load()
    ready, ended = Queue(), Queue()
    loader = Loader(Store(), model, to_engine=ready.put, to_finaliser=ended.put, rows_run=lambda: False)
    loader.put(claimed("innocent", attempt=4, lost_alone=2))
    loader.put(claimed("poison", attempt=4, lost_alone=3))
    loader.start()
    assert ready.get(timeout=30).job.job_id == "innocent"
    given_up = ended.get(timeout=30)
    assert (given_up.job.job_id, type(given_up.error)) == ("poison", WorkerLostTooOften)
    loader.finish()
    loader.join(30)


def test_what_an_append_expects_is_asked_only_of_a_delivery_that_has_no_answer_yet():
    _, model = ScriptedProvider(max_batch=4, steps_per_s=1000).load()
    ready, ended, store = Queue(), Queue(), Store()
    saved = Delivery("saved", "2026")
    versions = {"a": AgentVersion("a", 4, None, {saved: {"text": "done"}}), "nobody": AgentVersion("nobody", 0, None)}
    store.open_agent = versions.__getitem__
    loader = Loader(store, model, to_engine=ready.put, to_finaliser=ended.put, rows_run=lambda: False)

    def put(job_id, **fields):
        request = build_request({"prompt": "p", "context": "append", **fields})
        loader.put(ClaimedJob(job_id, "q", request, Delivery(job_id, "2026"), 1, 0.0, 0.0, 0, None, None))

    put("saved", agent_id="a", expect_version=3)
    put("late", agent_id="a", expect_version=3)
    put("none", agent_id="nobody", must_exist=True)
    put("fine", agent_id="a", expect_version=4, must_exist=True)
    loader.start()
    assert ready.get(timeout=30).job.job_id == "fine"
    assert [(x.job.job_id, x.answer, type(x.error)) for x in (ended.get(timeout=30) for _ in range(3))] == [
        ("saved", {"text": "done"}, type(None)),
        ("late", None, AgentVersionConflict),
        ("none", None, AgentNotFound),
    ]
    loader.finish()
    loader.join(30)
