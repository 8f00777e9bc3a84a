"""Fuzzy linkage: the server links rows whose names, dates or addresses are similar, by keyed
encodings (``vfl_common.linkage``).

The active party draws a key and sends it to the other parties. Each party sends the server the
encodings of its rows in a secret order. The server links the rows of each passive party with those
of the active party, one to one. Rows that are linked at all parties are common. The server reports
to each party which of its rows are common, in an order that all parties share, and estimates of
precision and recall.

The server must not know the key and must not collude with a party: whoever has key and encodings
can test guesses of rows. ``docs/security/private-alignment.md`` says what the encodings reveal.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.config.recipe_tables import FuzzyField
from vfl_common.errors import Code, InputError, LostError, PeerError
from vfl_common.files import private_file, write_error
from vfl_common.linkage import (
    BITS,
    ENCODING_BYTES,
    MAX_ROWS,
    ROWS_A_BATCH,
    Encodings,
    count_batches,
)
from vfl_common.process.logs import format_links
from vfl_common.psi import PHASE, compute_min_common
from vfl_common.text import to_json
from vfl_party.align import batches
from vfl_party.align.aligned import AlignedRows, AlignmentContext
from vfl_party.align.digest import CPU, DigestAlignment, compute_keyed_digest
from vfl_party.align.state import FOLDER, AlignmentFiles, CommonRows
from vfl_party.base.seeds import Rows
from vfl_party.data import Table
from vfl_party.data.id_rules import SEPARATOR
from vfl_party.data.ids import Ids
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import Exchange, Occurrence, Role, Sent, f32, i64, u8
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.policies import Policy

log = logging.getLogger(__name__)
KEY_BYTES = 32
KEY = Exchange(
    "linkage key",
    # The token of the linkage whose links the party has, or zeros.
    Sent(Kind.ROWS, {"known": u8(KEY_BYTES)}),
    # The new key; the token of the linkage whose links all parties have, or zeros.
    Sent(Kind.ROWS, {"key": u8(KEY_BYTES), "known": u8(KEY_BYTES)}, label_free=True),
    when="once a generation",
)
SIZES = Exchange(
    "linkage sizes",
    # The minimum similarity, 0 to estimate it; that of the active party counts.
    Sent(Kind.ROWS, {"rows": i64(1), "threshold": f32(1)}, label_free=True),
    Sent(Kind.ROWS, {"rows": i64("parties")}),
    asks="server",
    when="once",
)
ENCODINGS = Exchange(
    "encodings",
    Sent(Kind.ROWS, {"encodings": u8("rows", ENCODING_BYTES)}, label_free=True),
    # The answer to the last batch: for each row its position among the common rows or -1, the
    # similarity of its link and the probability that it is right; threshold, precision and recall.
    Sent(Kind.ROWS, {"ranks": i64("down"), "pairs": f32("down", 2), "quality": f32("estimates")}),
    asks="server",
    when="once a batch",
)
ORDER = Exchange(
    "linkage order",
    Sent(Kind.ROWS, {"common": i64(1)}),
    # For each common row in the order of the server, its position in the order of the phases.
    Sent(Kind.ROWS, {"positions": i64("common")}, label_free=True),
    when="once",
)
_FILE, _SAMPLE, _SAMPLE_ROWS = "links.npz", "sample.csv", 50
_UNKNOWN = bytes(KEY_BYTES)
# With a larger share of bits, unrelated encodings cannot be told from similar ones.
_MAX_BITS = 0.7


def encode(
    ids: Sequence[str], places: Sequence[int], fields: Mapping[str, FuzzyField], key: bytes
) -> Encodings:
    """Returns the encodings of rows, uint8 [N, bytes].

    Args:
        ids: The ids of the rows, which contain the fields.
        places: The position of each field in an id.
        fields: The recipe's fields.
        key: The secret key of all parties, 32 bytes.
    """
    cache: dict[tuple[str, str], npt.NDArray[np.integer]] = {}
    bits = np.zeros((len(ids), BITS), bool)
    for row, text in enumerate(ids):
        cells = text.split(SEPARATOR)
        for place, (name, field) in zip(places, fields.items(), strict=True):
            if not (cell := cells[place]):
                continue
            if (name, cell) not in cache:
                cache[name, cell] = _hash_bigrams(name, cell, field, key)
            bits[row, cache[name, cell]] = True
    return np.packbits(bits, axis=1)


def encode_table(
    table: Table, fields: Mapping[str, FuzzyField], key: bytes, order: Rows | None = None
) -> Encodings:
    """Returns the encodings of a table's rows, uint8 [N, bytes], in ``order``."""
    ids = Ids.of(table.ids)
    return encode(ids if order is None else ids.take(order), _find_places(table), fields, key)


