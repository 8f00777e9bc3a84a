"""Carries out orders in other processes: workers of this package, or those of a joblib backend such
as loky, Dask, Ray or Spark.

An order and its answer are dicts of JSON values. A process imports the function that carries out an
order by its name, ``module:function``. So no Python objects are pickled.

    python -m vfl.jobs MODULE:FUNCTION

This command is a worker process of this package. It reads an order as a line of JSON from standard
input, and writes the answer as a line to standard output. It ends when its standard input is
closed, so it ends with its parent.

The workers of this package are not loky's: they need no package, get nothing but lines of JSON, and
end at once with the program that started them (decision 45). They are not
``vfl_common.process.workers`` either, which repeats the request of a killed worker: a run that has
exhausted the memory must not be repeated.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import operator
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import PicklingError
from typing import IO, Any, Protocol, Self, SupportsIndex

from vfl.launcher.processes import make_environment
from vfl_common.errors import Code, InputError, InternalError, VflError
from vfl_common.process.program import do_last

# An order and its answer are dicts of JSON values. The answer is empty, or contains an error.
Order = dict[str, Any]
Answer = dict[str, Any]

# Held during an order, because a process with threads, as in Dask, may get several orders at once.
_ORDER_LOCK = threading.Lock()
# The interval at which a process checks whether its parent is alive.
_TICK_S = 0.5
INSTALL = "pip install '.[studies]' in the clone of vfl"
# {backend: (package, module, function)} for backends that another package registers with joblib.
_REGISTERED = {
    "ray": ("ray", "ray.util.joblib", "register_ray"),
    "spark": ("joblibspark", "joblibspark", "register_spark"),
}
# The minimum number of jobs. With one job, joblib would carry out orders in this process.
_MIN_JOBS = 2
_CONFIGURING = threading.Lock()


class WorkerPool(Protocol):
    """Processes that carry out orders."""

    def run(self, order: Order) -> None:
        """Carries out an order in a process, and waits for its end. Several threads may call this
        method. Raises VflError.
        """

    def close(self) -> None:
        """Ends unfinished orders, as far as the backend supports it."""


class _WorkerPoolContext(WorkerPool, AbstractContextManager["_WorkerPoolContext"], Protocol): ...


def open_pool(does: str, jobs: int, threads: int, backend: str | None = None) -> _WorkerPoolContext:
    """Returns a pool of processes, as a context manager.

    Args:
        does: The function that carries out an order, as ``module:function``.
        jobs: The number of orders at the same time.
        threads: The number of threads of torch and its libraries in each worker of this package.
        backend: The name of a joblib backend, such as ``loky`` or ``dask``. None starts workers of
            this package, on this machine.

    Raises InputError if joblib has no such backend, and OSError if a process cannot be started.
    """
    if backend is None:
        return JobWorkers(does, jobs, threads)
    return BackendPool(does, jobs, backend)


@contextlib.contextmanager
def open_waiting_threads(workers: WorkerPool, jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Yields an executor with ``jobs`` threads, which wait for orders. If the block raises an
    exception such as KeyboardInterrupt, unfinished orders are ended.
    """
    threads = ThreadPoolExecutor(jobs)
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        workers.close()
        raise
    finally:
        # Now all orders are finished, or their processes have ended.
        threads.shutdown()


def check_jobs(jobs: Any) -> int:
    """Returns the argument ``jobs`` as an integer. Raises InputError if it is not valid."""
    number = jobs if isinstance(jobs, SupportsIndex) and not isinstance(jobs, bool) else 0
    if operator.index(number) < 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"jobs: must be an integer of at least 1 (got {jobs!r}). Give the number of runs at "
            "a time.",
        )
    return operator.index(number)


# -- workers of this package
# ----------------------------------------------------------------------


