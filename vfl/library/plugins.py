"""Plug-ins that the user passes to a call of the library: functions and classes."""

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

# Import paths of plug-ins: {group: {name: "module:object"}}.
ImportPaths = dict[str, dict[str, str]]

# {group: its built-in names}, for the groups that do not check these names themselves.
_BUILT_IN_NAMES = {
    "combinations": COMBINATIONS,
    "encoders": ENCODERS,
    "losses": LOSSES,
    "sources": ("sklearn", "torchvision"),
    "tops": TOPS,
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@contextlib.contextmanager
def with_plugins(plugins: RunPlugins | None) -> Iterator[None]:
    """Makes ``plugins`` available inside the ``with`` block; None: no plug-ins. Raises
    InputError.
    """
    if plugins is None:
        yield
        return
    with use_plugins(_check_plugins(plugins)):
        yield


def _check_plugins(plugins: RunPlugins) -> RunPlugins:
    """Returns a copy, so that later changes by the caller have no effect. Raises InputError if
    ``plugins`` is not ``{group: {name: object}}``.
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
            if _is_built_in(group, name):
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


def _is_built_in(group: str, name: object) -> bool:
    if group == "metrics":
        return isinstance(name, str) and is_our_metric(name)
    return name in _BUILT_IN_NAMES.get(group, ())


# -- other processes
# ----------------------------------------------------------------------


def get_import_paths(instead: str) -> ImportPaths:
    """Returns the import paths of the current plug-ins, for other processes.

    ``instead``: an argument without which plug-ins must be importable. Raises InputError if a
    plug-in is defined in a notebook or script, so that other processes cannot import it.
    """
    return {
        group: {
            name: _find_import_path(plugin, group, name, instead)
            for name, plugin in plugins.items()
        }
        for group, plugins in get_run_plugins().items()
        if plugins
    }


def import_plugins(import_paths: ImportPaths) -> RunPlugins:
    """Imports plug-ins by the paths that ``get_import_paths`` returned in another process. Raises
    InputError if an import fails.
    """
    plugins: dict[str, dict[str, Any]] = {}
    for group, paths in import_paths.items():
        for name, path in paths.items():
            module, _, attribute = path.partition(":")
            try:
                plugin = getattr(import_module(module), attribute)
            except Exception as error:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"plugins: {group}: {name}: {path} cannot be imported by other processes "
                    f"({type(error).__name__}: {error}). Correct the module.",
                ) from error
            plugins.setdefault(group, {})[name] = plugin
    return plugins


def write_entry_points(import_paths: ImportPaths, folder: Path) -> tuple[Path, ...]:
    """Writes the metadata of a package with the plug-ins' entry points into ``folder``, so that
    other programs find the plug-ins.

    Returns the folders to add to the programs' module path; none without plug-ins.
    """
    if not import_paths:
        return ()
    info = folder / "given_to_the_run-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: given-to-the-run\nVersion: 0\n")
    lines = [
        f"[vfl.{group}]\n" + "".join(f"{name} = {path}\n" for name, path in paths.items())
        for group, paths in import_paths.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    modules = {path.partition(":")[0] for paths in import_paths.values() for path in paths.values()}
    return folder.resolve(), *sorted({*filter(None, map(_find_module_folder, modules))})


def _find_import_path(plugin: Any, group: str, name: str, instead: str) -> str:
    """Returns the import path ``module:object`` of a plug-in. Raises InputError if it has none."""
    module, attribute = getattr(plugin, "__module__", None), getattr(plugin, "__qualname__", None)
    if module != "__main__" and attribute is not None and _is_importable(module, attribute, plugin):
        return f"{module}:{attribute}"
    # An instance, such as a Method, does not store the name of its variable.
    main = sys.modules.get("__main__")
    for module, loaded in list(sys.modules.items()):
        # In a child of multiprocessing, the main module also has another name.
        if loaded is main or module.partition(".")[0] in ("vfl", "vfl_party"):
            continue
        for attribute, value in list(getattr(loaded, "__dict__", {}).items()):
            if value is plugin and attribute.isidentifier():
                return f"{module}:{attribute}"
    raise InputError(
        Code.CONFIG_INVALID,
        f"plugins: {group}: {name} is defined in this notebook or script, and cannot be found "
        f"by other processes. Put it into a module, or set {instead}.",
    )


def _is_importable(module: Any, name: Any, plugin: Any) -> bool:
    return str(name).isidentifier() and getattr(sys.modules.get(module), name, None) is plugin


def _find_module_folder(module: str) -> Path | None:
    """Returns the folder from which a module's top-level package is imported; None if it is on the
    module path of every process.
    """
    root = sys.modules[module.partition(".")[0]]
    places = list(getattr(root, "__path__", ())) or [getattr(root, "__file__", None)]
    if not places or places[0] is None:
        return None
    folder = Path(places[0]).resolve().parent
    default_folders = {
        Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib", "stdlib")
    }
    return None if folder in default_folders else folder
