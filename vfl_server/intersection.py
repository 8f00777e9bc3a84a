"""The server's part in private alignment: it compares masked tags, and tells each owner which of
its rows are common: to all parties, or with ``rows.partial`` to the active party and others.

The tags of each party's rows are masked by the keys of all parties, in the order in which their
owner has shuffled them. So the server learns the sizes of the sets and of all overlaps, and no id.
See ``vfl_party.align.psi``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common import psi
from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey, TensorSpec
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_common.link import OLDEST, Hub
from vfl_common.psi import (
    MAX_ROWS,
    PHASE,
    TAG_BYTES,
    WORD_BYTES,
    min_common,
    tag_batches,
    too_few,
)
from vfl_server.tags import KeptTags

_DIGEST_BYTES = 32
_SIZES = BundleSpec(
    Kind.ROWS,
    {
        "sizes": TensorSpec(DType.INT64, (2,)),
        "attempt": TensorSpec(DType.UINT8, (WORD_BYTES,)),
    },
)
Masks = npt.NDArray[np.bool_]


def serve(
    hub: Hub,
    ring: Sequence[str],
    at_least: int | float,
    folder: Path,
    max_rows: int = MAX_ROWS,
    *,
    partial: bool = False,
) -> Callable[[], None]:
    """Serves the steps of an alignment: sizes, tags in batches, digests of the lists. Returns what
    answers the last one.

    ``ring``: the parties, the active one first; each sends the tags of the next one. ``folder``:
    for the tags; it is removed at the end, or if this raises PeerError. ``max_rows``: of a
    party. ``partial``: see ``told``.

    Raises PeerError: ROWS_DIFFER if fewer rows are common than ``at_least`` says, a count or a
    share of each party's rows, or if the parties then hold different lists; REFUSED if a party has
    more than ``max_rows``; MALFORMED_MESSAGE if a party sends what does not fit what another
    one has said. Raises InputError if the folder cannot be written or read.
    """
    # {who sends tags: whose they are}.
    owner = dict(zip(ring, (*ring[1:], *ring[:1]), strict=True))
    step = StepKey(PHASE, len(ring), 0)
    replies = hub.collect(step, _SIZES)
    sizes, word = _check_sizes(replies, owner, max_rows)
    tags = KeptTags(folder, word, {party: sizes[party] for party in ring})
    try:
        first, last = tags.first(), tag_batches(sizes.values())
        told_first = Buffer(DType.INT64, (1,), memoryview(np.array([first], "<i8").tobytes()))
        hub.reply(step, dict.fromkeys(replies, Bundle(Kind.ROWS, {"first": told_first})))
        for number in range(first, last):
            step = StepKey(PHASE, len(ring), 1 + number)
            for sender, bundle in hub.collect(step, _batch(number, owner, sizes)).items():
                tags.add(number, owner[sender], bundle.tensors["tags"].data)
            if number < last - 1:
                hub.reply(step, dict.fromkeys(replies, _bits(np.zeros((1, 0), bool))))
        common = _compare_tags(tags, sizes, owner, partial)
        for party, masks in common.items():
            common_rows = int(masks.any(axis=0).sum())
            if common_rows < min_common(at_least, sizes[party]):
                raise too_few(at_least, common_rows, partial=partial)
        hub.reply(step, {party: _bits(masks) for party, masks in common.items()})
        answer = _same_lists(hub, ring, step._replace(batch=1 + last), partial)
    except PeerError:
        tags.remove()
        raise
    tags.remove()
    return answer


def _check_sizes(
    replies: Mapping[str, Bundle], owner: Mapping[str, str], max_rows: int
) -> tuple[dict[str, int], bytes]:
    """Returns {party: its rows}, and what all call the attempt. Raises PeerError."""
    pairs = {
        party: np.frombuffer(reply.tensors["sizes"].data, "<i8") for party, reply in replies.items()
    }
    words = {party: bytes(reply.tensors["attempt"].data) for party, reply in replies.items()}
    sizes = {party: int(own) for party, (own, _) in pairs.items()}
    for party, rows in sizes.items():
        if rows <= 0:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} announces {rows} rows; it needs at least one",
                party=party,
            )
        if rows > max_rows:
            raise PeerError(
                Code.REFUSED,
                f"{party} announces {rows:,} rows, and the server compares at most "
                f"{max_rows:,} of a party (its option --rows-at-most)",
                party=party,
            )
    active = next(iter(owner))
    for party, (_, sends) in pairs.items():
        if int(sends) != sizes[owner[party]]:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} has {int(sends)} masked rows of {owner[party]}, which has "
                f"{sizes[owner[party]]}",
                party=party,
            )
        if words[party] != words[active]:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} is in another attempt at the alignment than {active}. Begin a new run.",
                party=party,
            )
    return sizes, words[active]


def _batch(
    number: int, owner: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[str, BundleSpec]:
    """Returns {party: the spec of a batch of tags that it sends}; of a small set it is empty."""
    specs = {}
    for party, whose in owner.items():
        rows = max(0, min(psi.TAG_BATCH, sizes[whose] - number * psi.TAG_BATCH))
        specs[party] = BundleSpec(Kind.ROWS, {"tags": TensorSpec(DType.UINT8, (rows * TAG_BYTES,))})
    return specs


def _compare_tags(
    stored: KeptTags, sizes: Mapping[str, int], owner: Mapping[str, str], partial: bool
) -> dict[str, Masks]:
    """Returns {party: what it is told of its rows}, see ``told``; compares one part of the tags
    after the other.
    """
    ring = list(owner)
    senders = {whose: party for party, whose in owner.items()}
    several = len(ring) - 1 if partial else 1
    common = {
        party: np.zeros((several if party == ring[0] else 1, sizes[party]), bool) for party in ring
    }
    for part in stored.parts():
        held = holders({party: tags for party, (tags, _) in part.items()}, senders)
        for party, masks in select_shares(held, ring, partial).items():
            common[party][:, part[party][1]] = masks
    return common


def _same_lists(hub: Hub, ring: Sequence[str], step: StepKey, partial: bool) -> Callable[[], None]:
    """Compares the digests of the parties' lists; returns what tells them that they are the same.
    Raises PeerError.
    """
    digests = {
        party: BundleSpec(
            Kind.ROWS,
            {
                "digest": TensorSpec(
                    DType.UINT8,
                    (_DIGEST_BYTES * (len(ring) - 1 if partial and party == ring[0] else 1),),
                )
            },
        )
        for party in ring
    }
    lists = {
        party: bytes(bundle.tensors["digest"].data)
        for party, bundle in hub.collect(step, digests).items()
    }
    mine = lists[ring[0]] if partial else lists[ring[0]] * (len(ring) - 1)
    if mine != b"".join(lists[party] for party in ring[1:]):
        raise PeerError(
            Code.ROWS_DIFFER,
            "the parties do not take the same rows from the alignment: one of them, or the "
            "server, errs or lies. Use the same version everywhere.",
        )
    return lambda: hub.reply(step, dict.fromkeys(lists, Bundle(Kind.ACK)))


# The folder of the tags, in the server's folder of a run.
FOLDER = "alignment"
# The oldest protocol with which an alignment can be served.
PROTOCOL = 8


def oldest_protocol(recipe: Recipe) -> int:
    """Returns the oldest protocol with which this server can serve the recipe."""
    return PROTOCOL if recipe.rows.align == "psi" and recipe.passives else OLDEST


def alignment_service(
    recipe: Recipe, run: Path, *, trains: bool, max_rows: int = MAX_ROWS
) -> Callable[[Hub], Callable[[], None]] | None:
    """Returns what serves the recipe's alignment; None if the parties align without the server.

    ``run``: the server's folder of the run. ``trains``: false for a prediction, which may be for a
    single row, whatever ``rows.at_least`` says; with ``rows.partial`` a party may know none of the
    rows. ``max_rows``: of a party.
    """
    if recipe.rows.align != "psi":
        return None
    ring = [recipe.active.name, *(party.name for party in recipe.passives)]
    at_least = recipe.rows.at_least if trains else int(not recipe.rows.partial)

    def serving(hub: Hub) -> Callable[[], None]:
        return serve(hub, ring, at_least, run / FOLDER, max_rows, partial=recipe.rows.partial)

    return serving


def forget(run: Path) -> None:
    """Removes the tags of an alignment that has no future. ``run``: the server's folder of it."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)


