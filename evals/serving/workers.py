"""Client processes that carry requests: on this machine, or on several hosts through Ray.

Both give askers, so the executor, the records and the figures are the same whoever carries the requests. A process that ends takes only the
requests with it that it carried: they are asked again by the others. Records are written in one place, by the process that runs the suite.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from evals.serving.asking import Answer, Ask, Asker, Opens, WorkerLost
from validation.core.types import HarnessError

LOCAL = "local"


@contextlib.asynccontextmanager
async def open_askers(replicas: Sequence[Opens], concurrency: int, workers: int = 1, ray: str = "") -> AsyncIterator[list[Asker]]:
    """Askers for each replica, in this process (one worker), in processes of this machine, or through Ray at an address ("local": here)."""
    if ray:
        carriers: list[Any] = ray_workers(replicas, concurrency, workers, ray)
    elif workers > 1:
        carriers = [ProcessWorker(replicas, concurrency, f"worker-{i}") for i in range(workers)]
    else:
        carriers = []
    try:
        askers = [asker for carrier in carriers for asker in carrier.askers] or [replica.open(concurrency) for replica in replicas]
        await asyncio.gather(*(asker.warm() for asker in askers))
        yield askers
    finally:
        for carrier in carriers:
            carrier.stop()


# ---- processes of this machine ----
class ProcessWorker:
    """One process that asks for us. `askers` has one a replica; `pid` is there for whoever watches it."""

    def __init__(self, replicas: Sequence[Opens], concurrency: int, name: str) -> None:
        context = multiprocessing.get_context("spawn")  # threads and event loops do not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, tuple(replicas), concurrency), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self.name = name
        self.askers: list[Asker] = [_WorkerAsker(self, i, f"{replica.name} ({name})") for i, replica in enumerate(replicas)]
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = iter(range(1 << 62))
        self._loop = asyncio.get_running_loop()
        self._lost = ""
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def ask(self, replica: int, ask: Ask | None) -> Answer:
        """None only makes the replica's asker ready."""
        if self._lost:
            raise WorkerLost(self._lost)
        number = next(self._numbers)
        self._waiting[number] = future = self._loop.create_future()
        try:
            self._connection.send((number, replica, ask))
        except OSError as error:
            self._waiting.pop(number, None)
            raise WorkerLost(f"{self.name} (process {self.pid}) has ended") from error
        return await future

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, answer = self._connection.recv()
                self._loop.call_soon_threadsafe(self._settle, number, answer)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._abandon)

    def _settle(self, number: int, answer: Answer | HarnessError) -> None:
        future = self._waiting.pop(number)
        if future.done():
            return
        if isinstance(answer, Answer):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _abandon(self) -> None:
        self._lost = f"{self.name} (process {self.pid}) has ended"
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(WorkerLost(self._lost))

    def stop(self) -> None:
        """Closing the pipe ends the process; one that hangs is killed."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._reader.join(5.0)
        self._connection.close()


class _WorkerAsker:
    """One replica as a worker, a process or an actor, reaches it."""

    def __init__(self, worker: ProcessWorker | RayWorker, replica: int, name: str) -> None:
        self.name = name
        self._worker, self._replica = worker, replica

    async def answer(self, ask: Ask) -> Answer:
        return await self._worker.ask(self._replica, ask)

    async def warm(self) -> None:
        """Wait until the worker has started: it takes longer than many a reply."""
        with contextlib.suppress(WorkerLost):
            await self._worker.ask(self._replica, None)

    async def aclose(self) -> None:
        return None


def _serve(connection: Connection, replicas: Sequence[Opens], concurrency: int) -> None:
    """The process: answers requests until the pipe closes."""
    asyncio.run(_answer_all(connection, replicas, concurrency))


async def _answer_all(connection: Connection, replicas: Sequence[Opens], concurrency: int) -> None:
    loop = asyncio.get_running_loop()
    askers = [replica.open(concurrency) for replica in replicas]
    running: set[asyncio.Task[None]] = set()
    ended = asyncio.Event()

    async def one(number: int, replica: int, ask: Ask | None) -> None:
        try:
            if ask is None:
                await askers[replica].warm()
            answer: Any = Answer() if ask is None else await askers[replica].answer(ask)
        except HarnessError as error:
            answer = error
        try:
            connection.send((number, answer))
        except OSError:
            ended.set()

    def start(message: tuple[int, int, Ask | None]) -> None:
        task = loop.create_task(one(*message))
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while (message := connection.recv()) is not None:
                loop.call_soon_threadsafe(start, message)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()
    for task in running:
        task.cancel()
    for asker in askers:
        await asker.aclose()


# ---- Ray ----
def ray_workers(replicas: Sequence[Opens], concurrency: int, workers: int, address: str) -> list[RayWorker]:
    """Actors spread over the hosts of a Ray cluster. Raises HarnessError when Ray is absent or the cluster does not answer."""
    try:
        import ray
    except ImportError as error:
        raise HarnessError("ray: got no installed ray, needs it on every client host; install 'ray>=2.50', or set workers alone") from error
    try:
        if not ray.is_initialized():
            options = {"include_dashboard": False} if address == LOCAL else {"address": address}
            ray.init(log_to_driver=False, **options)
    except Exception as error:
        raise HarnessError(
            f"ray: got {type(error).__name__}: {error}, needs a cluster at {address!r}; start one with `ray start`"
        ) from error
    return [RayWorker(ray, replicas, concurrency, f"ray-{i}") for i in range(workers)]


class _Carrier:
    """The actor: opens the replicas on its host and answers."""

    def __init__(self, replicas: Sequence[Opens], concurrency: int) -> None:
        self._replicas, self._concurrency = replicas, concurrency
        self._askers: list[Asker] = []

    async def answer(self, replica: int, ask: Ask | None) -> Answer:
        if not self._askers:  # here, because connections belong to the actor's own event loop
            self._askers = [one.open(self._concurrency) for one in self._replicas]
        if ask is None:
            await self._askers[replica].warm()
            return Answer()
        return await self._askers[replica].answer(ask)

    async def pid(self) -> int:
        return os.getpid()


class RayWorker:
    """One actor, on whichever host Ray places it."""

    def __init__(self, ray: Any, replicas: Sequence[Opens], concurrency: int, name: str) -> None:
        self._ray = ray
        actor = ray.remote(_Carrier).options(max_concurrency=concurrency + 8, num_cpus=0, scheduling_strategy="SPREAD", max_restarts=0)
        self.actor = actor.remote(tuple(replicas), concurrency)
        self.name = name
        self.askers: list[Asker] = [_WorkerAsker(self, i, f"{replica.name} ({name})") for i, replica in enumerate(replicas)]

    @property
    def pid(self) -> int:
        return int(self._ray.get(self.actor.pid.remote()))

    async def ask(self, replica: int, ask: Ask | None) -> Answer:
        """None only makes the replica's asker ready."""
        try:
            answer: Answer = await self.actor.answer.remote(replica, ask)
        except self._ray.exceptions.RayActorError as error:
            raise WorkerLost(f"{self.name} has ended ({type(error).__name__})") from error
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, HarnessError) else WorkerLost(f"{self.name} failed ({error})") from error
        return answer

    def stop(self) -> None:
        self._ray.kill(self.actor)
