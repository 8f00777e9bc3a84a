"""The server's part in private alignment. The server compares masked tags and reports to each party
which of its rows are common to all parties. With ``rows.partial``, it reports which rows the active
party and at least one passive party have.

The tags of each party's rows are masked by the keys of all parties and are in an order that the
party has shuffled. So the server learns the sizes of the sets and of all overlaps, but no id. See
``vfl_party.align.psi``.
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
    compute_min_common,
    count_tag_batches,
    make_too_few_error,
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
    """Serves the steps of an alignment: the sizes, the batches of tags, and the digests of the
    lists. Returns a function that answers the last step.

    ``ring``: The parties, the active party first. Each party sends the tags of the next party in
    the ring. ``folder``: The folder for the tags, which is removed at the end or after a PeerError.
    ``max_rows``: The maximum number of rows of a party. ``partial``: See ``select_shares``.

    Raises PeerError (ROWS_DIFFER) if fewer rows are common than ``at_least``, which is a count or a
    share of each party's rows, or if the parties then have different lists. Raises PeerError
    (REFUSED) if a party has more than ``max_rows`` rows. Raises PeerError (MALFORMED_MESSAGE) if
    the messages of two parties contradict each other. Raises InputError if the folder cannot be
    written or read.
    """
    # {party that sends tags: party to which the tags belong}.
    owner = dict(zip(ring, (*ring[1:], *ring[:1]), strict=True))
    step = StepKey(PHASE, len(ring), 0)
    replies = hub.collect(step, _SIZES)
    sizes, word = _check_sizes(replies, owner, max_rows)
    tags = KeptTags(folder, word, {party: sizes[party] for party in ring})
    try:
        first_batch, num_batches = tags.find_first_batch(), count_tag_batches(sizes.values())
        first_buffer = Buffer(
            DType.INT64, (1,), memoryview(np.array([first_batch], "<i8").tobytes())
        )
        hub.reply(step, dict.fromkeys(replies, Bundle(Kind.ROWS, {"first": first_buffer})))
        for number in range(first_batch, num_batches):
            step = StepKey(PHASE, len(ring), 1 + number)
            for sender, bundle in hub.collect(
                step, _make_batch_specs(number, owner, sizes)
            ).items():
                tags.add(number, owner[sender], bundle.tensors["tags"].data)
            if number < num_batches - 1:
                hub.reply(step, dict.fromkeys(replies, _pack_masks(np.zeros((1, 0), bool))))
        common = _compare_tags(tags, sizes, owner, partial)
        for party, masks in common.items():
            common_rows = int(masks.any(axis=0).sum())
            if common_rows < compute_min_common(at_least, sizes[party]):
                raise make_too_few_error(at_least, common_rows, partial=partial)
        hub.reply(step, {party: _pack_masks(masks) for party, masks in common.items()})
        answer = _compare_lists(hub, ring, step._replace(batch=1 + num_batches), partial)
    except PeerError:
        tags.remove()
        raise
    tags.remove()
    return answer


def _check_sizes(
    replies: Mapping[str, Bundle], owner: Mapping[str, str], max_rows: int
) -> tuple[dict[str, int], bytes]:
    """Returns {party: its number of rows} and the identifier of the alignment attempt. Raises
    PeerError if the parties' announcements contradict each other.
    """
    announcements = {
        party: np.frombuffer(reply.tensors["sizes"].data, "<i8") for party, reply in replies.items()
    }
    words = {party: bytes(reply.tensors["attempt"].data) for party, reply in replies.items()}
    sizes = {party: int(own_size) for party, (own_size, _) in announcements.items()}
    for party, rows in sizes.items():
        if rows <= 0:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} announces {rows} rows, but an alignment needs at least one",
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
    for party, (_, masked_rows) in announcements.items():
        if int(masked_rows) != sizes[owner[party]]:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} has {int(masked_rows)} masked rows of {owner[party]}, which has "
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


def _make_batch_specs(
    number: int, owner: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[str, BundleSpec]:
    """Returns {party: the spec of the tags that it sends in batch ``number``}. The batch is empty
    once all tags of a set have been sent.
    """
    specs = {}
    for party, tag_owner in owner.items():
        rows = max(0, min(psi.TAG_BATCH, sizes[tag_owner] - number * psi.TAG_BATCH))
        specs[party] = BundleSpec(Kind.ROWS, {"tags": TensorSpec(DType.UINT8, (rows * TAG_BYTES,))})
    return specs


def _compare_tags(
    stored: KeptTags, sizes: Mapping[str, int], owner: Mapping[str, str], partial: bool
) -> dict[str, Masks]:
    """Returns {party: the masks of its common rows}; see ``select_shares``. Compares the tags part
    by part.
    """
    ring = list(owner)
    senders = {tag_owner: party for party, tag_owner in owner.items()}
    num_masks = len(ring) - 1 if partial else 1
    common = {
        party: np.zeros((num_masks if party == ring[0] else 1, sizes[party]), bool)
        for party in ring
    }
    for part in stored.parts():
        holders_by_party = find_holders({party: tags for party, (tags, _) in part.items()}, senders)
        for party, masks in select_shares(holders_by_party, ring, partial).items():
            common[party][:, part[party][1]] = masks
    return common


def _compare_lists(
    hub: Hub, ring: Sequence[str], step: StepKey, partial: bool
) -> Callable[[], None]:
    """Compares the digests of the parties' lists. Returns a function that reports to the parties
    that the lists are the same. Raises PeerError if they differ.
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
    active_lists = lists[ring[0]] if partial else lists[ring[0]] * (len(ring) - 1)
    if active_lists != b"".join(lists[party] for party in ring[1:]):
        raise PeerError(
            Code.ROWS_DIFFER,
            "the parties do not take the same rows from the alignment, so one of them or the "
            "server is faulty or lies. Use the same version everywhere.",
        )
    return lambda: hub.reply(step, dict.fromkeys(lists, Bundle(Kind.ACK)))


