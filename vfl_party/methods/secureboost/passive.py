"""The passive side: sums ciphertexts for its entries, and answers where rows go at its splits."""

from __future__ import annotations

import itertools
import logging
import secrets
from pathlib import Path

import numpy as np
import torch

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, PeerError
from vfl_party.base.devices import count_threads
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.phase import Tree as State
from vfl_party.base.seeds import Rows
from vfl_party.homomorphic import Adder, CipherError, Wire, adder, cipher_bytes, has_heu
from vfl_party.homomorphic.shards import Shards, share_adder, summing
from vfl_party.homomorphic.sums import Summing
from vfl_party.methods.secureboost.columns import Column, encode_rows, learn, sample_columns
from vfl_party.methods.secureboost.common import (
    begin,
    check_offered,
    get_routed_rows,
    make_split,
    note_constant,
    note_importance,
    open_exchanges,
)
from vfl_party.methods.secureboost.exchanges import BEST, STOP
from vfl_party.methods.secureboost.guard import (
    LOST_FOLDER,
    AnswerLog,
    find_wrong_children,
    min_rows,
)
from vfl_party.methods.secureboost.joint_walk import Walk, forest_of
from vfl_party.methods.secureboost.offer import Offer
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.entries import Layout, plan_of
from vfl_party.methods.secureboost.tree.forest import Tree
from vfl_party.methods.secureboost.tree.positions import (
    Bools,
    Nodes,
    bytes_for_bits,
    open_nodes,
    to_sum,
)
from vfl_party.methods.secureboost.tree.sampling import count_drawn, sample
from vfl_party.phases.context import Party

log = logging.getLogger(__name__)