def select_shares(
    holders: Mapping[str, npt.NDArray[np.bool_]], ring: Sequence[str], partial: bool
) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns {party: what it is told of its own N rows, [masks, N]}.

    That is one mask, of the rows that all parties hold. With ``partial`` it is one of the rows that
    the active party holds, and for the active party one for each of the others. ``holders``: as the
    function of this name gives it.
    """
    if not partial:
        return {
            party: np.logical_and.reduce(masks, axis=0, keepdims=True)
            for party, masks in holders.items()
        }
    return {party: masks[1:] if party == ring[0] else masks[:1] for party, masks in holders.items()}


def holders(
    tags: Mapping[str, npt.NDArray[np.void]], senders: Mapping[str, str]
) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns {party: which parties have each of its N tags, [parties, N]}, in the order of
    ``tags``.

    ``senders``: {party: the sender of its tags}. Raises PeerError, naming the sender, if a party
    has a tag twice: a party that masks a set refuses a repeated point, so the owner has not sent
    one.
    """
    sizes = [len(party_tags) for party_tags in tags.values()]
    owner = np.repeat(np.arange(len(sizes), dtype=np.uint32), sizes)
    pairs = np.concatenate([*tags.values()])
    # Equal tags stand together, those of one party too.
    order = np.lexsort((owner, pairs["low"], pairs["high"]))
    pairs, owner = pairs[order], owner[order]
    same = pairs[1:] == pairs[:-1]
    twice = np.flatnonzero(same & (owner[1:] == owner[:-1]))
    if len(twice):
        party = list(tags)[owner[twice[0]]]
        sender = senders[party]
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{sender} sent a tag twice among those of {party}. Run the same version of this "
            "program at all parties.",
            party=sender,
        )
    # The number of each run of equal tags.
    run = np.cumsum(np.concatenate([[0], ~same]))
    has = np.zeros((len(sizes), int(run[-1]) + 1), bool)
    has[owner, run] = True
    run_of = np.empty(len(order), np.int64)
    run_of[order] = run
    parts = np.split(run_of, np.cumsum(sizes)[:-1])
    return {party: has[:, part] for party, part in zip(tags, parts, strict=True)}


def _bits(masks: npt.NDArray[np.bool_]) -> Bundle:
    bits = np.packbits(masks, axis=1).reshape(-1)
    return Bundle(
        Kind.ROWS, {"common": Buffer(DType.UINT8, bits.shape, memoryview(bits.tobytes()))}
    )
