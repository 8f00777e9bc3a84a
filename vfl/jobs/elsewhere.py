"""Carries out orders through a backend of joblib: of loky, of Dask, of Ray, of Spark, or of another
that is registered.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
from collections.abc import Iterator
from pickle import PicklingError
from typing import Any, Self

from vfl.jobs.answers import Order, answer, check, lost, watch
from vfl_common.errors import Code, InputError, VflError
from vfl_common.process.program import do_last

INSTALL = "pip install '.[studies]' in the clone of vfl"
# Backends that another package registers with joblib: {name: (package, module, function)}.
_OTHERS = {
    "ray": ("ray", "ray.util.joblib", "register_ray"),
    "spark": ("joblibspark", "joblibspark", "register_spark"),
}
# Of joblib: a single order is carried out here, and not by the backend, if it may have one process.
_LEAST = 2


class Elsewhere:
    """The processes of a backend for a block. The arguments are those of ``pool``."""

    def __init__(self, does: str, jobs: int, backend: str) -> None:
        try:
            self._joblib = importlib.import_module("joblib")
        except ImportError:
            text = f"backend: {backend!r} needs joblib: {INSTALL}"
            raise InputError(Code.CONFIG_INVALID, text) from None
        # joblib takes objects of its own, too, which our programs do not send to threads.
        if not isinstance(backend, str):
            text = f"backend: give the name of a backend of joblib, such as 'loky', not {backend!r}"
            raise InputError(Code.CONFIG_INVALID, text)
        self._does, self._jobs, self._backend = does, max(jobs, _LEAST), backend
        self._whose, self._closed = f"the backend {backend!r}", False
        self._open = contextlib.ExitStack()
        if backend == "loky":
            # Our programs leave out what Python does at its end. joblib then warns of folders that
            # it was to remove.
            do_last(atexit._run_exitfuncs)
        elif backend == "dask":
            self._connect()
        elif backend in _OTHERS:
            self._register(*_OTHERS[backend])
        # Asks whether there is such a backend, and whether it is ready.
        with self._chosen():
            pass

    def run(self, order: Order) -> None:
        """Has an order carried out and waits for its end. Raises VflError."""
        if self._closed:
            raise lost("was ended", self._whose)
        with self._chosen():
            parallel = self._joblib.Parallel(n_jobs=self._jobs, batch_size=1)
        try:
            (answered,) = parallel([self._joblib.delayed(answer)(self._does, order)])
        except PicklingError as error:
            raise InputError(Code.CONFIG_INVALID, f"backend: {self._backend}: {error}") from error
        # A backend has errors of its own.
        except Exception as error:
            raise lost(f"was lost ({type(error).__name__})", self._whose) from error
        check(answered)

    def close(self) -> None:
        """Ends loky's processes, whatever they are doing. Other backends finish what they have
        begun.
        """
        self._closed = True
        self._open.close()
        if self._backend == "loky":
            loky = importlib.import_module("joblib.externals.loky")
            with contextlib.suppress(RuntimeError):
                loky.get_reusable_executor(max_workers=self._jobs, reuse=True).shutdown(
                    wait=True, kill_workers=True
                )

    def _connect(self) -> None:
        """Connects to the scheduler that Dask's own settings name, unless this program has
        connected.
        """
        try:
            dask, distributed = map(importlib.import_module, ("dask", "distributed"))
        except ImportError:
            text = f"backend: {self._backend!r} needs dask and distributed: {INSTALL}"
            raise InputError(Code.CONFIG_INVALID, text) from None
        with contextlib.suppress(ValueError):
            distributed.get_client()
            return
        if address := dask.config.get("scheduler-address", None):
            try:
                self._open.enter_context(distributed.Client(address))
            except OSError as error:
                text = f"backend: no scheduler of Dask answers at {address}; start it first"
                raise InputError(Code.CONFIG_INVALID, text) from error

    def _register(self, package: str, module: str, function: str) -> None:
        try:
            getattr(importlib.import_module(module), function)()
        except ImportError as error:
            text = f"backend: {self._backend!r} needs {package} ({error}); pip install {package}"
            raise InputError(Code.CONFIG_INVALID, text) from None
        if package == "ray":
            ray = importlib.import_module(package)
            # Once, before each of our threads would start one; RAY_ADDRESS names a cluster.
            if not ray.is_initialized():
                ray.init(log_to_driver=False)
                self._open.callback(ray.shutdown)

    @contextlib.contextmanager
    def _chosen(self) -> Iterator[None]:
        try:
            backend = _loky(self._joblib) if self._backend == "loky" else self._backend
            with self._joblib.parallel_config(backend=backend):
                yield
        except VflError:
            raise
        except (ValueError, ImportError, TypeError) as error:
            text = f"backend: joblib has no backend {self._backend!r} that is ready"
            if self._backend == "dask":
                what = "connect a distributed.Client first, or set DASK_SCHEDULER_ADDRESS"
            else:
                what = "name loky, dask, ray or spark, or register yours with joblib first"
            raise InputError(Code.CONFIG_INVALID, f"{text}; {what}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loky(joblib: Any) -> Any:
    """Returns joblib's loky, whose processes are ours, but do not see our end: also of one that has
    had no order yet.
    """

    class Watched(joblib.parallel.LokyBackend):  # type: ignore[misc]
        def configure(self, *args: Any, **options: Any) -> Any:
            return super().configure(*args, initializer=watch, initargs=(os.getpid(),), **options)

    return Watched(nesting_level=0)