def _hash_bigrams(name: str, cell: str, field: FuzzyField, key: bytes) -> npt.NDArray[np.integer]:
    """Returns the bits that a cell sets."""
    padded, positions = f" {cell} ", []
    for place in range(len(padded) - 1):
        gram = f"{name}{SEPARATOR}{padded[place : place + 2]}{SEPARATOR}"
        gram += str(place) if field.positional else ""
        digest = hashlib.blake2b(gram.encode(), key=key, digest_size=64).digest()
        positions.append(np.frombuffer(digest, "<u2")[: field.hashes] % BITS)
    return np.unique(np.concatenate(positions))


class FuzzyAlignment:
    """Links rows with similar fields; see ``Alignment``."""

    certain = False
    protocol = 8

    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        *,
        divides: bool = True,
        trained_folder: Path | None = None,
    ) -> None:
        self._recipe, self._policy, self._divides = recipe, policy, divides
        self._trained_folder = trained_folder
        self._digest = DigestAlignment(recipe, policy, divides=divides)

    def occurrences(self, rows: int) -> list[Occurrence]:
        """See ``Alignment.occurrences``."""
        parties, result = len(self._recipe.parties), [Occurrence.of(KEY, StepKey(PHASE, 0, 0))]
        result.append(Occurrence.of(SIZES, StepKey(PHASE, 1, 0), parties=parties))
        for batch in range(count_batches([rows])):
            sizes = _size_batch(rows, [rows], batch)
            result.append(Occurrence.of(ENCODINGS, StepKey(PHASE, 1, 1 + batch), **sizes))
        order = Occurrence.of(ORDER, StepKey(PHASE, 2, 0), common=rows)
        return [*result, order, *self._digest.occurrences(rows)]

    def get_expected(self, table: Table) -> AlignedRows:
        """See ``Alignment.get_expected``."""
        return self._digest.get_expected(table)

    def count_earlier(self, runs: Path, name: str, table: Table) -> int | None:
        """See ``Alignment.count_earlier``."""
        earlier = self._recipe.rows.alignment if self._divides else None
        if earlier is None or not self._recipe.passives:
            return None
        return len(_load_earlier(runs / earlier / name, table).rows)

    def get_agreed(self, context: AlignmentContext) -> AlignedRows:
        """See ``Alignment.get_agreed``."""
        if not self._recipe.passives:
            return self._digest.get_agreed(context)
        links = _load(context.folder, context.table)
        if links is None:
            raise InputError(
                Code.DATA_INVALID,
                f"{context.folder}: the links are missing, and the other parties are in the middle "
                "of the run. Restore the folder and the rows that it had.",
            )
        expected = self._digest.get_expected(_select(context.table, links))
        return _add_links(expected.with_saved_division(context.folder), links)

    def show(self, context: AlignmentContext, aligned: AlignedRows) -> None:
        """See ``Alignment.show``."""
        self._digest.show(context, aligned)

    def align(self, context: AlignmentContext) -> AlignedRows:
        """Links the rows, unless the links are already saved.

        Raises:
            PeerError: ROWS_DIFFER if fewer rows are common than ``rows.at_least``, or if the
                estimated precision is below ``rows.fuzzy.min_precision``; MALFORMED_MESSAGE if the
                server breaks the protocol.
            InputError: The files cannot be written.
        """
        if not self._recipe.passives:
            return self._digest.align(context)
        links = _load(context.folder, context.table)
        if links is None and self._divides and (run := self._recipe.rows.alignment) is not None:
            folder = context.folder.parent.parent / run / context.name
            links = _load_earlier(folder, context.table)
            self._check_settings(folder, links)
            self._check_quality(context, links)
            self._save(context, links)
        own = links.token if links is not None else _UNKNOWN
        key, known = self._agree_on_key(context, own)
        if known not in (own, _UNKNOWN):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{self._recipe.active.name}: reported that all parties know the links, but "
                f"{context.name} does not. Begin a new run.",
                party=self._recipe.active.name,
            )
        if known == _UNKNOWN or links is None:
            context.begins()
            links = self._link(context, key)
            self._check_quality(context, links)
            links = self._reorder(context, links)
            self._save(context, links)
        compared = self._digest.align(replace(context, table=_select(context.table, links)))
        return _add_links(compared, links)

    def _check_settings(self, folder: Path, links: _Links) -> None:
        """Raises InputError if the links of an earlier run have other settings than the recipe."""
        settings = self._recipe.rows.fuzzy
        if links.fields != _describe(settings.fields):
            raise InputError(
                Code.CONFIG_INVALID,
                f"rows.fuzzy.fields: are not those of the links in {folder}. Use the same fields, "
                "or remove rows.alignment.",
            )
        threshold = settings.threshold
        if threshold is not None and abs(threshold - links.threshold) > 1e-6:
            raise InputError(
                Code.CONFIG_INVALID,
                f"rows.fuzzy.threshold: is not that of the links in {folder}, which is "
                f"{links.threshold:.3f} (got {threshold}). Remove the key, or rows.alignment.",
            )

    def _get_threshold(self) -> float:
        """Returns the minimum similarity of a link, 0 to estimate it. Few rows to predict are too
        few for an estimate, so they get the threshold of the training.
        """
        if self._trained_folder is not None:
            try:
                with np.load(self._trained_folder / FOLDER / _FILE) as file:
                    return float(file["quality"][0])
            except (OSError, ValueError, KeyError, zipfile.BadZipFile):
                log.warning(
                    "%s: has no links, so the threshold is estimated from the rows to predict",
                    self._trained_folder,
                    extra={"event": "advice"},
                )
        return self._recipe.rows.fuzzy.threshold or 0.0

    def _save(self, context: AlignmentContext, links: _Links) -> None:
        _save(context, links, self._recipe.rows.fuzzy.fields)

    def _agree_on_key(self, context: AlignmentContext, own: bytes) -> tuple[bytes, bytes]:
        """Returns the key that the active party draws, and the token of the linkage whose links all
        parties have, or zeros. ``own``: The token of this party's links.
        """
        active, step = self._recipe.active.name, StepKey(PHASE, 0, 0)
        if context.name == active:
            chains = make_chains(self._recipe, PHASE, KEY, "active", self._policy)
            answering = Answering(KEY, PHASE, chains, context.connections, CPU, {})
            received = answering.collect(step)
            tokens = {_to_bytes(reply["known"]) for reply in received.values()}
            known = own if tokens <= {own} else _UNKNOWN
            absent = [name for name in self._names[1:] if name not in received]
            if absent and known == _UNKNOWN:
                raise LostError(
                    Code.PARTY_LOST,
                    f"{absent[0]}: has left the run, and rows cannot be linked without it. Begin a "
                    "new run.",
                    party=absent[0],
                )
            key = os.urandom(KEY_BYTES)
            answer = {"key": _to_tensor(key), "known": _to_tensor(known)}
            answering.reply_all(step, received, answer)
            return key, known
        chains = make_chains(self._recipe, PHASE, KEY, "passive", self._policy)
        asking = Asking(KEY, PHASE, chains, context.connections, active, CPU, {})
        reply = asking.swap(step, {"known": _to_tensor(own)})
        return _to_bytes(reply["key"]), _to_bytes(reply["known"])

    def _link(self, context: AlignmentContext, key: bytes) -> _Links:
        """Sends the encodings, and returns the links that the server reports."""
        table, rows = context.table, len(context.table)
        if rows > MAX_ROWS:
            raise InputError(
                Code.DATA_INVALID,
                f'{table.source}: rows.align = "fuzzy" compares at most {MAX_ROWS:,} rows of a '
                f"party (got {rows:,}). Align by keys first, or use fewer rows.",
            )
        order = np.random.default_rng(int.from_bytes(os.urandom(32), "little")).permutation(rows)
        encodings = encode_table(table, self._recipe.rows.fuzzy.fields, key, order)
        if np.unpackbits(encodings).mean() > _MAX_BITS:
            text = "most bits of the encodings are set, so links are uncertain; use fewer hashes"
            log.warning("%s", text, extra={"event": "advice"})
            context.show("advice", said=text)
        own = {"rows": torch.tensor([rows]), "threshold": torch.tensor([self._get_threshold()])}
        sizes = self._ask(SIZES, context, StepKey(PHASE, 1, 0), own)
        all_rows = sizes["rows"].tolist()
        for name, count in zip(self._names, all_rows, strict=True):
            self._check_rows(context, name, count)
        reply = dict[str, Tensor]()
        for batch in range(count_batches(all_rows)):
            part = encodings[batch * ROWS_A_BATCH : (batch + 1) * ROWS_A_BATCH]
            step, tensor = StepKey(PHASE, 1, 1 + batch), torch.from_numpy(part.copy())
            numbers = _size_batch(rows, all_rows, batch)
            reply = self._ask(ENCODINGS, context, step, {"encodings": tensor}, **numbers)
            context.tick(PHASE, 0, 1, batch, count_batches(all_rows))
        token = hashlib.sha256(key).digest()
        return self._read(order, reply)._replace(token=token)

    def _reorder(self, context: AlignmentContext, links: _Links) -> _Links:
        """Returns the links in an order that depends on the ids of the active party and the seed,
        so that the same links give the same training. The server's order is random.

        Raises PeerError if the active party sends an impossible order.
        """
        active, step, rows = self._recipe.active.name, StepKey(PHASE, 2, 0), links.rows
        common = {"common": torch.tensor([len(rows)])}
        role: Role = "active" if context.name == active else "passive"
        chains = make_chains(self._recipe, PHASE, ORDER, role, self._policy)
        if context.name == active:
            answering = Answering(
                ORDER, PHASE, chains, context.connections, CPU, {"common": len(rows)}
            )
            received = answering.collect(step)
            seed = self._recipe.seed.to_bytes(16, "little", signed=True)
            digests = [
                hashlib.blake2b(context.table.ids[row].encode(), key=seed).digest()
                for row in rows.tolist()
            ]
            positions = np.empty(len(rows), np.int64)
            positions[sorted(range(len(rows)), key=digests.__getitem__)] = np.arange(len(rows))
            answering.reply_all(step, received, {"positions": torch.from_numpy(positions)})
        else:
            asking = Asking(
                ORDER, PHASE, chains, context.connections, active, CPU, {"common": len(rows)}
            )
            positions = asking.swap(step, common)["positions"].numpy()
            if not np.array_equal(np.sort(positions), np.arange(len(rows))):
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{active}: sent an impossible order of the common rows. Begin a new run.",
                    party=active,
                )
        ranks = links.ranks.copy()
        ranks[rows] = positions
        return links._replace(ranks=ranks)

    @property
    def _names(self) -> list[str]:
        return [self._recipe.active.name, *(party.name for party in self._recipe.passives)]

    def _ask(
        self,
        exchange: Exchange,
        context: AlignmentContext,
        step: StepKey,
        tensors: dict[str, Tensor],
        **sizes: int,
    ) -> dict[str, Tensor]:
        """Sends tensors to the server, and returns its answer."""
        role: Role = "active" if context.name == self._recipe.active.name else "passive"
        chains = make_chains(self._recipe, PHASE, exchange, role, self._policy)
        sizes = {"parties": len(self._recipe.parties), **sizes}
        asking = Asking(
            exchange, PHASE, chains, context.connections, self._recipe.server, CPU, sizes
        )
        # The server compares all rows before it answers the last batch.
        asking.link.unhurried()
        return asking.swap(step, tensors)

    def _check_rows(self, context: AlignmentContext, name: str, rows: int) -> None:
        """Raises PeerError if the server announces an impossible number of rows of a party."""
        own = name == context.name
        if not 0 < rows <= MAX_ROWS or (own and rows != len(context.table)):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{self._recipe.server}: announced an impossible number of rows of {name} (got "
                f"{rows:,}). Begin a new run.",
                party=self._recipe.server,
            )

    def _read(self, order: npt.NDArray[np.int64], reply: dict[str, Tensor]) -> _Links:
        """Returns the links in the order of the table. Raises PeerError if the answer is
        malformed.
        """
        ranks, pairs = np.empty_like(order), np.empty((len(order), 2), np.float32)
        ranks[order], pairs[order] = reply["ranks"].numpy(), reply["pairs"].numpy()
        threshold, precision, recall = reply["quality"].tolist()
        common = np.sort(ranks[ranks >= 0])
        similarity, probability = pairs[ranks >= 0].T
        shares = np.array([*probability, threshold, precision, recall])
        is_valid = np.array_equal(common, np.arange(len(common))) and ranks.min() >= -1
        in_range = np.all(np.abs(similarity) <= 1.0) and np.all((shares >= 0.0) & (shares <= 1.0))
        if not (is_valid and in_range):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{self._recipe.server}: reported impossible links. Begin a new run.",
                party=self._recipe.server,
            )
        fields = _describe(self._recipe.rows.fuzzy.fields)
        return _Links(ranks, pairs, threshold, precision, recall, fields)

    def _check_quality(self, context: AlignmentContext, links: _Links) -> None:
        """Shows the quality of the links. Raises PeerError if they are too few or too uncertain."""
        rows, settings = self._recipe.rows, self._recipe.rows.fuzzy
        size, common = len(links.ranks), len(links.rows)
        quality = {"threshold": links.threshold, "precision": links.precision}
        facts = {"common": common, "of": size, **quality, "recall": links.recall}
        log.info("%s", format_links(facts), extra={"event": "linked"})
        context.show("linked", **facts)
        if common < context.at_least:
            raise PeerError(
                Code.ROWS_DIFFER,
                f"{context.name}: fewer rows are linked than it requires for predictions.",
                party=context.name,
            ).privately(
                f"{context.name}: the number of linked rows must be at least {context.at_least:,}, "
                f"the predict.at_least of its party file (got {common:,}). Reduce "
                "predict.at_least, or predict more rows."
            )
        if not self._divides:
            return
        if common < compute_min_common(rows.at_least, size):
            raise PeerError(
                Code.ROWS_DIFFER,
                f"rows.at_least: fewer rows are linked than the recipe requires (got {common:,}). "
                "Spell the fields alike at all parties (rows.id_rules), or reduce rows.at_least.",
            )
        if links.precision < settings.min_precision:
            raise PeerError(
                Code.ROWS_DIFFER,
                f"rows.fuzzy: the estimated precision must be at least {settings.min_precision} "
                f"(got {links.precision:.3f}). Use more fields or a higher threshold, and remove "
                "rows of repeated people.",
            )


