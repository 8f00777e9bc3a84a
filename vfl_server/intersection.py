"""The server's part in private alignment: it compares masked tags, and tells each owner which of
its rows are common.

The tags of each party's rows are masked by the keys of all parties, in the order in which their
owner has shuffled them. So the server learns the sizes of the sets and of all overlaps, and no id.
See ``vfl_party.align.psi``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, Kind, StepKey, TensorSpec
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_common.link import OLDEST, Hub
from vfl_common.psi import MOST_ROWS, PHASE, TAG_BYTES, least_common, too_few

# Two numbers are sorted faster than twelve bytes.
_TAG = np.dtype([("high", "<u8"), ("low", "<u4")])
_DIGEST = BundleSpec(Kind.ROWS, {"digest": TensorSpec(DType.UINT8, (32,))})
_SIZES = BundleSpec(Kind.ROWS, {"sizes": TensorSpec(DType.INT64, (2,))})


def serve(
    hub: Hub, ring: Sequence[str], at_least: int | float, rows_at_most: int = MOST_ROWS
) -> Callable[[], None]:
    """Serves the three steps of an alignment: sizes, tags, digests of the lists. Returns what
    answers the last one.

    ``ring``: the parties; each sends the tags of the next one. ``rows_at_most``: of a party.

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
    common = in_common(tags, {whose: party for party, whose in owner.items()})
    found = int(next(iter(common.values())).sum())
    if found < max(least_common(at_least, own) for own in sizes.values()):
        raise too_few(at_least, found)
    hub.reply(tags_step, {party: _bits(mask) for party, mask in common.items()})
    lists = hub.collect(lists_step, _DIGEST)
    digests = {party: bytes(bundle.tensors["digest"].data) for party, bundle in lists.items()}
    if len(set(digests.values())) > 1:
        text = (
            "the parties do not take the same rows from the alignment: one of them, or the "
            "server, errs or lies"
        )
        raise PeerError(Code.ROWS_DIFFER, f"{text}; use the same version everywhere")
    return partial(hub.reply, lists_step, dict.fromkeys(digests, Bundle(Kind.ACK)))


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
    says. ``rows_at_most``: of a party; the server needs about 50 bytes for each.
    """
    if recipe.rows.align != "psi":
        return None
    ring = [recipe.active.name, *(party.name for party in recipe.passives)]
    return partial(
        serve, ring=ring, at_least=recipe.rows.at_least if trains else 1, rows_at_most=rows_at_most
    )


def in_common(
    tags: Mapping[str, memoryview], senders: Mapping[str, str]
) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns {party: for each of its tags, whether all parties have it}.

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
    # Of each run of equal tags.
    first = np.flatnonzero(np.concatenate([[True], ~same]))
    length = np.diff(first, append=len(order))
    common = np.empty(len(order), bool)
    common[order] = np.repeat(length == len(sizes), length)
    return dict(zip(tags, np.split(common, np.cumsum(sizes)[:-1]), strict=True))


def _bits(mask: npt.NDArray[np.bool_]) -> Bundle:
    bits = np.packbits(mask)
    return Bundle(
        Kind.ROWS, {"common": Buffer(DType.UINT8, bits.shape, memoryview(bits.tobytes()))}
    )
