"""Renders a card from its template. Its sections follow Hugging Face's model card, and the questions
to the owner follow the Model Card Toolkit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from vfl.summary.notes import describe_exchanges, yield_protection_notes
from vfl.summary.table import format_size
from vfl_common.text import LINE, clean, shorten, to_json
from vfl_lab.card.known import CardFacts
from vfl_lab.card.marks import TO_WRITE

_SPLITS = ("train", "validation", "test")
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$^=])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"})
# Texts that a Markdown renderer turns into links.
_ADDRESS = re.compile(r"://|www\.", re.IGNORECASE)
_TICKS = re.compile(r"`+")


def render_card(known: CardFacts) -> str:
    """Returns the whole card as Markdown, with places for the texts that a person must write."""
    # Imported here because it imports torch.
    from vfl_party.phases.course import Course

    summary = known.summary
    all_metrics = {} if summary is None else summary.metrics
    splits = [split for split in _SPLITS if split in all_metrics]
    splits += sorted(set(all_metrics) - set(_SPLITS))
    baselines = {kind: run.metrics.get("test", {}) for kind, run in known.baselines.items()}
    card = (
        _make_environment()
        .get_template("card.md.jinja")
        .render(
            known=known,
            recipe=known.recipe,
            summary=summary,
            needs_all=Course(known.recipe).without == "wait",
            notes=[]
            if summary is None
            else [*yield_protection_notes(summary), *describe_exchanges(summary)],
            splits=splits,
            metrics=list(dict.fromkeys(name for split in splits for name in all_metrics[split])),
            tested={"together": all_metrics.get("test", {}), **baselines},
            to_write=TO_WRITE,
        )
    )
    # Parts without content leave blank lines. No text in a card has any.
    return re.sub(r"\n{3,}", "\n\n", card).rstrip("\n")


def _make_environment() -> Environment:
    """Returns the environment of the template, in which each text passes ``code`` or ``prose``."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        # Without a summary, its parts are empty.
        undefined=ChainableUndefined,
        autoescape=False,  # noqa: S701 - the card is Markdown, not HTML
    )
    environment.filters |= {
        "block": format_block,
        "code": format_code,
        "count": lambda count: f"{count:,}" if count else "",
        "kind": lambda value: value if isinstance(value, str) else getattr(value, "kind", value),
        "number": _format_number,
        "prose": escape_prose,
        "settings": _format_settings,
        "size": format_size,
    }
    return environment


def _format_settings(settings: Any) -> str:
    items = settings.items() if isinstance(settings, Mapping) else ()
    parts = (f"{key} = {to_json(value)}" for key, value in items if value is not None)
    return ", ".join(format_code(part) for part in parts)


def _format_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:.4g}" if math.isfinite(value) else "not a number"


def escape_prose(text: str) -> str:
    """Escapes a text for a sentence or a table cell."""
    text = _SPECIAL.sub(r"\\\1", clean(text, LINE)).translate(_ENTITIES)
    return _ADDRESS.sub(lambda match: match[0].replace(":", "&#58;").replace(".", "&#46;"), text)


def format_code(name: str) -> str:
    """Returns a name, shortened if it is long, as inline code that is safe in a table cell."""
    name = shorten(clean(name, LINE)).replace("|", "\\|")
    if not name:
        return ""
    longest = max((len(ticks) for ticks in _TICKS.findall(name)), default=0)
    fence = "`" * (longest + 1)
    # If the name begins or ends with a backtick, a space separates it from the fence.
    pad = " " if name.startswith("`") or name.endswith("`") else ""
    return f"{fence}{pad}{name}{pad}{fence}"


def format_block(text: str, language: str) -> str:
    """Returns a text of several lines as a fenced code block."""
    longest = max((len(ticks) for ticks in _TICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"
