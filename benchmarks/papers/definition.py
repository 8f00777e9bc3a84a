"""Digests of what a table runs and of what it claims.

A result is current only if its table still runs the same: ``runs_digest``. ``frozen.json`` names the
day on which a table's claims and rules were last changed: ``claims_digest``.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from datetime import date
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.papers import rules, shelf
from benchmarks.papers.describe import SCALES, Scale, Table, resolved, run_at
from benchmarks.papers.plan import base_recipe, methods, study, variants, without_data
from vfl_common.files import write_atomic

FROZEN = Path(__file__).with_name("frozen.json")
# Keywords of a table that change neither what runs nor what is claimed.
_WORDS = frozenset({"title", "figures", "source", "small", "notes", "place", "needs", "digits"})


def runs_digest(name: str, table: Table, scale: Scale, data: Collection[str] | None = None) -> str:
    """Returns a digest of everything that decides the numbers of a table, but for the product.

    ``data``: the data sets that count; None for all.
    """
    if table.runs_of:
        name, table = table.runs_of, shelf.load(table.runs_of)
    if table.compute is not None:
        described: Any = [_dump(module) for module in _modules(import_module(_path(name)))]
        described += [repr(run_at(table, scale).data), [each.name for each in table.lines]]
    else:
        if data is not None:
            table = replace(table, data=tuple(each for each in table.data if each.name in data))
        described = _described(table, scale)
    # Without "default" so that a value that JSON does not know is an error and not an address.
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def claims(name: str) -> list[dict[str, Any]]:
    """Returns a table's claims and their tests as plain data, for each scale and data set."""
    table = shelf.load(name)
    return [
        {"scale": scale, "data": data, "says": claim.says, "ours": claim.ours}
        | {"test": None if test is None else asdict(test)}
        for scale in SCALES
        for claim, data, test in rules.resolve(table, scale)
    ]


def claims_digest(name: str) -> str:
    """Returns a digest of a table's claims and of the rules that judge them."""
    text = json.dumps(claims(name), sort_keys=True) + _dump(rules)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def frozen() -> dict[str, dict[str, str]]:
    """Returns {table: {claims: digest, day: when it was last changed}}."""
    kept: dict[str, dict[str, str]] = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    return kept


def freeze() -> list[str]:
    """Writes the digests of all claims with today's date where they changed; returns those."""
    kept, changed = frozen(), []
    made = {}
    for name in shelf.names():
        digest = claims_digest(name)
        if kept.get(name, {}).get("claims") != digest:
            changed.append(name)
            made[name] = {"claims": digest, "day": date.today().isoformat()}
        else:
            made[name] = kept[name]
    write_atomic(FROZEN, json.dumps(made, indent=1) + "\n")
    return changed


def _path(name: str) -> str:
    return f"benchmarks.papers.{name}"


def _described(table: Table, scale: Scale) -> list[Any]:
    table = run_at(table, scale)
    described: list[Any] = []
    for variant in variants(table):
        planned = methods(table, variant, scale)
        described.append(
            [
                variant.data.name,
                variant.data.prepare,
                resolved(variant.options, scale),
                resolved(variant.data.rows, scale),
                resolved(variant.data.reading, scale),
                base_recipe("x", variant, scale, without_data(variant)),
                study(table, variant, scale, list(resolved(table.seeds, scale)), planned),
                [each.name for each in variant.columns],
            ]
        )
    return described


def _modules(module: ModuleType) -> Iterator[ModuleType]:
    """Yields a module and those of its paper that it imports, directly or not."""
    package = module.__name__.rpartition(".")[0]
    waiting, seen = [module], {module.__name__}
    while waiting:
        current = waiting.pop()
        yield current
        for node in ast.walk(ast.parse(inspect.getsource(current))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module not in seen:
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                for name in names:
                    if name.startswith(f"{package}.") and name not in seen:
                        seen.add(name)
                        waiting += [import_module(name)] if _is_module(name) else []


def _is_module(name: str) -> bool:
    path = Path(__file__).parents[2] / (name.replace(".", "/") + ".py")
    return path.exists()


def _dump(module: ModuleType) -> str:
    """Returns the syntax of a module without its docstrings and the words of its table."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [each for each in node.keywords if each.arg not in _WORDS]
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)