# The name of the folder for the tags, in the server's folder for a run.
FOLDER = "alignment"
# The oldest protocol version with which the server can serve an alignment.
PROTOCOL = 8


def oldest_protocol(recipe: Recipe) -> int:
    """Returns the oldest protocol version with which this server can serve the recipe."""
    return PROTOCOL if recipe.rows.align == "psi" and recipe.passives else OLDEST


def alignment_service(
    recipe: Recipe, run: Path, *, trains: bool, max_rows: int = MAX_ROWS
) -> Callable[[Hub], Callable[[], None]] | None:
    """Returns a function that serves the recipe's alignment over a hub; None if the parties align
    without the server.

    ``run``: The server's folder for the run. ``trains``: False for a prediction, to which
    ``rows.at_least`` does not apply because it may have a single row. In a prediction with
    ``rows.partial``, a party may have none of the rows. ``max_rows``: The maximum number of rows of
    a party.
    """
    if recipe.rows.align != "psi":
        return None
    ring = [recipe.active.name, *(party.name for party in recipe.passives)]
    at_least = recipe.rows.at_least if trains else int(not recipe.rows.partial)

    def serve_alignment(hub: Hub) -> Callable[[], None]:
        return serve(hub, ring, at_least, run / FOLDER, max_rows, partial=recipe.rows.partial)

    return serve_alignment


def remove_tags(run: Path) -> None:
    """Removes the stored tags of an alignment that will not be resumed. ``run``: The server's
    folder for the run.
    """
    shutil.rmtree(run / FOLDER, ignore_errors=True)


def select_shares(
    holders_by_party: Mapping[str, npt.NDArray[np.bool_]], ring: Sequence[str], partial: bool
) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns {party: bool [masks, N], the masks of its own N rows that the party may know}.

    Each party gets one mask: the rows that all parties have. With ``partial``, a passive party gets
    one mask: the rows that the active party has. With ``partial``, the active party gets one mask
    for each passive party: the rows that this passive party has. ``holders_by_party``: The result
    of ``find_holders``.
    """
    if not partial:
        return {
            party: np.logical_and.reduce(masks, axis=0, keepdims=True)
            for party, masks in holders_by_party.items()
        }
    return {
        party: masks[1:] if party == ring[0] else masks[:1]
        for party, masks in holders_by_party.items()
    }


def find_holders(
    tags: Mapping[str, npt.NDArray[np.void]], senders: Mapping[str, str]
) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns {party: bool [parties, N], which parties have each of its N tags}. The parties are in
    the order of ``tags``.

    ``senders``: {party: the sender of its tags}. Raises PeerError, which names the sender, if a
    party has a tag twice. The sender is at fault, because a party that masks a set refuses a
    repeated point.
    """
    sizes = [len(party_tags) for party_tags in tags.values()]
    owner = np.repeat(np.arange(len(sizes), dtype=np.uint32), sizes)
    all_tags = np.concatenate([*tags.values()])
    # Sorting puts equal tags next to each other, also equal tags of one party.
    order = np.lexsort((owner, all_tags["low"], all_tags["high"]))
    all_tags, owner = all_tags[order], owner[order]
    is_same = all_tags[1:] == all_tags[:-1]
    repeats = np.flatnonzero(is_same & (owner[1:] == owner[:-1]))
    if len(repeats):
        party = list(tags)[owner[repeats[0]]]
        sender = senders[party]
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{sender} sent a tag twice among the tags of {party}. Run the same version of this "
            "program at all parties.",
            party=sender,
        )
    # For each sorted tag, the number of its group of equal tags.
    group = np.cumsum(np.concatenate([[0], ~is_same]))
    has_tag = np.zeros((len(sizes), int(group[-1]) + 1), bool)
    has_tag[owner, group] = True
    group_of_tag = np.empty(len(order), np.int64)
    group_of_tag[order] = group
    groups_by_party = np.split(group_of_tag, np.cumsum(sizes)[:-1])
    return {party: has_tag[:, part] for party, part in zip(tags, groups_by_party, strict=True)}


def _pack_masks(masks: npt.NDArray[np.bool_]) -> Bundle:
    bits = np.packbits(masks, axis=1).reshape(-1)
    return Bundle(
        Kind.ROWS, {"common": Buffer(DType.UINT8, bits.shape, memoryview(bits.tobytes()))}
    )
