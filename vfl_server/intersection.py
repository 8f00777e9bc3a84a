"""The server's part in private alignment: it compares masked tags, and tells each owner which of
its rows are common: to all parties, or with ``rows.partial`` to the active party and others.

The tags of each party's rows are masked by the keys of all parties, in the order in which their
owner has shuffled them. So the server learns the sizes of the sets and of all overlaps, and no id.
See ``vfl_party.align.psi``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey, TensorSpec
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_common.link import OLDEST, Hub
from vfl_common.psi import MOST_ROWS, PHASE, TAG_BYTES, least_common, too_few

# Two numbers are sorted faster than twelve bytes.
_TAG = np.dtype([("high", "<u8"), ("low", "<u4")])
_DIGEST_BYTES = 32
_SIZES = BundleSpec(Kind.ROWS, {"sizes": TensorSpec(DType.INT64, (2,))})


def serve(
    hub: Hub,
    ring: Sequence[str],
    at_least: int | float,
    rows_at_most: int = MOST_ROWS,
    *,
    partial: bool = False,
) -> Callable[[], None]:
    """Serves the three steps of an alignment: sizes, tags, digests of the lists. Returns what
    answers the last one.

    ``ring``: the parties, the active one first; each sends the tags of the next one.
    ``rows_at_most``: of a party. ``partial``: see ``told``.

    Raises PeerError: ROWS_DIFFER if fewer rows are common than ``at_least`` says, a count or a
    share of each party's rows, or if the parties then hold different lists; REFUSED if a party has
    more than ``rows_at_most``; MALFORMED_MESSAGE if a party sends what does not fit what another
    one has said.
    """
    sizes_step, tags_step, lists_step = (StepKey(PHASE, len(ring), number) for number in range(3))
    said = {
        party: np.frombuffer(bundle.tensors["sizes"].data, "<i8")
        for party, bundle in hub.collect(sizes_step, _SIZES).items()
    }
    # {who sends tags: whose they are}.
    owner = dict(zip(ring, (*ring[1:], *ring[:1]), strict=True))
    sizes = {party: int(own) for party, (own, _) in said.items()}
    for party, rows in sizes.items():
        if not 0 < rows <= MOST_ROWS:
            text = f"{party} says that it has {rows} rows; 1 to {MOST_ROWS} can be aligned"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=party)
        if rows > rows_at_most:
            text = (
                f"{party} announces {rows:,} rows, and the server compares at most "
                f"{rows_at_most:,} of a party"
            )
            raise PeerError(Code.REFUSED, f"{text} (its option --rows-at-most)", party=party)
    for party, (_, sends) in said.items():
        if int(sends) != sizes[owner[party]]:
            text = (
                f"{party} has {int(sends)} masked rows of {owner[party]}, which has "
                f"{sizes[owner[party]]}"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=party)
    hub.reply(sizes_step, dict.fromkeys(said, Bundle(Kind.ACK)))
    specs = {
        party: BundleSpec(
            Kind.ROWS, {"tags": TensorSpec(DType.UINT8, (sizes[owner[party]] * TAG_BYTES,))}
        )
        for party in said
    }
    tags = {
        owner[party]: bundle.tensors["tags"].data
        for party, bundle in hub.collect(tags_step, specs).items()
    }
    senders = {whose: party for party, whose in owner.items()}
    common = told(holders({party: tags[party] for party in ring}, senders), ring, partial)
    for party, masks in common.items():
        found = int(masks.any(axis=0).sum())
        if found < least_common(at_least, sizes[party]):
            raise too_few(at_least, found, partial=partial)
    hub.reply(tags_step, {party: _bits(masks) for party, masks in common.items()})
    digests = {
        party: BundleSpec(
            Kind.ROWS, {"digest": TensorSpec(DType.UINT8, (_DIGEST_BYTES * len(masks),))}
        )
        for party, masks in common.items()
    }
    lists = {
        party: bytes(bundle.tensors["digest"].data)
        for party, bundle in hub.collect(lists_step, digests).items()
    }
    mine = lists[ring[0]] if partial else lists[ring[0]] * (len(ring) - 1)
    if mine != b"".join(lists[party] for party in ring[1:]):
        text = (
            "the parties do not take the same rows from the alignment: one of them, or the "
            "server, errs or lies"
        )
        raise PeerError(Code.ROWS_DIFFER, f"{text}; use the same version everywhere")
    return lambda: hub.reply(lists_step, dict.fromkeys(lists, Bundle(Kind.ACK)))


# The oldest with which an alignment can be served.
PROTOCOL = 8


def oldest_protocol(recipe: Recipe) -> int:
    """Returns the oldest protocol with which this server can serve the recipe."""
    return PROTOCOL if recipe.rows.align == "psi" and recipe.passives else OLDEST


def alignment_service(
    recipe: Recipe, *, trains: bool, rows_at_most: int = MOST_ROWS
) -> Callable[[Hub], Callable[[], None]] | None:
    """Returns what serves the recipe's alignment; None if the parties align without the server.

    ``trains``: false for a prediction, which may be for a single row, whatever ``rows.at_least``
    says; with ``rows.partial`` a party may know none of the rows. ``rows_at_most``: of a party; the
    server needs about 50 bytes for each.
    """
    if recipe.rows.align != "psi":
        return None
    ring = [recipe.active.name, *(party.name for party in recipe.passives)]
    at_least = recipe.rows.at_least if trains else int(not recipe.rows.partial)

    def serving(hub: Hub) -> Callable[[], None]:
        return serve(hub, ring, at_least, rows_at_most, partial=recipe.rows.partial)

    return serving


def told(
    holders: Mapping[str, npt.NDArray[np.bool_]], ring: Sequence[str], partial: bool
) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns {party: what it is told of its own N rows, [masks, N]}.

    That is one mask, of the rows that all parties hold. With ``partial`` it is one of the rows that
    the active party holds, and for the active party one for each of the others. ``holders``: as the
    function of this name gives it.
    """
    if not partial:
        return {
            party: np.logical_and.reduce(found, axis=0, keepdims=True)
            for party, found in holders.items()
        }
    return {party: found[1:] if party == ring[0] else found[:1] for party, found in holders.items()}


def holders(
    tags: Mapping[str, memoryview], senders: Mapping[str, str]
) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns {party: which parties have each of its N tags, [parties, N]}, in the order of
    ``tags``.

    ``senders``: {party: who has sent its tags}. Raises PeerError, naming the sender, if a party has
    a tag twice: who masks a set refuses a point that is there twice, so the owner has not sent it
    so.
    """
    sizes = [each.nbytes // TAG_BYTES for each in tags.values()]
    owner = np.repeat(np.arange(len(sizes), dtype=np.uint32), sizes)
    found = np.frombuffer(b"".join(tags.values()), _TAG)
    # Equal tags stand together, those of one party too.
    order = np.lexsort((owner, found["low"], found["high"]))
    found, owner = found[order], owner[order]
    same = found[1:] == found[:-1]
    twice = np.flatnonzero(same & (owner[1:] == owner[:-1]))
    if len(twice):
        party = list(tags)[owner[twice[0]]]
        sender = senders[party]
        text = (
            f"{sender} sent a tag twice among those of {party}; run the same version of this "
            "program at all parties"
        )
        raise PeerError(Code.MALFORMED_MESSAGE, text, party=sender)
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