class JobWorkers:
    """Worker processes, as a context manager. They are killed at the end of the block.

    Args:
        does: The function that carries out an order, as ``module:function``.
        number: The number of processes.
        threads: The number of threads of torch and its libraries in each process.

    Raises OSError if a process cannot be started.
    """

    def __init__(self, does: str, number: int, threads: int) -> None:
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for _ in range(number):
                self._workers.append(worker := _Worker(does, threads))
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    def run(self, order: Order) -> None:
        """Carries out an order in an idle process, and waits for its answer. Raises VflError."""
        worker = self._idle.get()
        try:
            worker.run(order)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kills all processes. Their unfinished orders fail."""
        # All processes are killed before the first wait, which may be interrupted.
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, does: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vfl.jobs", does],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=make_environment(threads, ()),
            # In its own session, the worker does not get Ctrl-C. The parent ends it instead.
            start_new_session=True,
            text=True,
        )
        # Entries that are not text are skipped, because the interpreter ignores them too.
        self._send([path for path in sys.path if isinstance(path, str)])

    def run(self, order: Order) -> None:
        """Sends an order to the process, and waits for its answer. Raises VflError."""
        self._send(order)
        line = self._output.readline()
        if not line.endswith("\n"):
            status = self._process.wait()
            how = (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with exit code {status}"
            )
            raise process_error(how)
        check(json.loads(line))

    def kill(self) -> None:
        """Kills the process. Its unfinished run is not needed."""
        self._process.kill()

    def close(self) -> None:
        """Waits for the end of the process after ``kill``, and closes its pipes."""
        self._process.wait()
        # Closing raises an error if the process has not read all input.
        with contextlib.suppress(OSError):
            self._input.close()
        # If another thread is reading the output, this waits for it.
        self._output.close()

    def _send(self, message: Any) -> None:
        # If the process has ended, ``run`` notices that the answer is missing.
        with contextlib.suppress(OSError):
            self._input.write(json.dumps(message) + "\n")
            self._input.flush()

    @property
    def _input(self) -> IO[str]:
        assert self._process.stdin is not None  # noqa: S101 - stdin is a pipe
        return self._process.stdin

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout is not None  # noqa: S101 - stdout is a pipe
        return self._process.stdout


# -- processes of a joblib backend
# ----------------------------------------------------------------------


class BackendPool:
    """The processes of a joblib backend, as a context manager. The arguments are as in ``pool``."""

    def __init__(self, does: str, jobs: int, backend: str) -> None:
        try:
            self._joblib = importlib.import_module("joblib")
        except ImportError:
            raise InputError(
                Code.CONFIG_INVALID,
                f"backend: {backend!r} needs joblib. Install it: {INSTALL}.",
            ) from None
        # joblib also accepts backend objects, but a backend object cannot be used by several
        # threads.
        if not isinstance(backend, str):
            raise InputError(
                Code.CONFIG_INVALID,
                f"backend: must be a name (got {backend!r}). Give the name of a backend of "
                "joblib, such as 'loky'.",
            )
        self._does, self._jobs, self._backend = does, max(jobs, _MIN_JOBS), backend
        self._owner, self._closed = f"the backend {backend!r}", False
        self._open = contextlib.ExitStack()
        if backend == "loky":
            # The programs of vfl skip Python's exit functions, but joblib needs them to remove its
            # temporary folders.
            do_last(atexit._run_exitfuncs)
        elif backend == "dask":
            self._connect()
        elif backend in _REGISTERED:
            self._register(*_REGISTERED[backend])
        # This raises an error now if the backend is unknown or not ready.
        with self._configure():
            pass

    def run(self, order: Order) -> None:
        """Carries out an order in a process, and waits for its end. Raises VflError."""
        if self._closed:
            raise process_error("was ended", self._owner)
        with self._configure():
            parallel = self._joblib.Parallel(n_jobs=self._jobs, batch_size=1)
        try:
            (result,) = parallel([self._joblib.delayed(answer)(self._does, order)])
        except PicklingError as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"backend: {self._backend} cannot pickle the order ({error}). Choose another "
                "backend.",
            ) from error
        # A lost process raises a different exception in each backend.
        except Exception as error:
            raise process_error(f"was lost ({type(error).__name__})", self._owner) from error
        check(result)

    def close(self) -> None:
        """Kills the processes of loky. Processes of other backends finish their current orders."""
        self._closed = True
        self._open.close()
        if self._backend == "loky":
            loky = importlib.import_module("joblib.externals.loky")
            with contextlib.suppress(RuntimeError):
                loky.get_reusable_executor(max_workers=self._jobs, reuse=True).shutdown(
                    wait=True, kill_workers=True
                )

    def _connect(self) -> None:
        """Connects to the scheduler in Dask's settings, unless there is a connection already."""
        try:
            dask, distributed = map(importlib.import_module, ("dask", "distributed"))
        except ImportError:
            raise InputError(
                Code.CONFIG_INVALID,
                f"backend: {self._backend!r} needs dask and distributed. Install them: {INSTALL}.",
            ) from None
        with contextlib.suppress(ValueError):
            distributed.get_client()
            return
        if address := dask.config.get("scheduler-address", None):
            try:
                self._open.enter_context(distributed.Client(address))
            except OSError as error:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"backend: no Dask scheduler answers at {address}. Start it first.",
                ) from error

    def _register(self, package: str, module: str, function: str) -> None:
        try:
            getattr(importlib.import_module(module), function)()
        except ImportError as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"backend: {self._backend!r} needs {package} ({error}). Run pip install {package}.",
            ) from None
        if package == "ray":
            ray = importlib.import_module(package)
            # Ray must start here once, instead of in each thread. RAY_ADDRESS can name a cluster.
            if not ray.is_initialized():
                ray.init(log_to_driver=False)
                self._open.callback(ray.shutdown)

    @contextlib.contextmanager
    def _configure(self) -> Iterator[None]:
        try:
            backend = _make_loky(self._joblib) if self._backend == "loky" else self._backend
            with self._joblib.parallel_config(backend=backend):
                yield
        except VflError:
            raise
        except (ValueError, ImportError, TypeError) as error:
            raise InputError(
                Code.CONFIG_INVALID,
                "backend: Dask is not connected. Connect a distributed.Client first, or set "
                "DASK_SCHEDULER_ADDRESS."
                if self._backend == "dask"
                else f"backend: {self._backend!r} is unknown to joblib or not ready. Choose one of "
                "loky, dask, ray, spark, or register the backend with joblib first.",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_loky(joblib: Any) -> Any:
    """Returns a loky backend whose processes end when this process ends, even if they are idle."""

    class EndingBackend(joblib.parallel.LokyBackend):  # type: ignore[misc]
        def configure(self, *args: Any, **options: Any) -> Any:
            # Joblib publishes a new executor before it is complete. Without the lock, a second
            # thread can get it in this state, and fails with an AttributeError.
            with _CONFIGURING:
                return super().configure(
                    *args, initializer=watch, initargs=(os.getpid(),), **options
                )

    return EndingBackend(nesting_level=0)


# -- what both kinds of processes do
# ----------------------------------------------------------------------


class WorkerTraceback(Exception):  # noqa: N818 - it is used only as a cause
    """The traceback of an error in another process. It is the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def answer(does: str, order: Order) -> Answer:
    """Carries out an order in this process. Returns an empty dict, or a dict with the error.

    ``does`` names the function that is called with the order, as ``module:function``.
    """
    try:
        module, _, name = does.partition(":")
        with _ORDER_LOCK:
            getattr(importlib.import_module(module), name)(order)
    except BaseException as error:  # noqa: BLE001 - the parent process raises it
        reported = (
            error
            if isinstance(error, VflError)
            else InternalError(f"{type(error).__name__}: {error}")
        )
        trace = "".join(traceback.format_exception(error))
        return {
            "code": reported.code,
            "text": str(reported),
            "party": reported.party,
            "traceback": trace,
        }
    return {}


def watch(parent: int) -> None:
    """Starts a thread that ends this process when the parent with this process id ends."""
    threading.Thread(target=_end_with_parent, args=[parent], daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    # Without its parent, nobody needs the result of this process.
    os._exit(1)


def check(received: Answer) -> None:
    """Raises VflError if an answer contains an error, with the traceback of the other process."""
    if received:
        cause = WorkerTraceback(received["traceback"])
        raise VflError(Code(received["code"]), received["text"], party=received["party"]) from cause


def process_error(how: str, owner: str = "the study") -> VflError:
    """Returns the error for an order whose process has ended.

    ``how``: A verb phrase such as ``was killed by SIGKILL``. ``owner``: The owner of the process.
    """
    return VflError(
        Code.PARTY_LOST,
        f"a process of {owner} {how}, so its run is not finished. If memory was short, set "
        "fewer jobs.",
    )


# The functions below run in the worker process.


def _serve(does: str) -> None:
    """Carries out orders until standard input is closed.

    The code of an order cannot use the pipes to the parent: its standard input is empty, and its
    standard output goes to standard error.
    """
    order_lines, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=[order_lines, orders], daemon=True).start()
    sys.path[:] = json.loads(orders.get())
    while True:
        answers.write(json.dumps(answer(does, json.loads(orders.get()))) + "\n")
        answers.flush()


def _read_orders(order_lines: IO[str], orders: queue.SimpleQueue[str]) -> None:
    for line in order_lines:
        orders.put(line)
    # The parent has closed the pipe, so it does not need the result.
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
