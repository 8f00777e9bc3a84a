"""Reads the facts for a model card from the files of a run, renders its template, and writes it.

The sections follow Hugging Face's model card, and the questions to the owner follow the Model Card
Toolkit. A card is public, so it contains only counts and facts that all parties know. It contains
no name, category, statistic or value of a column.

A card ends with a digest of the text outside of the marks. A different digest shows that a person
has changed this text, which is then not overwritten.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from vfl.simulation import BASELINES
from vfl.summary.reading import find, find_run_folder, find_runs, read_history
from vfl.summary.rounds import PartyFolder
from vfl.summary.table import describe_exchanges, format_size, yield_protection_notes
from vfl_common.bundle import load_entries
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Summary
from vfl_common.text import LINE, clean, shorten, to_json

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
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
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


TO_WRITE = "TO WRITE:"
_END = "<!-- /yours -->"
_YOURS = re.compile(r"<!-- yours: ([a-z-]+) -->\n(.*?)<!-- /yours -->", re.DOTALL)
_DIGEST = re.compile(r"<!-- vfl card: ([0-9a-f]{64}) -->\n")


def write(path: Path, card: str) -> list[str]:
    """Writes a card, and keeps the text that a person has written between the marks of an existing
    card.

    Returns the names of the places without such a text. Raises InputError if the file is not a
    card, was changed outside of the marks, has text in a place that the new card does not have, or
    cannot be read or written.
    """
    old_places = _read_places(path)
    places = dict(_YOURS.findall(card))
    orphaned = sorted(
        name for name, text in old_places.items() if name not in places and _is_written(text)
    )
    if orphaned:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: has text in {orphaned[0]!r}, for which the new card has no place. Move the "
            "file away, or give another --out.",
        )

    def fill(match: re.Match[str]) -> str:
        name, text = match[1], match[2]
        text = old_places[name] if name in old_places and _is_written(old_places[name]) else text
        places[name] = text
        return f"<!-- yours: {name} -->\n{text}{_END}"

    body = _YOURS.sub(fill, card.rstrip("\n") + "\n\n")
    write_atomic(path, f"{body}<!-- vfl card: {_digest(body)} -->\n")
    return [name for name, text in places.items() if not _is_written(text)]


def _read_places(path: Path) -> Mapping[str, str]:
    """Returns {place: its text} of an existing card; empty if there is no card."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read. Move it away, or give another --out."
        ) from None
    # An editor may have written the line ends of another system.
    content = content.replace("\r\n", "\n").rstrip("\n") + "\n"
    match = _DIGEST.search(content)
    body = content[: match.start()] if match is not None else ""
    if match is None or match.end() != len(content) or _digest(body) != match[1]:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: has changed text outside of the marks, which would be lost. Give another "
            "--out, and move the text between '<!-- yours: … -->' and '<!-- /yours -->' there.",
        )
    places: list[tuple[str, str]] = _YOURS.findall(body)
    return dict(places)


def _digest(body: str) -> str:
    outside = _YOURS.sub(lambda match: f"<!-- yours: {match[1]} -->", body)
    return hashlib.sha256(outside.encode()).hexdigest()


def _is_written(text: str) -> bool:
    """Whether a person has written this text."""
    return bool(text.strip()) and not text.startswith(TO_WRITE)


@dataclass(frozen=True)
class CardFacts:
    """The facts of a trained run from its files.

    ``party``: the party whose folder was read; '' if all folders of the run were read.
    ``summary``: the run's summary, which only the server and the active party have. ``sent``:
    {(receiver, phase, kind): bytes} from the party's ledger. ``own``: {phase: {split: {metric:
    value}}} from the party's last round of each phase. ``baselines``: {kind: the newest baseline
    with the same recipe name and seed}.
    """

    folder: Path
    recipe: Recipe
    party: str = ""
    summary: Summary | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    sent: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    baselines: Mapping[str, Summary] = field(default_factory=dict)


def read_run(path: Path, party: str | None) -> CardFacts:
    """Reads a run from its folder, or from a party's folder in it.

    Args:
        path: the folder of the run, or of a party in it.
        party: the party of the card; None: the party of the folder, or the only party.

    Raises InputError if the folder has no run that was trained to its end.
    """
    folder = find_run_folder(path)
    names = sorted(file.parent.name for file in folder.glob("*/run.json"))
    if not names:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: does not contain a run. Give the folder OUT/RUN-ID, or a party's folder in "
            "it.",
        )
    name = party or (path.resolve().name if folder != path else "")
    if not name and len(names) == 1:
        name = names[0]
    if name and name not in names:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: has no folder of party {name}. Choose one of {', '.join(names)}.",
        )
    source = PartyFolder(folder / (name or names[0]))
    facts = source.read("run.json")
    if facts.get("job") != "train" or not facts.get("finished"):
        raise InputError(
            Code.FILE_INVALID,
            f"{source.folder}: is not from a finished training run. Give the folder of a finished "
            "training run.",
        )
    recipe = RunFolder(source.folder, source.run_id).recipe()
    has_summary = (folder / "summary.json").is_file()
    any_summary = find(folder).summary if has_summary else None
    # Without a simulation, a passive party's machine has no summary, so its card does not use it.
    passive = {other.name for other in recipe.passives}
    summary = None if name in passive else any_summary
    return CardFacts(
        folder,
        recipe,
        name,
        summary,
        facts,
        _sum_sent_bytes(source.folder),
        _read_last_metrics(source.folder),
        _find_baselines(folder, summary) if summary is not None else {},
    )


def _sum_sent_bytes(folder: Path) -> dict[tuple[str, str, str], int]:
    totals: dict[tuple[str, str, str], int] = {}
    for entry in load_entries(folder / "ledger.json"):
        if entry.direction == "sent":
            key = (entry.peer, entry.phase, entry.kind)
            totals[key] = totals.get(key, 0) + entry.message_bytes
    return totals


def _read_last_metrics(folder: Path) -> dict[str, Mapping[str, Mapping[str, float]]]:
    """Returns {phase: the metrics of its last round}, for the phases in which the party has
    metrics.
    """
    return {line.phase: line.metrics for line in read_history(folder) if line.metrics}


def _find_baselines(folder: Path, summary: Summary) -> dict[str, Summary]:
    baselines: dict[str, Summary] = {}
    for run in find_runs(folder.parent)[0]:
        for kind in BASELINES:
            baseline_name = f"{summary.name}-{kind}"
            if run.summary is None or run.summary.seed != summary.seed or not run.alone:
                continue
            # The name of a folder is YYYYmmdd-HHMMSS-<name>-<kind>-xxxx.
            if run.folder.name[16:-5] == baseline_name:
                baselines.setdefault(kind, run.summary)
    return baselines
