"""The names of ``vfl.api``: each with the first sentence of its docstring, and its module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.metadata import entry_points

from vfl import api

HEADINGS = ("name", "what", "module")

# What is no class and no function has no docstring of its own; the first sentence of others is about their members.
_WORDS = {
    "Code": "The codes of errors.",
    "COLUMNS": "The division into ranges of neighbouring columns, as equal as possible.",
    "DpSettings": "The keys of `dp`: differential privacy of a phase.",
    "DType": "The types of numbers that the wire carries.",
    "Float16": "The codec `float16`, to be extended.",
    "IMAGE_DIVISIONS": "The divisions for data sets of images, by name.",
    "LatePolicy": "What stands in for a passive party that is late: `wait`, `cached` or `skip`.",
    "MakeEncoder": "Makes encoders of a party's kind and input, each label with its own weights.",
    "NOTHING": "The direction of an exchange in which no tensors go.",
    "PrivateSteps": "Takes the private steps of one phase at one party: DP-SGD within the run's budget.",
    "Rows": "Row numbers: a NumPy array, int64 [N].",
    "Tensors": "{name: tensor}, which a filter gets and returns.",
    "VflError": "The base of all our errors.",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yields a line for each name, also for those that the satellites add."""
    satellites = {entry.name: entry.module for entry in entry_points(group="vfl.api")}
    for name in sorted(dir(api), key=str.casefold):
        made = getattr(api, name)
        room = api.FROM.get(name) or satellites[name]
        yield f"`{name}`", _WORDS.get(name) or _said(name, made), f"`{room}`"


def _said(name: str, made: object) -> str:
    text = inspect.getdoc(made) or ""
    if not text or text.startswith(f"{name}("):
        raise ValueError(f"vfl.api.{name} has no docstring; write one")
    whole = " ".join(text.split("\n\n")[0].split())
    end = next(
        (
            at
            for at in range(len(whole))
            if whole[at] == "." and whole[at + 1 : at + 2] in ("", " ")
        ),
        len(whole),
    )
    return (whole[:end].rstrip(":") + ".").replace("``", "`").replace("|", "\\|")
