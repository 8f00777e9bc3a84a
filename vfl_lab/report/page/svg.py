"""Renders matplotlib figures as SVG for a page: without styles, which a strict content policy
blocks, and with colours that the stylesheet of the page changes for dark screens.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vfl_common.text import clean

# Colours that colour-blind readers can distinguish; the stylesheet lists them.
BLUE, ORANGE, GREEN, PINK, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"
YELLOW, GREY, INK = "#e69f00", "#767676", "#1a1a1a"
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY)
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_MAX_CHARACTERS = 22
_RC: dict[Any, Any] = {
    # Text stays text: it is small, and screen readers read it.
    "svg.fonttype": "none",
    "svg.hashsalt": "vfl",
    # A name with two dollar signs is not a formula.
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "path.simplify": True,
}


@dataclass(frozen=True)
class SvgPicture:
    """A picture for the page. ``alt``: its description for screen readers."""

    title: str
    alt: str
    svg: Markup
    note: str = ""
    wide: bool = False


@contextmanager
def open_panel(width: float = 4.1, height: float = 3.0) -> Iterator[tuple[Figure, Axes]]:
    """Yields a figure with one panel, in inches; it must be finished inside the block."""
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots()


def render_inline(figure: Figure, key: str) -> Markup:
    """Returns a figure as an SVG element. ``key``: the prefix of its ids, unique in the page."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    # The XML is trusted: matplotlib has written it.
    root = ElementTree.fromstring(file.getvalue())  # noqa: S314
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    used = set(re.findall(r"#([\w-]+)", ElementTree.tostring(root, encoding="unicode")))
    for element in root.iter():
        _remove_style(element, key, used)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
    # The two libraries that wrote it have escaped it.
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704


def _remove_style(element: ElementTree.Element, key: str, used: set[str]) -> None:
    """Turns the style of an element into attributes, and prefixes its ids and links with
    ``key``.
    """
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = declaration.partition(":")
        name, value = name.strip(), value.strip()
        if name == "font":
            size = re.search(r"([\d.]+)px", value)
            element.set("font-size", size[1] if size else "9")
        elif name and name not in ("white-space", "font-family"):
            element.set(name, value)
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{key}-{own}")
    link = element.attrib.get(f"{{{_XLINK}}}href")
    if link is not None:
        element.set(f"{{{_XLINK}}}href", link.replace("#", f"#{key}-", 1))
    clip = element.attrib.get("clip-path")
    if clip is not None:
        element.set("clip-path", clip.replace("#", f"#{key}-", 1))


def shorten_label(name: str, max_characters: int = _MAX_CHARACTERS) -> str:
    """Returns a name, shortened for a picture."""
    name = clean(name)
    return name if len(name) <= max_characters else f"{name[: max_characters - 1]}…"
