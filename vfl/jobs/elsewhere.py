"""Carries out orders in the processes of a joblib backend, such as loky, Dask, Ray or Spark."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from pickle import PicklingError
from typing import Any, Self

from vfl.jobs.answers import Order, answer, check, process_error, watch
from vfl_common.errors import Code, InputError, VflError
from vfl_common.process.program import do_last

INSTALL = "pip install '.[studies]' in the clone of vfl"
# {backend: (package, module, function)} for backends that another package registers with joblib.
_REGISTERED = {
    "ray": ("ray", "ray.util.joblib", "register_ray"),
    "spark": ("joblibspark", "joblibspark", "register_spark"),
}
# The minimum number of jobs. With one job, joblib would carry out orders in this process.
_MIN_JOBS = 2
_CONFIGURING = threading.Lock()


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
