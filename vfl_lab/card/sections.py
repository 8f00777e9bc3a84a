"""Renders the sections of a card. They follow Hugging Face's model card, with the questions to the
owner of the Model Card Toolkit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vfl.summary.notes import describe_exchanges, yield_protection_notes
from vfl.summary.table import format_size
from vfl_common.summary import Worth
from vfl_common.text import LINE, clean, shorten, to_json
from vfl_lab.card.known import CardFacts
from vfl_lab.card.marks import make_place

_TAGS = ("vertical-federated-learning", "pytorch")
_ABSENT = "Unknown here: only the server and the active party have the summary of a run."
_SPLITS = ("train", "validation", "test")
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$^=])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"})
# Texts that a Markdown renderer turns into links.
_ADDRESS = re.compile(r"://|www\.", re.IGNORECASE)
_TICKS = re.compile(r"`+")


def render_card(known: CardFacts) -> str:
    """Returns the whole card as Markdown, with places for the texts that a person must write."""
    return "\n\n".join(part for part in _yield_sections(known) if part)


def _yield_sections(known: CardFacts) -> Iterator[str]:
    recipe = known.recipe
    yield _render_metadata(known)
    yield f"# Model card: {format_code(recipe.name)}"
    yield _describe_source(known)
    yield "## Model details"
    yield make_place("summary", "what the model does, for whom, in two sentences.")
    yield _render_details(known)
    yield make_place(
        "owners", "who is responsible, how to reach them, and the license of the model."
    )
    yield "## Uses"
    yield "### Direct use"
    yield make_place("direct-use", "what decisions the scores are for, and who takes them.")
    yield "### Out-of-scope use"
    yield make_place("out-of-scope", "for what and for whom the model must not be used.")
    yield "## Bias, risks and limitations"
    yield make_place(
        "risks", "groups for whom it may be wrong, harms, and what was done against them."
    )
    yield _describe_limits(known)
    yield "## How to get started"
    yield format_block(_render_commands(known), "sh")
    yield "## Training details"
    yield "### Training data"
    yield make_place("data", "where the rows come from, their time, consent, and who is missing.")
    yield _render_data(known)
    yield "### Training procedure"
    yield _render_procedure(known)
    yield "### Privacy: what left each party"
    yield from _yield_privacy(known)
    yield "## Evaluation"
    yield make_place(
        "evaluation", "whether the test rows resemble those in use; which errors are costly."
    )
    yield from _yield_evaluation(known)
    yield "## Environment"
    yield _render_environment(known)
    yield "## How to run it again"
    yield from _yield_recipe(known)


def _render_metadata(known: CardFacts) -> str:
    """Returns the metadata for model hubs, without names of recipes or parties."""
    tags = "\n".join(f"- {tag}" for tag in (*_TAGS, known.recipe.task.kind))
    return f"---\nlibrary_name: vfl\ntags:\n{tags}\n---"


def _describe_source(known: CardFacts) -> str:
    source = (
        format_code(known.party) if known.party else "the machine that has all files of the run"
    )
    return (
        f"Run {format_code(known.folder.name)}, as described by the files of {source}. This "
        "card has no names, categories or statistics of columns."
    )


def _render_details(known: CardFacts) -> str:
    recipe = known.recipe
    task = recipe.task
    classes = f", {task.classes} classes" if getattr(task, "classes", 0) else ""
    summary = known.summary
    method = summary.method if summary is not None else recipe.method
    encoder = _dict(known.facts.get("encoder")) if known.party else {}
    rows = [
        ("task", escape_prose(f"{task.kind}{classes}")),
        ("method", escape_prose(method)),
        ("embedding", f"{recipe.model.embedding_size} numbers a party and row"),
        ("combination", format_code(_get_kind(recipe.model.combine))),
        ("top model", _format_settings(recipe.model.top.model_dump(mode="json"))),
        ("encoder of this party", _format_settings(encoder)),
        ("recipe digest", format_code(recipe.digest())),
    ]
    return format_table(("what", "is"), [row for row in rows if row[1]])


def _get_kind(value: Any) -> str:
    return value if isinstance(value, str) else str(getattr(value, "kind", value))


def _format_settings(settings: Mapping[str, Any]) -> str:
    parts = (f"{key} = {to_json(value)}" for key, value in settings.items() if value is not None)
    return ", ".join(format_code(part) for part in parts)


def _describe_limits(known: CardFacts) -> str:
    lines = [
        _describe_needed_parties(known),
        "- The model knows only rows like those of training; a column that drifts shows in "
        "`vfl drift`.",
    ]
    if known.summary is not None:
        for absence in known.summary.absences:
            lines.append(
                f"- Training: {format_code(absence.phase)} ran {absence.steps:,} steps without "
                f"{format_code(absence.party)}."
            )
        lines += [
            f"- Training: {format_code(name)} joined too late; the model was trained without its "
            "data."
            for name in known.summary.without
        ]
    return "\n".join(lines)


def _describe_needed_parties(known: CardFacts) -> str:
    """Returns a sentence about the parties that are needed for a score."""
    # Imported here because it imports torch.
    from vfl_party.phases.course import Course

    recipe = known.recipe
    if Course(recipe).without == "wait":
        return (
            f"- A score needs all {len(recipe.parties)} parties: a row that a party lacks gets no "
            "score."
        )
    return (
        f"- A score needs {format_code(recipe.active.name)}. Other parties may be missing, which "
        "makes the score less accurate."
    )


def _render_commands(known: CardFacts) -> str:
    run = known.folder.name
    return (
        f"vfl-party predict PARTY.toml --run {run}     # every party, at the same time\n"
        f"vfl export model runs/{run} --party NAME     # a party's own part of the model"
    )


def _render_data(known: CardFacts) -> str:
    recipe, summary = known.recipe, known.summary
    rows = {entry.name: entry for entry in summary.parties} if summary is not None else {}
    lines = []
    for party in recipe.parties:
        entry = rows.get(party.name)
        own = f"{entry.rows:,}" if entry is not None and entry.rows else ""
        common = f"{entry.common_rows:,}" if entry is not None and entry.common_rows else ""
        has = "columns and labels" if party.role == "active" else "columns"
        has = has if party.features else "labels"
        lines.append((format_code(party.name), party.role, has, own, common))
    split = recipe.rows
    shares = (
        f"Validation rows: {split.validation:.0%}, test rows: {split.test:.0%}, by a split "
        f"({format_code(str(split.split))}) that follows from seed {recipe.seed}."
    )
    head = ("party", "role", "has", "rows", "common rows")
    return f"{format_table(head, lines)}\n\n{shares}"


def _render_procedure(known: CardFacts) -> str:
    rows = [
        (format_code(phase.name), format_code(phase.kind), _format_settings(phase.settings))
        for phase in known.recipe.phases
    ]
    text = format_table(("phase", "kind", "settings"), rows)
    if known.summary is not None:
        summary = known.summary
        text += (
            f"\n\n{summary.steps:,} steps in {summary.wall_s:.1f} s; interruptions: "
            f"{summary.interruptions}; precision {format_code(known.recipe.model.precision)}."
        )
    return text


def _yield_privacy(known: CardFacts) -> Iterator[str]:
    summary = known.summary
    if summary is None:
        rows = [
            (format_code(peer), format_code(phase), format_code(kind), format_size(count))
            for (peer, phase, kind), count in sorted(known.sent.items())
        ]
        yield f"Sent by {format_code(known.party)}, by its own count:"
        yield format_table(("to", "phase", "kind", "bytes"), rows)
        chains = [(format_code(phase.name), _format_chain(phase)) for phase in known.recipe.phases]
        yield "Transforms that the recipe applies before sending (a party's policy may add more):"
        yield format_table(("phase", "chain"), chains)
        return
    left = [
        [escape_prose(text) for text in (e.phase, e.sender, e.receiver, e.carries, e.chain, e.when)]
        for e in summary.exchanges
    ]
    yield (
        format_table(("phase", "from", "to", "what", "chain", "when"), left)
        or "Nothing left a party."
    )
    total = summary.bytes.total
    yield f"Total: {format_size(total.message_bytes)} in {total.messages:,} messages."
    if summary.privacy is not None:
        promised = summary.privacy
        yield (
            f"Differential privacy: ε = {promised.epsilon:.3g} at δ = {promised.delta:.3g}. "
            f"{escape_prose(promised.statement)}"
        )
    else:
        yield "No phase trained with differential privacy."
    yield from map(escape_prose, (*yield_protection_notes(summary), *describe_exchanges(summary)))


def _format_chain(phase: Any) -> str:
    names = [_get_kind(transform) for transform in phase.transforms]
    return " → ".join(format_code(name) for name in (*names, _get_kind(phase.codec)))


def _yield_evaluation(known: CardFacts) -> Iterator[str]:
    summary = known.summary
    if summary is None:
        yield _ABSENT
        rows = [
            (format_code(phase), format_code(split), format_code(name), _format_number(value))
            for phase, splits in known.own.items()
            for split, named in splits.items()
            for name, value in named.items()
        ]
        yield format_table(("phase", "of", "metric", "last round"), rows)
        return
    splits = [split for split in _SPLITS if split in summary.metrics]
    splits += sorted(set(summary.metrics) - set(_SPLITS))
    names = list(dict.fromkeys(name for split in splits for name in summary.metrics[split]))
    yield format_table(
        ("metric", *(format_code(split) for split in splits)),
        [
            (
                format_code(name),
                *(_format_number(summary.metrics[split].get(name)) for split in splits),
            )
            for name in names
        ],
    )
    if known.baselines:
        yield "Compared with baselines of the same recipe and seed, on the test rows:"
        tested = summary.metrics.get("test", {})
        kinds = {"together": tested}
        kinds |= {
            kind: baseline.metrics.get("test", {}) for kind, baseline in known.baselines.items()
        }
        yield format_table(
            ("run", *map(format_code, tested)),
            [
                (format_code(kind), *(_format_number(values.get(name)) for name in tested))
                for kind, values in kinds.items()
            ],
        )
    else:
        yield "No baseline is known here: `vfl simulate … --baseline alone` runs one."
    if known.summary is not None and known.summary.worth is not None:
        yield from _yield_worth(known.summary.worth)


def _yield_worth(worth: Worth) -> Iterator[str]:
    """Yields the section about the contribution of each party to the metric."""
    metric = format_code(worth.metric)
    if worth.shapley:
        shares = [
            (format_code(name), _format_number(share.value), _format_number(share.error))
            for name, share in worth.shapley.items()
        ]
        yield f"The contribution of each party (Shapley values of {metric}):"
        yield format_table(("party", "value", "error"), shares)
    rows = [
        (
            ", ".join(map(format_code, subset.parties)) or "none",
            _format_number(subset.validation),
            _format_number(subset.test),
        )
        for subset in worth.subsets
    ]
    yield f"{metric} of each subset of the parties:"
    yield format_table(("parties", "validation", "test"), rows)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _get(value: Any, key: str) -> Any:
    return _dict(value).get(key)


def _format_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:.4g}" if math.isfinite(value) else "not a number"


def _render_environment(known: CardFacts) -> str:
    summary = known.summary
    if summary is None:
        return "The energy of training was not measured."
    rows: list[Sequence[str]] = [
        (
            format_code(party.name),
            format_code(party.device),
            escape_prose(party.device_name),
            format_code(party.version),
            escape_prose(str(party.arithmetic or "")),
            f"{party.wall_s:.1f}" if party.role != "server" else "",
        )
        for party in summary.parties
    ]
    head = ("process", "device", "hardware", "version of vfl", "computed with", "seconds")
    return f"{format_table(head, rows)}\n\nThe energy of training was not measured."


def _yield_recipe(known: CardFacts) -> Iterator[str]:
    yield (
        f"The digest of the recipe with its defaults is {format_code(known.recipe.digest())}. The "
        "same rows, versions and devices give the same model, unless a party draws its initial "
        "weights from a secret."
    )
    yield format_block(known.recipe.model_dump_json(indent=1), "json")


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


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table from cells in Markdown; '' without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines])