class _Links(NamedTuple):
    """The links of a party. ``ranks``: The position of each row among the common rows or -1, int64
    [N]; ``pairs``: The similarity and the probability of each link, float32 [N, 2]; ``fields``: The
    recipe's fields; ``token``: Identifies the linkage, the same at all parties.
    """

    ranks: npt.NDArray[np.int64]
    pairs: npt.NDArray[np.float32]
    threshold: float
    precision: float
    recall: float
    fields: str = ""
    token: bytes = _UNKNOWN

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The positions of the common rows in the table, in the common order, int64 [C]."""
        linked = np.flatnonzero(self.ranks >= 0)
        return linked[np.argsort(self.ranks[linked])]


def _size_batch(rows: int, all_rows: Sequence[int], batch: int) -> dict[str, int]:
    is_last = batch == count_batches(all_rows) - 1
    up = max(0, min(ROWS_A_BATCH, rows - batch * ROWS_A_BATCH))
    return {"rows": up, "down": rows if is_last else 0, "estimates": 3 if is_last else 0}


def _select(table: Table, links: _Links) -> Table:
    """Returns the common rows. Their ids are their positions and the token, which all parties share
    only if they have the links of the same linkage.
    """
    token = links.token.hex()
    ids = Ids.of([f"{token}-{position:09d}" for position in range(len(links.rows))])
    return table.select(links.rows, ids)


def _describe(fields: Mapping[str, FuzzyField]) -> str:
    return to_json({name: field.model_dump() for name, field in fields.items()})


def _to_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _add_links(aligned: AlignedRows, links: _Links) -> AlignedRows:
    return replace(aligned, rows=links.rows, pairs=links.pairs[links.rows])


def _save(context: AlignmentContext, links: _Links, fields: Iterable[str]) -> None:
    """Saves the links, and a sample of them for a clerical review. Raises InputError."""
    table, folder = context.table, context.folder / FOLDER
    is_common = links.ranks >= 0
    union = AlignmentFiles(context.folder, table.ids, batches.BATCH)
    union.finish(CommonRows(is_common))
    quality = np.array([links.threshold, links.precision, links.recall])
    ids = np.frombuffer(compute_keyed_digest(b"kept", table.ids), np.uint8)
    try:
        with private_file(folder / _FILE) as file:
            np.savez(
                file,
                ids=ids,
                ranks=links.ranks,
                pairs=links.pairs,
                quality=quality,
                fields=links.fields,
                token=np.frombuffer(links.token, np.uint8),
            )
        with private_file(folder / _SAMPLE) as file:
            file.write(_write_sample(table, links, fields).encode())
    except OSError as error:
        raise write_error(folder, error) from None


def _write_sample(table: Table, links: _Links, fields: Iterable[str]) -> str:
    """Returns a CSV file with the links of the lowest similarity and some others.

    A line has the number of the link, which all parties share, its similarity, and this party's
    fields, in the order of the recipe, so that two parties can compare their files.
    """
    rows, text = links.rows, io.StringIO()
    order = np.argsort(links.pairs[rows, 0], kind="stable")
    others = order[_SAMPLE_ROWS :: max(1, len(order) // _SAMPLE_ROWS)]
    writer = csv.writer(text)
    writer.writerow(["link", "similarity", *fields])
    places = _find_places(table)
    for position in [*order[:_SAMPLE_ROWS], *others]:
        row = int(rows[position])
        cells = table.ids[row].split(SEPARATOR)
        similarity = f"{links.pairs[row, 0]:.3f}"
        writer.writerow([position, similarity, *(cells[place] for place in places)])
    return text.getvalue()


def _find_places(table: Table) -> list[int]:
    """Returns the position of each field of the recipe in an id."""
    columns = table.key_columns
    assert columns is not None  # noqa: S101 - the recipe has fields
    return [place for (place,) in columns.keys]


def _load(folder: Path, table: Table) -> _Links | None:
    """Returns the links saved in a party's folder of a run; None if there are none for the rows of
    the table.
    """
    try:
        with np.load(folder / FOLDER / _FILE) as file:
            if file["ids"].tobytes() != compute_keyed_digest(b"kept", table.ids):
                return None
            threshold, precision, recall = file["quality"].tolist()
            return _Links(
                file["ranks"],
                file["pairs"],
                threshold,
                precision,
                recall,
                str(file["fields"]),
                file["token"].tobytes(),
            )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def _load_earlier(folder: Path, table: Table) -> _Links:
    """Returns the links of an earlier run. Raises InputError if they do not fit the table."""
    links = _load(folder, table)
    if links is None:
        raise InputError(
            Code.DATA_INVALID,
            f"{folder}: has no links of the rows that this party has now. Name another run in "
            "rows.alignment, or remove the key to link again.",
        )
    return links
