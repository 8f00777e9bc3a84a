"""The functions and classes that a call of the library gets in addition to its recipe."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from vfl_common.config.models import COMBINATIONS, ENCODERS, TOPS
from vfl_common.config.task import LOSSES, is_our_metric
from vfl_common.errors import Code, InputError
from vfl_party.base.plugins import GROUPS, RunPlugins, get_run_plugins, use_plugins

# {group: {name: "module:object"}}
Named = dict[str, dict[str, str]]

# The built-in names of the groups that do not look them up themselves.
_OURS = {
    "combinations": COMBINATIONS,
    "encoders": ENCODERS,
    "losses": LOSSES,
    "sources": ("sklearn", "torchvision"),
    "tops": TOPS,
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@contextlib.contextmanager
def with_plugins(plugins: RunPlugins | None) -> Iterator[None]:
    """Lets the block find what ``plugins`` has; None: nothing is added. Raises InputError."""
    if plugins is None:
        yield
        return
    with use_plugins(_check_plugins(plugins)):
        yield


def _check_plugins(plugins: RunPlugins) -> RunPlugins:
    """Returns a copy, which the caller cannot change meanwhile. Raises InputError if ``plugins`` is
    not ``{group: {name: object}}``.
    """
    if not isinstance(plugins, Mapping):
        raise InputError(
            Code.CONFIG_INVALID,
            f"plugins: must be a dict (got {type(plugins).__name__}). Give {{group: {{name: "
            f"object}}}}.",
        )
    for group, objects in plugins.items():
        if group not in GROUPS:
            near = difflib.get_close_matches(str(group), GROUPS, n=1)
            raise InputError(
                Code.CONFIG_INVALID,
                f"plugins: unknown group {group!r}. Choose "
                f"{repr(near[0]) if near else 'one of ' + ', '.join(GROUPS)}.",
            )
        if not isinstance(objects, Mapping):
            raise InputError(
                Code.CONFIG_INVALID,
                f"plugins: {group}: must be a dict (got {type(objects).__name__}). Give {{name: "
                f"object}}.",
            )
        for name in objects:
            if _is_ours(group, name):
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"plugins: {group}: {name!r} is a built-in name. Choose another name.",
                )
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"plugins: {group}: {name!r} is not a valid name. Use lower-case letters, "
                    "digits and _.",
                )
    return {group: dict(objects) for group, objects in plugins.items()}


def _is_ours(group: str, name: object) -> bool:
    if group == "metrics":
        return isinstance(name, str) and is_our_metric(name)
    return name in _OURS.get(group, ())


# -- other processes
# ----------------------------------------------------------------------


def get_import_paths(instead: str) -> Named:
    """Returns the import paths of the plug-ins of this block, for other processes.

    Raises InputError if only this process has one of them. ``instead``: the argument with which
    that does not matter.
    """
    return {
        group: {name: _place_of(made, group, name, instead) for name, made in named.items()}
        for group, named in get_run_plugins().items()
        if named
    }


def import_plugins(named: Named) -> RunPlugins:
    """Imports what ``named_now`` returned, in another process. Raises InputError if that fails."""
    plugins: dict[str, dict[str, Any]] = {}
    for group, places in named.items():
        for name, place in places.items():
            module, _, attribute = place.partition(":")
            try:
                made = getattr(import_module(module), attribute)
            except Exception as error:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"plugins: {group}: {name}: {place} cannot be imported by other processes "
                    f"({type(error).__name__}: {error}). Correct the module.",
                ) from error
            plugins.setdefault(group, {})[name] = made
    return plugins


def write_entry_points(named: Named, folder: Path) -> tuple[Path, ...]:
    """Writes entry points into ``folder``, as if a package had them, so that our programs find
    what is ``named``.

    Returns the folders from which they must import: none if nothing is named.
    """
    if not named:
        return ()
    info = folder / "given_to_the_run-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: given-to-the-run\nVersion: 0\n")
    lines = [
        f"[vfl.{group}]\n" + "".join(f"{name} = {place}\n" for name, place in of.items())
        for group, of in named.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    modules = {place.partition(":")[0] for of in named.values() for place in of.values()}
    return folder.resolve(), *sorted({*filter(None, map(_home_of, modules))})


def _place_of(made: Any, group: str, name: str, instead: str) -> str:
    """Returns ``module:object`` of something that can be imported. Raises InputError."""
    module, own = getattr(made, "__module__", None), getattr(made, "__qualname__", None)
    if module != "__main__" and own is not None and _is_at(module, own, made):
        return f"{module}:{own}"
    # An object of a module, such as a Method, does not know its name.
    main = sys.modules.get("__main__")
    for module, loaded in list(sys.modules.items()):
        # It also has another name in a child of multiprocessing.
        if loaded is main or module.partition(".")[0] in ("vfl", "vfl_party"):
            continue
        for own, value in list(getattr(loaded, "__dict__", {}).items()):
            if value is made and own.isidentifier():
                return f"{module}:{own}"
    raise InputError(
        Code.CONFIG_INVALID,
        f"plugins: {group}: {name} is defined in this notebook or script, and cannot be found "
        f"by other processes. Put it into a module, or set {instead}.",
    )


def _is_at(module: Any, name: Any, made: Any) -> bool:
    return str(name).isidentifier() and getattr(sys.modules.get(module), name, None) is made


def _home_of(module: str) -> Path | None:
    """Returns the folder from which the first part of a module's name is imported; None if each
    process looks there anyway.
    """
    root = sys.modules[module.partition(".")[0]]
    places = list(getattr(root, "__path__", ())) or [getattr(root, "__file__", None)]
    if not places or places[0] is None:
        return None
    home = Path(places[0]).resolve().parent
    always = {Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib", "stdlib")}
    return None if home in always else home
