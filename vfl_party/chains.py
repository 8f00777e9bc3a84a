"""Makes the chain of each exchange: transforms (the method's, then the recipe's) -> policy -> codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vfl_common.config.recipe import PhaseSettings, Recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_common.summary import ExchangeSummary
from vfl_party import codecs, transforms
from vfl_party.declared import Exchange, Role, Sent, Use
from vfl_party.exchange import Chain, Chains
from vfl_party.filter import Filter
from vfl_party.policies import Policy

PASSIVES = "passive parties"


def make_chains(recipe: Recipe, phase: str, exchange: Exchange, role: Role, policy: Policy) -> Chains:
    """Makes both directions of an exchange, as the party of ``role`` has them.

    A party applies its own direction's chain and undoes the other's, so it makes both. Its policy is only in its own.
    Raises InputError if the recipe names an unknown transform or codec, or if the policy refuses.
    """
    settings = next((each for each in recipe.phases if each.name == phase), None)
    sends = {
        "up": role == "passive" or exchange.asks == "server",
        "down": role == "active" and exchange.asks == "active",
    }

    def chain(direction: str, sent: Sent) -> Chain:
        where = f"recipe: phases: {phase}: exchange {exchange.name}"
        if not sent.tensors:
            return Chain([])
        uses = [*sent.through, *_asked(settings, exchange, direction)]
        mine = [use for use in uses if use.role in (None, role) or not sends[direction]]
        filters: list[Filter] = [use.make(where) for use in mine]
        _check_fits(recipe, mine, filters, sent, where)
        if sends[direction]:
            filters.append(_allowed(policy, phase, exchange, sent, where))
        if settings is not None and exchange.asks == "active":
            filters.append(codecs.make(settings.codec, where))
        return Chain(filters)

    return Chains(chain("up", exchange.up), chain("down", exchange.down))


def summarised(recipe: Recipe, phase: str, exchange: Exchange, chains: Chains) -> list[ExchangeSummary]:
    """Describes both directions of an exchange in words; a direction without tensors is left out."""
    of_server = exchange.asks == "server"
    asks = "every party" if of_server and not exchange.passive else PASSIVES
    answers = recipe.server if of_server else recipe.active.name
    return [
        ExchangeSummary(
            phase=phase,
            exchange=exchange.name,
            sender=sender,
            receiver=receiver,
            sent=str(sent),
            chain=str(chain),
            when=exchange.when,
        )
        for sender, receiver, sent, chain in (
            (asks, answers, exchange.up, chains.up),
            (answers, asks, exchange.down, chains.down),
        )
        if sent.tensors
    ]


def check_asked(recipe: Recipe, opened: Mapping[tuple[str, str], Exchange]) -> None:
    """Raises InputError if a transform or codec of the recipe would do nothing: whoever asks for noise must get it.

    ``opened``: {(phase, exchange's name): the exchange}, as the phases have opened them.
    """
    for phase in recipe.phases:
        codecs.make(phase.codec, f"recipe: phases: {phase.name}")
        between = [each for (of, _), each in opened.items() if of == phase.name and each.asks == "active"]
        if phase.codec != "identity" and not between:
            text = f"recipe: phases: {phase.name}: codec: the phase exchanges nothing between parties"
            raise InputError(Code.CONFIG_INVALID, f"{text}; remove it")
        names = [exchange for of, exchange in opened if of == phase.name]
        for each in phase.transforms:
            where = f"recipe: phases: {phase.name}: transforms"
            exchange = opened.get((phase.name, each.exchange))
            if exchange is None:
                text = f"there is no exchange {each.exchange!r} in this phase (it has {', '.join(names) or 'none'})"
                raise InputError(Code.CONFIG_INVALID, f"{where}: {text}")
            if exchange.asks == "server":
                text = f"exchange {each.exchange!r} is with the server, and a recipe's transforms are between parties"
                raise InputError(Code.CONFIG_INVALID, f"{where}: {text}; take a setting of the method, or remove it")
            if not (exchange.up if each.sent_by == "passive" else exchange.down).tensors:
                text = f"in exchange {each.exchange!r} {each.sent_by} parties send nothing"
                raise InputError(Code.CONFIG_INVALID, f"{where}: {text}; give the other sent_by, or remove it")


def _check_fits(recipe: Recipe, uses: Sequence[Use], filters: Sequence[Filter], sent: Sent, where: str) -> None:
    """Raises InputError if a transform is not for the recipe's task, or must know what this direction does not tell."""
    for use, each in zip(uses, filters, strict=True):
        tasks = transforms.load(use.kind, where).tasks
        if tasks and recipe.task.kind not in tasks:
            text = f"transform {use.kind} is for a task of kind {' or '.join(sorted(tasks))}"
            raise InputError(Code.CONFIG_INVALID, f"{where}: {text}, not {recipe.task.kind}; take iso or max_norm")
        if not each.knows <= sent.beside:
            text = f"transform {use.kind} must know the rows' labels, and who sends this knows none"
            raise InputError(Code.CONFIG_INVALID, f"{where}: {text}; add it to the gradients of split training")


def _asked(settings: PhaseSettings | None, exchange: Exchange, direction: str) -> list[Use]:
    """Returns the transforms that the recipe adds to the method's in this direction."""
    if settings is None or exchange.asks == "server":
        return []
    sender = "passive" if direction == "up" else "active"
    return [
        Use(each.kind, each.settings)
        for each in settings.transforms
        if each.exchange == exchange.name and each.sent_by == sender
    ]


def _allowed(policy: Policy, phase: str, exchange: Exchange, sent: Sent, where: str) -> Filter:
    """Returns the policy's filter. Raises InputError if the policy refuses, or is faulty."""
    try:
        made = policy(phase, exchange, sent)
    except VflError:
        raise
    except Exception as error:
        text = f"{where}: the party's policy fails ({type(error).__name__}: {error})"
        raise InputError(Code.CONFIG_INVALID, f"{text}; correct it, or choose another in the party file") from error
    if not isinstance(made, Filter):
        text = f"{where}: the party's policy gives a {type(made).__name__}, and a Filter is wanted"
        raise InputError(Code.CONFIG_INVALID, f"{text}; correct it, or choose another in the party file")
    return made
