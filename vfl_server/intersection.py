"""The server's part in private alignment. The server compares masked tags and reports to each party
which of its rows are common to all parties. With ``rows.partial``, it reports which rows the active
party and at least one passive party have.

The tags of each party's rows are masked by the keys of all parties and are in an order that the
party has shuffled. So the server learns the sizes of the sets and of all overlaps, but no id. See
``vfl_party.align.psi``.

The tags are stored on the server's disk, first as the parties send them, then in parts that fit
into memory. A part contains the tags of all parties that begin with the same bits, so equal tags
are in the same part. Tags are masked points, which are spread evenly, so the parts have similar
sizes. An earlier process may have stored some batches of the same attempt. Then the parties send
only the other batches.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common import psi
from vfl_common.bundle import (
    OLDEST,
    Buffer,
    Bundle,
    BundleSpec,
    DType,
    Hub,
    Kind,
    StepKey,
    TensorSpec,
)
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import private_file, write_error
from vfl_common.psi import (
    MAX_ROWS,
    NO_TAGS,
    PHASE,
    TAG_BYTES,
    WORD_BYTES,
    compute_min_common,
    count_tag_batches,
    make_too_few_error,
)
from vfl_common.psi.spill import Spill
from vfl_server.linkage import serve_linkage

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
    number: int = 0,
) -> Callable[[], None]:
    """Serves the steps of a pass of an alignment: the sizes, the batches of tags, and the digests
    of the lists. Two parties that use rr22, and parties that know the common rows, send no tags,
    and check ``at_least`` themselves. Returns a function that answers the last step.

    ``ring``: The parties, the active party first. Each party sends the tags of the next party in
    the ring. ``folder``: The folder for the tags, which is removed at the end or after a PeerError.
    ``max_rows``: The maximum number of rows of a party. ``partial``: See ``select_shares``.
    ``number``: The number of the pass; see ``vfl_party.data.passes``.

    Raises PeerError (ROWS_DIFFER) if fewer rows are common than ``at_least``, which is a count or a
    share of each party's rows, or if the parties then have different lists. Raises PeerError
    (REFUSED) if a party has more than ``max_rows`` rows. Raises PeerError (MALFORMED_MESSAGE) if
    the messages of two parties contradict each other. Raises InputError if the folder cannot be
    written or read.
    """
    # {party that sends tags: party to which the tags belong}.
    owner = dict(zip(ring, (*ring[1:], *ring[:1]), strict=True))
    server_round = psi.first_round(number, len(ring)) + len(ring)
    step = StepKey(PHASE, server_round, 0)
    replies = hub.collect(step, _SIZES)
    sizes, word, has_tags = _check_sizes(replies, owner, max_rows)
    if not has_tags:
        first = Buffer(DType.INT64, (1,), memoryview(bytes(8)))
        hub.reply(step, dict.fromkeys(replies, Bundle(Kind.ROWS, {"first": first})))
        return _compare_lists(hub, ring, step._replace(batch=1), partial)
    tags = KeptTags(folder, word, {party: sizes[party] for party in ring})
    try:
        first_batch, num_batches = tags.find_first_batch(), count_tag_batches(sizes.values())
        first_buffer = Buffer(
            DType.INT64, (1,), memoryview(np.array([first_batch], "<i8").tobytes())
        )
        hub.reply(step, dict.fromkeys(replies, Bundle(Kind.ROWS, {"first": first_buffer})))
        for batch in range(first_batch, num_batches):
            step = StepKey(PHASE, server_round, 1 + batch)
            for sender, bundle in hub.collect(step, _make_batch_specs(batch, owner, sizes)).items():
                tags.add(batch, owner[sender], bundle.tensors["tags"].data)
            if batch < num_batches - 1:
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
) -> tuple[dict[str, int], bytes, bool]:
    """Returns {party: its number of rows}, the identifier of the alignment attempt, and whether the
    parties send tags. Two parties that use rr22 send none. Raises PeerError if the parties'
    announcements contradict each other.
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
    has_tags = any(int(masked) != NO_TAGS for _, masked in announcements.values())
    for party, (_, masked_rows) in announcements.items():
        if has_tags and int(masked_rows) != sizes[owner[party]]:
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
    return sizes, words[active], has_tags


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
    if recipe.rows.align == "fuzzy":
        return functools.partial(serve_linkage, recipe, max_rows)
    if recipe.rows.align != "psi":
        return None
    ring = [recipe.active.name, *(party.name for party in recipe.passives)]
    partial, passes = recipe.rows.partial, max(1, len(recipe.rows.keys))
    min_rows = recipe.rows.at_least if trains else int(not partial)
    if recipe.rows.keys:
        # One pass may find few rows. The parties count the rows of all passes.
        min_rows = 0

    def serve_alignment(hub: Hub) -> Callable[[], None]:
        folder, last = run / FOLDER, passes - 1
        for number in range(last):
            serve(hub, ring, min_rows, folder, max_rows, number=number)()
        return serve(hub, ring, min_rows, folder, max_rows, partial=partial, number=last)

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


