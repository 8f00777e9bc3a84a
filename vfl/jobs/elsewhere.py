"""Carries out orders through a backend of joblib: loky, Dask, Ray, Spark, or a registered one."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
from collections.abc import Iterator
from pickle import PicklingError
from typing import Any, Self

from vfl.jobs.answers import Order, answer, check, process_error, watch
from vfl_common.errors import Code, InputError, VflError
from vfl_common.process.program import do_last

INSTALL = "pip install '.[studies]' in the clone of vfl"
# Backends that another package registers with joblib: {name: (package, module, function)}.
_OTHERS = {
    "ray": ("ray", "ray.util.joblib", "register_ray"),
    "spark": ("joblibspark", "joblibspark", "register_spark"),
}
# The minimum number of joblib's processes: with one, joblib carries out an order in this process.
_MIN_JOBS = 2


class Elsewhere:
    """The processes of a backend, for a block. The arguments are those of ``pool``."""

    def __init__(self, does: str, jobs: int, backend: str) -> None:
        try:
            self._joblib = importlib.import_module("joblib")
        except ImportError:
            raise InputError(
                Code.CONFIG_INVALID,
                f"backend: {backend!r} needs joblib. Install it: {INSTALL}.",
            ) from None
        # joblib also accepts backend objects, but threads of our programs need a name.
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
            # Our programs skip Python's exit functions. joblib's would then warn of folders that it
            # did not remove.
            do_last(atexit._run_exitfuncs)
        elif backend == "dask":
            self._connect()
        elif backend in _OTHERS:
            self._register(*_OTHERS[backend])
        # An unknown backend, or one that is not ready, fails here.
        with self._configure():
            pass

    def run(self, order: Order) -> None:
        """Has an order carried out and waits for its end. Raises VflError."""
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
        # Each backend raises its own errors.
        except Exception as error:
            raise process_error(f"was lost ({type(error).__name__})", self._owner) from error
        check(result)

    def close(self) -> None:
        """Ends loky's processes immediately. Other backends finish what they have begun."""
        self._closed = True
        self._open.close()
        if self._backend == "loky":
            loky = importlib.import_module("joblib.externals.loky")
            with contextlib.suppress(RuntimeError):
                loky.get_reusable_executor(max_workers=self._jobs, reuse=True).shutdown(
                    wait=True, kill_workers=True
                )

    def _connect(self) -> None:
        """Connects to the scheduler of Dask's settings, unless this program is connected."""
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
                    f"backend: no scheduler of Dask answers at {address}. Start it first.",
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
            # Ray starts once, not in each of our threads; RAY_ADDRESS names a cluster.
            if not ray.is_initialized():
                ray.init(log_to_driver=False)
                self._open.callback(ray.shutdown)

    @contextlib.contextmanager
    def _configure(self) -> Iterator[None]:
        try:
            backend = _loky(self._joblib) if self._backend == "loky" else self._backend
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
                else f"backend: joblib has no backend {self._backend!r} that is ready. Name "
                "loky, dask, ray or spark, or register yours with joblib first.",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loky(joblib: Any) -> Any:
    """Returns joblib's loky, with processes that end when this one does, even without an order."""

    class Watched(joblib.parallel.LokyBackend):  # type: ignore[misc]
        def configure(self, *args: Any, **options: Any) -> Any:
            return super().configure(*args, initializer=watch, initargs=(os.getpid(),), **options)

    return Watched(nesting_level=0)