class ShuffledEntries:
    """The entries of one tree in a fresh secret order: those of numbers, then the shuffled sets,
    each shuffled in itself.
    """

    def __init__(self, layout: Layout, columns: list[Column]) -> None:
        self.layout, self.plan = layout, plan_of(columns, layout)
        draw = secrets.SystemRandom()
        ends = np.cumsum([0, *layout.sizes]).tolist()
        blocks = [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
        for block in blocks:
            draw.shuffle(block)
        numbers, *sets = blocks
        draw.shuffle(sets)
        self.sizes = [len(numbers), *map(len, sets)]
        # At each place of the wire: the entry's.
        self.order = [place for block in (numbers, *sets) for place in block]


class PassiveSecureBoost(Phase):
    """One round grows the trees of one round of boosting."""

    def __init__(self, party: Party, name: str, settings: SecureBoostSettings) -> None:
        self.name, self.rounds = name, settings.trees
        self._party, self._settings, self._forest = party, settings, forest_of(party)
        begin(party, name, settings)
        self._train, self._routed = party.rows("train"), get_routed_rows(party, settings)
        self._columns = learn(party, settings.bins, self._train)
        check_offered(party, name, settings, self._columns)
        note_constant(party, name, self._columns)
        self._codes_NF = encode_rows(party, self._columns)[self._routed]
        self._swaps = open_exchanges(party.asking, name, settings)
        self._answered = AnswerLog()
        self._walk = Walk(party, name, settings, "after the last tree", self._answered)
        task, train = party.recipe.task, len(self._train)
        self._fewest, self._fewest_open = (
            min_rows(task, settings, train, sides) for sides in (1, 2)
        )
        # The number of disclosed sides of each row.
        self._bits_N = np.zeros(len(self._routed), np.int64)
        self._adder: Adder | None = None
        self._shards = Shards(count_threads())
        # The entries of the tree that is growing.
        self.offered: ShuffledEntries | None = None
        self._best = 0
        self._batch = 0

    def run_round(self, round_: int) -> RoundReport:
        party, settings, outputs = self._party, self._settings, self._party.recipe.task.outputs
        self._batch = 0
        if not self._forest.columns:
            self._forest.columns = self._columns
        own = self._adder or self._open(round_)
        with_others = round_ > 0 or not settings.first_tree_own
        rows = self._sample_rows(round_) if with_others else self._train[:0]
        share = settings.column_sample
        chosen = sample_columns(
            party.own_seed, self.name, party.name, round_, len(self._columns), share
        )
        layout = Layout.of(self._columns, chosen)
        for number in range(outputs):
            tree = Tree()
            if with_others:
                self._grow(tree, own, ShuffledEntries(layout, self._columns), rows, round_)
            self._forest.trees.append(tree)
            party.tick(self.name, round_, self.rounds, number + 1, outputs)
        done = self._ask_verdict(round_)
        if done or round_ + 1 == self.rounds:
            if settings.early_stopping is not None:
                del self._forest.trees[self._best * outputs :]
            for split in settings.splits:
                first = StepKey(self.name, round_, self._batch)
                self._batch += self._walk.answer(party.rows(split), first)
            note_importance(party, self.name, self._forest.importance(), "number of splits")
            self._note_bits()
        return RoundReport(outputs, done=done)

    def _sample_rows(self, round_: int) -> Rows:
        """Returns the rows of a round; with GOSS, receives them. Raises PeerError if their number
        is wrong.
        """
        settings, count = self._settings, len(self._train)
        if self._swaps.sample is None:
            return sample(self._party.recipe.seed, self.name, round_, count, settings)
        reply = self._swaps.sample.swap(self._step(round_), {}, packed=bytes_for_bits(count))[
            "sampled"
        ]
        rows = np.flatnonzero(np.unpackbits(reply.cpu().numpy(), count=count))
        if len(rows) != count_drawn(count, settings):
            wanted = count_drawn(count, settings)
            raise self._wrong(
                f"{self._peer}: a round of {self.name} must have {wanted} rows by goss (got "
                f"{len(rows)})."
            )
        return rows.astype(np.int64)

    def _open(self, round_: int) -> Adder:
        """Receives the public key of this generation. Raises PeerError if it cannot be used."""
        facts = torch.tensor([has_heu(), *Offer.of(self._columns).facts()])
        reply = self._swaps.key.swap(self._step(round_), {"facts": facts})
        written = reply["key"].cpu().numpy().tobytes()
        length = int.from_bytes(written[:4], "little")
        try:
            if length > max(0, len(written) - 4):
                raise CipherError("its public key is longer than its message")
            own = adder(self._settings.encryption, self._settings.key_bits, written[4 : 4 + length])
        except CipherError as error:
            raise self._wrong(
                f"{self._peer}: the message with its key cannot be used: {error}."
            ) from None
        self._adder = share_adder(own, self._shards)
        return self._adder

    def _grow(
        self, tree: Tree, own: Adder, entries: ShuffledEntries, rows: Rows, round_: int
    ) -> None:
        """Takes part in the growth of one tree."""
        self.offered = entries
        depth, count = self._settings.depth, len(self._routed)
        sizes = torch.tensor(entries.sizes)
        reply = self._swaps.gradients.swap(self._step(round_), {"sizes": sizes}, rows=len(rows))
        (ciphers,) = reply.values()
        codes_RF, in_sample = self._codes_NF[rows], np.zeros(count, bool)
        try:
            summed = summing(self._shards, own, ciphers.cpu().numpy(), codes_RF, entries.plan)
        except CipherError as error:
            raise self._wrong(
                f"{self._peer}: a ciphertext in {self.name} cannot be used: {error}."
            ) from None
        in_sample[rows] = True
        nodes_N: Nodes = np.zeros(count, np.uint8)
        for level in range(depth):
            present, wanted = open_nodes(nodes_N), to_sum(nodes_N, in_sample)
            members = [np.flatnonzero(nodes_N[rows] == node) for node in wanted]
            wire = torch.from_numpy(self._sum_entries(own, summed, members, entries))
            (name,) = self._swaps.sums.exchange.up.tensors
            step = self._step(round_)
            told_ = self._swaps.sums.swap(
                step, {name: wire}, nodes=len(present), entries=len(entries.order)
            )
            chosen = told_["chosen"].cpu().numpy().astype(bool)
            won = {node: flags for node, flags in zip(present, chosen, strict=True) if flags.any()}
            left = self._split(tree, level, won, entries, nodes_N, in_sample)
            bits_ = np.packbits(np.concatenate([np.empty(0, bool), *left.values()]))
            self._pin(level, nodes_N, [*left], bits_)
            bits = torch.from_numpy(bits_)
            last = level + 1 == depth
            about = self._routed[np.flatnonzero(np.isin(nodes_N, [*left]))]
            moved = self._swaps.partition.swap(
                self._step(round_), {"left": bits}, about, rows=0 if last else count
            )
            if last:
                return
            moved_N = moved["nodes"].cpu().numpy()
            wrong = find_wrong_children(
                nodes_N, moved_N, in_sample, left, self._fewest, self._fewest_open
            )
            if wrong:
                raise self._wrong(f"{self._peer}: wrong positions of rows in {self.name}: {wrong}.")
            nodes_N = moved_N
            if not open_nodes(nodes_N):
                return

    def _sum_entries(
        self, own: Adder, of: Summing, members: list[Rows], entries: ShuffledEntries
    ) -> Wire:
        """Returns the sums of a level's nodes for the wire, [sums, bytes], in the secret order.
        Raises PeerError if ciphertexts cannot be added.

        ``members``: the rows of each node.
        """
        if not entries.order:
            return np.empty(
                (0, cipher_bytes(self._settings.encryption, self._settings.key_bits)), np.uint8
            )
        try:
            parts = [own.take(sums_, entries.order) for sums_ in of.sums(members)]
            return own.wire(own.concatenate(parts))
        except CipherError as error:
            raise self._wrong(
                f"{self._peer}: what it sent in {self.name} cannot be used: {error}."
            ) from None

    def _split(
        self,
        tree: Tree,
        level: int,
        won: dict[int, Bools],
        entries: ShuffledEntries,
        nodes_N: Nodes,
        in_sample: Bools,
    ) -> dict[int, Bools]:
        """Stores this party's splits of a level. Returns {node: whether each of its rows goes
        left}. Raises PeerError.

        A split with too few rows on a side is refused before anything about it is disclosed.
        """
        lefts = {}
        for node, flags in won.items():
            own_order = np.zeros(len(flags), bool)
            own_order[entries.order] = flags
            here = nodes_N == node
            split = make_split(
                self._columns, entries.layout, own_order, self._codes_NF[here & in_sample]
            )
            tree.splits[level, node], lefts[node] = split, split.goes_left(self._codes_NF[here])
            sampled = in_sample[here]
            rows = min(int((lefts[node] & sampled).sum()), int((~lefts[node] & sampled).sum()))
            if rows < self._fewest:
                raise self._wrong(
                    f"{self._peer}: chose a split of {self._party.name} in {self.name} with too "
                    f"few rows on one side (got {rows}, an honest split has at least "
                    f"{self._fewest})."
                )
        return lefts

    def _pin(self, level: int, nodes_N: Nodes, won: list[int], bits: Nodes) -> None:
        """Logs the next answer. Raises PeerError if it differs from that before an
        interruption.
        """
        number = len(self._forest.trees)
        if not self._answered.same(
            f"{self.name}/tree-{number}/{level}", nodes_N.tobytes(), bytes(won), bits.tobytes()
        ):
            raise self._wrong(
                f"{self._peer}: asks {self._party.name} again for its splits of tree "
                f"{number + 1}, level {level + 1}, and chooses others than before the "
                f"interruption. {LOST_FOLDER}"
            )
        self._bits_N[np.isin(nodes_N, won)] += 1

    def _note_bits(self) -> None:
        """Writes to this party's log how much the sides of splits disclosed about the rows."""
        max_bits, mean = int(self._bits_N.max()), float(self._bits_N.mean())
        log.info(
            "phase %s: while trees grew, %s disclosed the sides of at most %s splits of one row, "
            "%.1f on average",
            self.name,
            self._party.name,
            max_bits,
            mean,
            extra={"event": "answered"},
        )

    def _ask_verdict(self, round_: int) -> bool:
        """Returns whether the active party ends the phase with this round."""
        if self._swaps.verdict is None:
            return False
        verdict = int(self._swaps.verdict.swap(self._step(round_), {})["verdict"][0])
        if verdict & BEST:
            self._best = round_ + 1
        return bool(verdict & STOP)

    @property
    def _peer(self) -> str:
        return self._party.recipe.active.name

    def _wrong(self, text: str) -> PeerError:
        return PeerError(Code.MALFORMED_MESSAGE, text, party=self._peer)

    def _step(self, round_: int) -> StepKey:
        self._batch += 1
        return StepKey(self.name, round_, self._batch - 1)

    def close(self) -> None:
        self._shards.close()

    def keep(self, folder: Path) -> None:
        self._answered.keep(folder)

    def state(self) -> State:
        return {"best": self._best, "bits": torch.from_numpy(self._bits_N)}

    def load_state(self, tree: State) -> None:
        self._best = tree["best"]
        # Checkpoints of earlier releases have no counts.
        if "bits" in tree:
            self._bits_N = tree["bits"].numpy().copy()
