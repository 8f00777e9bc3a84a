"""The sections of a card: those of Hugging Face's model card, with the Model Card Toolkit's
questions to the owner.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vfl.card.known import CardFacts
from vfl.card.marks import yours
from vfl.report.notes import about_exchanges, protection_notes
from vfl.report.table import size
from vfl_common.summary import Worth
from vfl_common.text import LINE, clean, shorten, to_json

_TAGS = ("vertical-federated-learning", "pytorch")
_ABSENT = "Unknown here: only the server and the active party have the summary of a run."
_SPLITS = ("train", "validation", "test")
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$^=])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"})
# Texts that a renderer turns into links without brackets.
_ADDRESS = re.compile(r"://|www\.", re.IGNORECASE)
_TICKS = re.compile(r"`+")


def card(known: CardFacts) -> str:
    """Returns the whole card as Markdown, with places for what a person must write."""
    return "\n\n".join(part for part in _parts(known) if part)


def _parts(known: CardFacts) -> Iterator[str]:
    recipe = known.recipe
    yield _front(known)
    yield f"# Model card: {code(recipe.name)}"
    yield _describe_source(known)
    yield "## Model details"
    yield yours("summary", "what the model does, for whom, in two sentences.")
    yield _details(known)
    yield yours("owners", "who is responsible, how to reach them, and the license of the model.")
    yield "## Uses"
    yield "### Direct use"
    yield yours("direct-use", "what decisions the scores are for, and who takes them.")
    yield "### Out-of-scope use"
    yield yours("out-of-scope", "for what and for whom the model must not be used.")
    yield "## Bias, risks and limitations"
    yield yours("risks", "groups for whom it may be wrong, harms, and what was done against them.")
    yield _limits(known)
    yield "## How to get started"
    yield block(_commands(known), "sh")
    yield "## Training details"
    yield "### Training data"
    yield yours("data", "where the rows come from, their time, consent, and who is missing.")
    yield _data(known)
    yield "### Training procedure"
    yield _procedure(known)
    yield "### Privacy: what left each party"
    yield from _privacy(known)
    yield "## Evaluation"
    yield yours(
        "evaluation", "whether the test rows resemble those in use; which errors are costly."
    )
    yield from _evaluation(known)
    yield "## Environment"
    yield _environment(known)
    yield "## How to run it again"
    yield from _again(known)


def _front(known: CardFacts) -> str:
    """Returns the metadata that model hubs read; it contains no names of recipes or parties."""
    tags = "\n".join(f"- {tag}" for tag in (*_TAGS, known.recipe.task.kind))
    return f"---\nlibrary_name: vfl\ntags:\n{tags}\n---"


def _describe_source(known: CardFacts) -> str:
    source = code(known.party) if known.party else "the machine that has all files of the run"
    return (
        f"Run {code(known.folder.name)}, as described by the files of {source}. This card has no "
        "names, categories or statistics of columns."
    )


def _details(known: CardFacts) -> str:
    recipe = known.recipe
    task = recipe.task
    classes = f", {task.classes} classes" if getattr(task, "classes", 0) else ""
    summary = known.summary
    method = summary.method if summary is not None else recipe.method
    encoder = _dict(known.facts.get("encoder")) if known.party else {}
    rows = [
        ("task", prose(f"{task.kind}{classes}")),
        ("method", prose(method)),
        ("embedding", f"{recipe.model.embedding_size} numbers a party and row"),
        ("combination", code(_kind(recipe.model.combine))),
        ("top model", _settings(recipe.model.top.model_dump(mode="json"))),
        ("encoder of this party", _settings(encoder)),
        ("recipe digest", code(recipe.digest())),
    ]
    return table(("what", "is"), [row for row in rows if row[1]])


def _kind(value: Any) -> str:
    return value if isinstance(value, str) else str(getattr(value, "kind", value))


def _settings(settings: Mapping[str, Any]) -> str:
    parts = (f"{key} = {to_json(value)}" for key, value in settings.items() if value is not None)
    return ", ".join(code(part) for part in parts)


def _limits(known: CardFacts) -> str:
    lines = [
        _needs(known),
        "- The model knows only rows like those of training; a column that drifts shows in "
        "`vfl drift`.",
    ]
    if known.summary is not None:
        for absence in known.summary.absences:
            lines.append(
                f"- Training: {code(absence.phase)} ran {absence.steps:,} steps without "
                f"{code(absence.party)}."
            )
        lines += [
            f"- Training: {code(name)} joined too late; the model was trained without its data."
            for name in known.summary.without
        ]
    return "\n".join(lines)


def _needs(known: CardFacts) -> str:
    """Says which parties must have a row so that it gets a score."""
    # Imported here because it imports torch.
    from vfl_party.phases.course import Course

    recipe = known.recipe
    if Course(recipe).without == "wait":
        return (
            f"- A score needs all {len(recipe.parties)} parties: a row that a party lacks gets no "
            "score."
        )
    return (
        f"- A score needs {code(recipe.active.name)}. Other parties may be missing, which makes "
        "the score less accurate."
    )


def _commands(known: CardFacts) -> str:
    run = known.folder.name
    return (
        f"vfl-party predict PARTY.toml --run {run}     # every party, at the same time\n"
        f"vfl export model runs/{run} --party NAME     # a party's own part of the model"
    )


def _data(known: CardFacts) -> str:
    recipe, summary = known.recipe, known.summary
    rows = {entry.name: entry for entry in summary.parties} if summary is not None else {}
    lines = []
    for party in recipe.parties:
        entry = rows.get(party.name)
        own = f"{entry.rows:,}" if entry is not None and entry.rows else ""
        common = f"{entry.common_rows:,}" if entry is not None and entry.common_rows else ""
        has = "columns and labels" if party.role == "active" else "columns"
        has = has if party.features else "labels"
        lines.append((code(party.name), party.role, has, own, common))
    split = recipe.rows
    shares = (
        f"Validation rows: {split.validation:.0%}, test rows: {split.test:.0%}, by a split "
        f"({code(str(split.split))}) that follows from seed {recipe.seed}."
    )
    head = ("party", "role", "has", "rows", "common rows")
    return f"{table(head, lines)}\n\n{shares}"


def _procedure(known: CardFacts) -> str:
    rows = [
        (code(phase.name), code(phase.kind), _settings(phase.settings))
        for phase in known.recipe.phases
    ]
    text = table(("phase", "kind", "settings"), rows)
    if known.summary is not None:
        summary = known.summary
        text += (
            f"\n\n{summary.steps:,} steps in {summary.wall_s:.1f} s; interruptions: "
            f"{summary.interruptions}; precision {code(known.recipe.model.precision)}."
        )
    return text


def _privacy(known: CardFacts) -> Iterator[str]:
    summary = known.summary
    if summary is None:
        rows = [
            (code(peer), code(phase), code(kind), size(count))
            for (peer, phase, kind), count in sorted(known.sent.items())
        ]
        yield f"Sent by {code(known.party)}, by its own count:"
        yield table(("to", "phase", "kind", "bytes"), rows)
        chains = [(code(phase.name), _chain(phase)) for phase in known.recipe.phases]
        yield "Transforms that the recipe applies before sending (a party's policy may add more):"
        yield table(("phase", "chain"), chains)
        return
    left = [
        [prose(text) for text in (e.phase, e.sender, e.receiver, e.carries, e.chain, e.when)]
        for e in summary.exchanges
    ]
    yield table(("phase", "from", "to", "what", "chain", "when"), left) or "Nothing left a party."
    total = summary.bytes.total
    yield f"Total: {size(total.message_bytes)} in {total.messages:,} messages."
    if summary.privacy is not None:
        promised = summary.privacy
        yield (
            f"Differential privacy: ε = {promised.epsilon:.3g} at δ = {promised.delta:.3g}. "
            f"{prose(promised.statement)}"
        )
    else:
        yield "No phase trained with differential privacy."
    yield from map(prose, (*protection_notes(summary), *about_exchanges(summary)))


def _chain(phase: Any) -> str:
    names = [_kind(transform) for transform in phase.transforms]
    return " → ".join(code(name) for name in (*names, _kind(phase.codec)))


def _evaluation(known: CardFacts) -> Iterator[str]:
    summary = known.summary
    if summary is None:
        yield _ABSENT
        rows = [
            (code(phase), code(split), code(name), _number(value))
            for phase, splits in known.own.items()
            for split, named in splits.items()
            for name, value in named.items()
        ]
        yield table(("phase", "of", "metric", "last round"), rows)
        return
    splits = [split for split in _SPLITS if split in summary.metrics]
    splits += sorted(set(summary.metrics) - set(_SPLITS))
    names = list(dict.fromkeys(name for split in splits for name in summary.metrics[split]))
    yield table(
        ("metric", *(code(split) for split in splits)),
        [
            (code(name), *(_number(summary.metrics[split].get(name)) for split in splits))
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
        yield table(
            ("run", *map(code, tested)),
            [
                (code(kind), *(_number(values.get(name)) for name in tested))
                for kind, values in kinds.items()
            ],
        )
    else:
        yield "No baseline is known here: `vfl simulate … --baseline alone` runs one."
    if known.summary is not None and known.summary.worth is not None:
        yield from _worth(known.summary.worth)


def _worth(worth: Worth) -> Iterator[str]:
    """Yields what each party contributes."""
    metric = code(worth.metric)
    if worth.shapley:
        shares = [
            (code(name), _number(share.value), _number(share.error))
            for name, share in worth.shapley.items()
        ]
        yield f"The contribution of each party (Shapley values of {metric}):"
        yield table(("party", "value", "error"), shares)
    rows = [
        (
            ", ".join(map(code, subset.parties)) or "none",
            _number(subset.validation),
            _number(subset.test),
        )
        for subset in worth.subsets
    ]
    yield f"{metric} of each subset of the parties:"
    yield table(("parties", "validation", "test"), rows)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _get(value: Any, key: str) -> Any:
    return _dict(value).get(key)


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:.4g}" if math.isfinite(value) else "not a number"


def _environment(known: CardFacts) -> str:
    summary = known.summary
    if summary is None:
        return "The energy of training was not measured."
    rows: list[Sequence[str]] = [
        (
            code(party.name),
            code(party.device),
            prose(party.device_name),
            code(party.version),
            prose(str(party.arithmetic or "")),
            f"{party.wall_s:.1f}" if party.role != "server" else "",
        )
        for party in summary.parties
    ]
    head = ("process", "device", "hardware", "version of vfl", "computed with", "seconds")
    return f"{table(head, rows)}\n\nThe energy of training was not measured."


def _again(known: CardFacts) -> Iterator[str]:
    yield (
        f"The digest of the recipe with its defaults is {code(known.recipe.digest())}. The same "
        "rows, versions and devices give the same model, unless a party draws its initial weights "
        "from a secret."
    )
    yield block(known.recipe.model_dump_json(indent=1), "json")


def prose(text: str) -> str:
    """Escapes a text for a sentence or a table cell."""
    text = _SPECIAL.sub(r"\\\1", clean(text, LINE)).translate(_ENTITIES)
    return _ADDRESS.sub(lambda match: match[0].replace(":", "&#58;").replace(".", "&#46;"), text)


def code(name: str) -> str:
    """Returns a name, shortened if it is long, as inline code that is safe in a table cell."""
    name = shorten(clean(name, LINE)).replace("|", "\\|")
    if not name:
        return ""
    longest = max((len(ticks) for ticks in _TICKS.findall(name)), default=0)
    fence = "`" * (longest + 1)
    # A space separates a tick at an end from the fence.
    pad = " " if name.startswith("`") or name.endswith("`") else ""
    return f"{fence}{pad}{name}{pad}{fence}"


def block(text: str, language: str) -> str:
    """Returns a text of several lines as a fenced code block."""
    longest = max((len(ticks) for ticks in _TICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of Markdown cells; '' without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines])
