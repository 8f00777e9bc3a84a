"""Makes the chain of each exchange: transforms (the method's, then the recipe's) -> policy ->
codec.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch

from vfl_common.bundle import Kind
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import TransformSettings, WireSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_common.packing import coders
from vfl_common.packing.coders import PLAIN, Coding
from vfl_common.summary import AboutLabels, ExchangeSummary
from vfl_party.base.plugins import describe_failure
from vfl_party.base.seeds import derive_seed
from vfl_party.outbound import codecs, transforms
from vfl_party.outbound.chain import Chain, Chains, SentDigests
from vfl_party.outbound.codecs import BitsSettings
from vfl_party.outbound.declared import PREDICTION, PREDICTS, Exchange, Role, Sent, Use
from vfl_party.outbound.filter import Filter
from vfl_party.outbound.policies import Policy

PASSIVES = "passive parties"
Direction = Literal["up", "down"]


def make_chains(
    recipe: Recipe,
    phase: str,
    exchange: Exchange,
    role: Role,
    policy: Policy,
    party: str = "",
    sent: SentDigests | None = None,
) -> Chains:
    """Makes the chains of both directions of an exchange for a party of ``role``.

    A party applies the chain of the direction in which it sends, and undoes the chain of the other
    direction. So it makes both. Its policy is only in the first. ``sent``: the digests of what the
    party has sent in earlier generations. Raises InputError if the recipe names an unknown
    transform or codec, or if the policy refuses.
    """
    settings = next((entry for entry in recipe.phases if entry.name == phase), None)
    sends = {
        "up": role == "passive" or exchange.asks == "server",
        "down": role == "active" and exchange.asks == "active",
    }

    digests = sent

    def make_chain(direction: Direction, sent: Sent) -> Chain:
        where = f"recipe: phases: {phase}: exchange {exchange.name}"
        if not sent.tensors:
            return Chain([])
        uses = [*sent.through, *_list_recipe_transforms(recipe, phase, exchange, direction)]
        applied = [use for use in uses if use.role in (None, role) or not sends[direction]]
        filters: list[Filter] = [use.make(where) for use in applied]
        parts = settings.settings.get("micro_batches", 1) if settings is not None else 1
        _check_fits(recipe, applied, filters, sent, parts, where)
        if sends[direction]:
            # The policy checks the declaration with all transforms that this party applies.
            declaration = replace(sent, through=tuple(applied))
            filters.append(_make_policy_filter(policy, phase, exchange, declaration, where))
        way = f"{phase}: {exchange.name}, {direction}"
        return Chain(filters, _make_codec(recipe, phase, exchange, direction, where), digests, way)

    return Chains(make_chain("up", exchange.up), make_chain("down", exchange.down), party)


def coding_of(recipe: Recipe, phase: str, exchange: Exchange, direction: Direction) -> Coding:
    """Returns how tensors are encoded in one direction of an exchange that the server averages.
    Raises InputError if the server does not support the codec.
    """
    table = wire_table(recipe, phase, exchange, direction)
    if table is None:
        return PLAIN
    where = _locate_setting(recipe, table, phase, exchange)
    name = next((codec for codec in coders.NAMES if codec == table.codec), None)
    if name is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: the server averages {exchange.name!r} and does not support codec "
            f"{table.codec!r}. Choose one of {', '.join(coders.NAMES)}, or remove the table.",
        )
    if name != "bits":
        return Coding(name)
    settings = parse(BitsSettings, dict(table.settings), f"{where}: codec bits")
    if settings.scales != "float32":
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: scales must be float32 in {exchange.name!r}, which the server averages (got "
            f"{settings.scales}). Remove scales.",
        )
    stochastic = settings.rounding == "stochastic"
    seed = _derive_wire_seed(recipe, phase, exchange, direction) if stochastic else 0
    return Coding(name, settings.bits, stochastic, seed)


def wire_table(
    recipe: Recipe, phase: str, exchange: Exchange, direction: Direction
) -> WireSettings | None:
    """Returns the table of ``wire`` in the recipe that applies to a direction of an exchange, or
    None. ``phases.codec`` counts as a table.

    A table that names the phase takes precedence, then one that names the exchange, then the
    direction. No table applies outside of the recipe's phases (alignment, prediction). Only a table
    that names the exchange applies to an exchange that the server averages.
    """
    settings = next((entry for entry in recipe.phases if entry.name == phase), None)
    if settings is None:
        return None
    phase_tables = (
        [WireSettings(codec=settings.codec, phase=phase)] if settings.codec != "identity" else []
    )
    matching = [
        candidate
        for candidate in (*phase_tables, *recipe.wire)
        if _matches(candidate, phase, exchange, direction)
    ]
    return max(
        matching, key=lambda candidate: [name is not None for name in candidate.named], default=None
    )


def _matches(table: WireSettings, phase: str, exchange: Exchange, direction: Direction) -> bool:
    """Returns whether a table matches a direction of an exchange."""
    names = (exchange.name,) if exchange.asks == "server" else (None, exchange.name)
    return (
        table.phase in (None, phase)
        and table.exchange in names
        and table.direction in (None, direction)
    )


def _make_codec(
    recipe: Recipe, phase: str, exchange: Exchange, direction: Direction, where: str
) -> Filter | None:
    """Returns the codec of a direction; None without a codec, and for an exchange outside of the
    recipe's phases.
    """
    averaged = exchange.asks == "server"
    if averaged:
        coding_of(recipe, phase, exchange, direction)
    table = wire_table(recipe, phase, exchange, direction)
    if table is None:
        uses_identity = any(entry.name == phase for entry in recipe.phases) and not averaged
        return codecs.make("identity", where) if uses_identity else None
    where = _locate_setting(recipe, table, phase, exchange)
    if all(other is not table for other in recipe.wire) and codecs.has_settings(table.codec, where):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: codec {table.codec!r} has settings, which phases.codec cannot hold. Write "
            f"it as a table of wire, with phase = {phase!r}.",
        )
    answered = bool(exchange.up.tensors and exchange.down.tensors)
    place = codecs.Place(
        _derive_wire_seed(recipe, phase, exchange, direction), answered, averaged, direction == "up"
    )
    return codecs.make(table.codec, where, table.settings, place)


def _locate_setting(recipe: Recipe, table: WireSettings, phase: str, exchange: Exchange) -> str:
    """Returns the place in the recipe, for an error about a table of ``wire`` or about a phase's
    codec.
    """
    number = next((number for number, other in enumerate(recipe.wire, 1) if other is table), None)
    return (
        f"recipe: phases: {phase}: exchange {exchange.name}"
        if number is None
        else f"recipe: wire: table {number}"
    )


def _derive_wire_seed(recipe: Recipe, phase: str, exchange: Exchange, direction: Direction) -> int:
    return derive_seed(recipe.seed, "wire", phase, exchange.name, direction)


def summarize_exchanges(
    recipe: Recipe, phase: str, exchange: Exchange, chains: Chains, *, after_labels: bool
) -> list[ExchangeSummary]:
    """Describes both directions of an exchange in words, without a direction that sends no tensors.
    ``after_labels``: see ``Course.after_labels``.
    """

    def describe_labels(sender: str, sent: Sent) -> AboutLabels:
        if sender in (PASSIVES, recipe.server) or (sender == "every party" and exchange.passive):
            return ""
        if sent.label_free and not after_labels:
            by_column = recipe.rows.split in ("column", "grouped") and "split" in sent.tensors
            return "split" if by_column else "none"
        # A verdict (whether to stop) depends on metrics, which are computed from labels without
        # noise.
        noisy = recipe.task.label_epsilon is not None and sent.kind != Kind.VERDICT
        return "randomised" if noisy else "possible"

    averaged = exchange.asks == "server"
    asking = "every party" if averaged and not exchange.passive else PASSIVES
    answering = recipe.server if averaged else recipe.active.name
    return [
        ExchangeSummary(
            phase=phase,
            exchange=exchange.name,
            sender=sender,
            receiver=receiver,
            sent=str(sent),
            chain=str(chain),
            when=exchange.when,
            how=sent.how,
            labels=describe_labels(sender, sent),
        )
        for sender, receiver, sent, chain in (
            (asking, answering, exchange.up, chains.up),
            (answering, asking, exchange.down, chains.down),
        )
        if sent.tensors
    ]


def check_transforms(
    recipe: Recipe,
    opened: Mapping[tuple[str, str], Exchange],
    prediction: Exchange | None = None,
) -> None:
    """Raises InputError if a transform or codec of the recipe has no effect, because a recipe that
    asks for noise must get it.

    Args:
        opened: {(phase, exchange's name): the exchange} for all exchanges of the run.
        prediction: The exchange of a joint prediction with the model; None without one.
    """
    for phase in recipe.phases:
        codecs.make(phase.codec, f"recipe: phases: {phase.name}")
        between = [
            swap
            for (phase_name, _), swap in opened.items()
            if phase_name == phase.name and swap.asks == "active"
        ]
        sent = [direction for swap in between for direction in (swap.up, swap.down)]
        if phase.codec != "identity" and not _carries_float32(sent):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase.name}: codec: the phase sends no float32 numbers between "
                f"parties (got {phase.codec}). Remove codec."
                if between
                else f"recipe: phases: {phase.name}: codec: the phase sends nothing between "
                f"parties (got {phase.codec}). Remove codec.",
            )
        names = [name for phase_name, name in opened if phase_name == phase.name]
        for transform in phase.transforms:
            where = f"recipe: phases: {phase.name}: transforms"
            exchange = opened.get((phase.name, transform.exchange))
            if transform.exchange == PREDICTION and exchange is None:
                exchange = prediction
            if exchange is None:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{where}: unknown exchange in this phase (got {transform.exchange!r}). Choose "
                    f"one of: {', '.join(names) or 'none'}.",
                )
            sent_by_party = _check_transform(transform, exchange, where)
            if exchange is prediction:
                # The chain of a prediction is made after training, too late for this check.
                use = Use(transform.kind, transform.settings)
                _check_fits(recipe, [use], [use.make(where)], sent_by_party, 1, where)


def _check_transform(transform: TransformSettings, exchange: Exchange, where: str) -> Sent:
    """Returns the direction of ``exchange`` whose tensors a transform of a recipe changes. Raises
    InputError if the transform changes nothing.
    """
    if exchange.asks == "server":
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: exchange {transform.exchange!r} is with the server, but a recipe's "
            "transforms apply between parties. Use a setting of the method instead, or remove the "
            "transform.",
        )
    sent = exchange.up if transform.sent_by == "passive" else exchange.down
    if not sent.tensors:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: {transform.sent_by} parties send nothing in exchange "
            f"{transform.exchange!r}. Set the other sent_by, or remove the transform.",
        )
    if not _carries_float32([sent]):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: {transform.kind}: {transform.sent_by} parties send no float32 numbers in "
            f"exchange {transform.exchange!r}. Remove the transform.",
        )
    return sent


def check_wire(recipe: Recipe, opened: Mapping[tuple[str, str], Exchange]) -> None:
    """Raises InputError if a table of ``wire`` never applies. ``opened``: as in
    ``check_transforms``.
    """
    for number, table in enumerate(recipe.wire, 1):
        where = f"recipe: wire: table {number}"
        # A place in which every setting of a codec is allowed.
        place = codecs.Place(averaged=True, up=True)
        codecs.make(table.codec, where, table.settings, place)
        in_phase = {key: swap for key, swap in opened.items() if table.phase in (None, key[0])}
        if table.exchange is None:
            exchanges = [swap for swap in in_phase.values() if swap.asks == "active"]
        else:
            exchanges = [swap for (_, name), swap in in_phase.items() if name == table.exchange]
            if not exchanges:
                names = sorted({name for _, name in in_phase})
                similar = difflib.get_close_matches(table.exchange, names, n=1)
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{where}: unknown exchange {table.exchange!r}. Did you mean {similar[0]!r}?"
                    if similar
                    else f"{where}: unknown exchange {table.exchange!r}. Choose one of: "
                    f"{', '.join(names) or 'none'}.",
                )
        up = [swap.up for swap in exchanges] if table.direction != "down" else []
        sent = [*up, *([swap.down for swap in exchanges] if table.direction != "up" else [])]
        if not _carries_float32(sent):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: {table.exchange or 'every exchange'} carries no float32 numbers "
                f"(direction: {table.direction or 'both'}). Remove the table, or name another "
                "exchange.",
            )
        preceding = _find_preceding(recipe, table, opened)
        if preceding is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: this table never applies: {preceding} takes precedence everywhere it "
                "could apply (phase, then exchange, then direction). Remove one of them.",
            )


def _find_preceding(
    recipe: Recipe, table: WireSettings, opened: Mapping[tuple[str, str], Exchange]
) -> str | None:
    """Returns the table, or the phase's codec, that takes precedence everywhere over ``table``;
    None if ``table`` applies somewhere.
    """
    winners: list[WireSettings] = []
    for (phase, _), exchange in opened.items():
        for direction in get_args(Direction):
            if _matches(table, phase, exchange, direction) and _carries_float32(
                [getattr(exchange, direction)]
            ):
                applied = wire_table(recipe, phase, exchange, direction)
                if applied is table:
                    return None
                winners += [applied] if applied is not None else []
    number = next(
        (
            number
            for number, other in enumerate(recipe.wire, 1)
            if any(other is winner for winner in winners)
        ),
        None,
    )
    return f"table {number}" if number is not None else "the phase's codec"


def _carries_float32(sent: Iterable[Sent]) -> bool:
    return any(
        dtype is torch.float32 for direction in sent for dtype, _ in direction.tensors.values()
    )


def _check_fits(
    recipe: Recipe,
    uses: Sequence[Use],
    filters: Sequence[Filter],
    sent: Sent,
    parts: int,
    where: str,
) -> None:
    """Raises InputError if a transform does not support the recipe's task, or needs labels that the
    sender does not have.

    It also raises one if a transform's noise depends on whole batches, and each batch is sent in
    ``parts``.
    """
    for use, filter_ in zip(uses, filters, strict=True):
        transform = transforms.load(use.kind, where)
        tasks = transform.tasks
        if transform.of_batch and parts > 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: transform {use.kind} adds noise to whole batches, but micro_batches "
                f"sends each batch in {parts} parts. Set micro_batches = 1, or remove the "
                "transform.",
            )
        if tasks and recipe.task.kind not in tasks:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: transform {use.kind} requires task.kind {' or '.join(sorted(tasks))} "
                f"(got {recipe.task.kind}). Use iso or max_norm.",
            )
        if not filter_.knows <= sent.beside:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: transform {use.kind} needs the rows' labels, which this sender does not "
                "hold. Add it to the gradients of split training instead.",
            )


def _list_recipe_transforms(
    recipe: Recipe, phase: str, exchange: Exchange, direction: str
) -> list[Use]:
    """Returns the transforms that the recipe adds to the method's in this direction. The transforms
    of a prediction may be listed in any phase. Only float32 tensors pass them.
    """
    sender = "passive" if direction == "up" else "active"
    sent = exchange.up if direction == "up" else exchange.down
    if exchange.asks == "server" or (phase in PREDICTS and not _carries_float32([sent])):
        return []
    exchange_name = PREDICTION if phase in PREDICTS else exchange.name
    return [
        Use(transform.kind, transform.settings)
        for recipe_phase in recipe.phases
        for transform in recipe_phase.transforms
        if phase in PREDICTS | {recipe_phase.name}
        and transform.exchange == exchange_name
        and transform.sent_by == sender
    ]


def _make_policy_filter(
    policy: Policy, phase: str, exchange: Exchange, sent: Sent, where: str
) -> Filter:
    """Returns the policy's filter. Raises InputError if the policy refuses or fails."""
    try:
        policy_filter = policy(phase, exchange, sent)
    except VflError:
        raise
    except Exception as error:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: the party's policy failed {describe_failure(error)}. Correct it, or choose "
            "another in the party file.",
        ) from error
    if not isinstance(policy_filter, Filter):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: the party's policy must return a Filter (got "
            f"{type(policy_filter).__name__}). Correct it, or choose another in the party file.",
        )
    return policy_filter