# A tag has twelve bytes. Two numbers are sorted faster than twelve bytes.
TAG = np.dtype([("high", "<u8"), ("low", "<u4")])
_PLACED = np.dtype([("tag", TAG), ("row", "<u8")])
# The number of tags in one part, and the maximum number of parts: a part is chosen by a tag's first
# byte.
_PART_TAGS, _MAX_PARTS = 1 << 20, 256
_STATE = "state.json"
# One part of the tags: {party: (its tags, the rows of these tags)}.
Part = Mapping[str, tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]]


class KeptTags:
    """Stores the parties' tags as files in a folder.

    Args:
        folder: The folder for the files, which need not exist.
        word: The identifier of the alignment attempt, which all parties share.
        sizes: {party: its number of rows}.

    Raises InputError if the folder cannot be written.
    """

    def __init__(self, folder: Path, word: bytes, sizes: Mapping[str, int]) -> None:
        self._folder, self._sizes = folder, sizes
        remedy = f"Remove {folder}, and start the server again; the parties send their tags again."
        self._remedy = remedy
        self._spills = {
            party: Spill(folder / f"{number}.tags", TAG_BYTES, psi.TAG_BATCH, remedy)
            for number, party in enumerate(sizes)
        }
        facts = {"attempt": word.hex(), "sizes": list(sizes.values())}
        if self._read_state() != facts:
            self.remove()
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise write_error(folder, error) from None
            with private_file(folder / _STATE) as file:
                file.write(json.dumps(facts).encode())

    def _read_state(self) -> object:
        try:
            return json.loads((self._folder / _STATE).read_text())
        except (OSError, ValueError, RecursionError):
            return None

    def find_first_batch(self) -> int:
        """Returns the number of the first batch that some party has to send. The last batch is
        always sent, because its answer contains the common rows.
        """
        batches = [count_tag_batches(self._sizes.values()) - 1]
        for party, spill in self._spills.items():
            if (stored := spill.count_rows()) < self._sizes[party]:
                batches.append(stored // psi.TAG_BATCH)
        return min(batches)

    def add(self, number: int, party: str, tags: memoryview) -> None:
        """Stores a batch of a party's tags. Raises InputError if the disk is full."""
        if tags:
            self._spills[party].write(number, tags)

    def parts(self) -> Iterator[Part]:
        """Yields all tags, part by part. Raises InputError if the disk is full, or a file is
        damaged.
        """
        total = sum(self._sizes.values())
        bits = min(-(-total // _PART_TAGS) - 1, _MAX_PARTS - 1).bit_length()
        try:
            with tempfile.TemporaryDirectory(dir=self._folder) as place:
                parts = [_PartFile(Path(place) / str(part)) for part in range(1 << bits)]
                for party in self._sizes:
                    for tags in self._read_placed(party):
                        _distribute(party, tags, parts, bits)
                for part in parts:
                    yield part.read(self._sizes, self._remedy)
        except OSError as error:
            raise write_error(self._folder, error) from None

    def _read_placed(self, party: str) -> Iterator[npt.NDArray[np.void]]:
        """Yields a party's tags with their rows, batch by batch."""
        size = self._sizes[party]
        for number, start in enumerate(range(0, size, psi.TAG_BATCH)):
            tags = np.frombuffer(self._spills[party].read(number, size), TAG)
            placed = np.empty(len(tags), _PLACED)
            placed["tag"], placed["row"] = tags, np.arange(start, start + len(tags))
            yield placed

    def remove(self) -> None:
        """Removes all stored tags."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class _PartFile:
    """The file with the tags of one part, party by party. ``counts``: {party: the number of its
    tags}.
    """

    path: Path
    counts: dict[str, int] = field(default_factory=dict)
    checksum: int = 0

    def add(self, party: str, tags: npt.NDArray[np.void]) -> None:
        data = tags.tobytes()
        # The temporary folder has mode 0700, so the file needs no mode.
        with self.path.open("ab", buffering=0) as file:
            unwritten = memoryview(data)
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
        self.counts[party] = self.counts.get(party, 0) + len(tags)
        self.checksum = zlib.crc32(data, self.checksum)

    def read(self, parties: Mapping[str, int], remedy: str) -> Part:
        """Returns the tags that were added, and removes the file. Raises InputError if the file is
        damaged.
        """
        data = self.path.read_bytes() if self.counts else b""
        if zlib.crc32(data) != self.checksum:
            raise InputError(Code.FILE_INVALID, f"{self.path}: the file is damaged. {remedy}")
        self.path.unlink(missing_ok=True)
        counts = [self.counts.get(party, 0) for party in parties]
        arrays = np.split(np.frombuffer(data, _PLACED), np.cumsum(counts)[:-1])
        return {
            party: (array["tag"], array["row"].astype(np.int64))
            for party, array in zip(parties, arrays, strict=True)
        }


def _distribute(party: str, tags: npt.NDArray[np.void], parts: list[_PartFile], bits: int) -> None:
    """Adds each tag to the part whose number is the tag's first ``bits`` bits."""
    first_bytes = tags["tag"].copy().view(np.uint8).reshape(-1, TAG_BYTES)[:, 0]
    part_number = first_bytes >> (8 - bits) if bits else np.zeros(len(tags), np.uint8)
    order = np.argsort(part_number, kind="stable")
    ends = np.searchsorted(part_number[order], np.arange(len(parts) + 1))
    for part, start, end in zip(parts, ends[:-1], ends[1:], strict=True):
        if end > start:
            part.add(party, tags[order[start:end]])
