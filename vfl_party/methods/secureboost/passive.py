"""A passive party's side: sums ciphertexts for its entries, and answers where rows go at its
splits.
"""

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
from vfl_party.homomorphic import Adder, CipherError, Wire, cipher_bytes, has_heu, make_adder
from vfl_party.homomorphic.shards import Shards, make_summing, share_adder
from vfl_party.homomorphic.sums import Summing
from vfl_party.methods.secureboost.columns import (
    Column,
    Layout,
    Offer,
    encode_rows,
    learn_columns,
    plan_of,
    sample_columns,
)
from vfl_party.methods.secureboost.common import (
    check_num_splits,
    check_phase,
    get_routed_rows,
    log_constant_columns,
    log_importance,
    make_split,
    open_exchanges,
)
from vfl_party.methods.secureboost.forest import (
    Bools,
    Nodes,
    Tree,
    bytes_for_bits,
    choose_summed_nodes,
    list_open_nodes,
)
from vfl_party.methods.secureboost.growing import count_drawn, sample_rows
from vfl_party.methods.secureboost.guard import (
    LOST_FOLDER,
    AnswerLog,
    find_wrong_children,
    min_rows,
)
from vfl_party.methods.secureboost.joint_walk import Walk, forest_of
from vfl_party.methods.secureboost.settings import BEST, STOP, SecureBoostSettings
from vfl_party.phases.context import Party

log = logging.getLogger(__name__)


class ShuffledEntries:
    """The entries of one tree in a new secret order: first the shuffled numeric entries, then the
    sets of categorical entries. The sets are shuffled, and so are the entries of each set.
    """

    def __init__(self, layout: Layout, columns: list[Column]) -> None:
        self.layout, self.plan = layout, plan_of(columns, layout)
        draw = secrets.SystemRandom()
        ends = np.cumsum([0, *layout.sizes]).tolist()
        blocks = [list(range(check_phase, end)) for check_phase, end in itertools.pairwise(ends)]
        for block in blocks:
            draw.shuffle(block)
        numbers, *sets = blocks
        draw.shuffle(sets)
        self.sizes = [len(numbers), *map(len, sets)]
        # The position in the layout of the entry at each position on the wire.
        self.order = [place for block in (numbers, *sets) for place in block]


class PassiveSecureBoost(Phase):
    """Takes part in growing trees. One round of the phase is one round of boosting."""

    def __init__(self, party: Party, name: str, settings: SecureBoostSettings) -> None:
        self.name, self.rounds = name, settings.trees
        self._party, self._settings, self._forest = party, settings, forest_of(party)
        check_phase(party, name, settings)
        self._train, self._routed = party.rows.get("train"), get_routed_rows(party, settings)
        self._columns = learn_columns(party, settings.bins, self._train)
        check_num_splits(party, name, settings, self._columns)
        log_constant_columns(party, name, self._columns)
        self._codes_NF = encode_rows(party, self._columns)[self._routed]
        self._swaps = open_exchanges(party.exchanges.open_asking, name, settings)
        self._answered = AnswerLog()
        self._walk = Walk(party, name, settings, "after the last tree", self._answered)
        task, train = party.recipe.task, len(self._train)
        self._fewest, self._fewest_open = (
            min_rows(task, settings, train, sides) for sides in (1, 2)
        )
        # For each row, the number of splits at which this party has disclosed the row's side.
        self._disclosed_bits_N = np.zeros(len(self._routed), np.int64)
        self._adder: Adder | None = None
        self._shards = Shards(count_threads())
        # The entries of the tree that is currently growing.
        self.offered: ShuffledEntries | None = None
        self._best = 0
        self._batch = 0

    def run_round(self, round_: int) -> RoundReport:
        party, settings, outputs = self._party, self._settings, self._party.recipe.task.outputs
        self._batch = 0
        if not self._forest.columns:
            self._forest.columns = self._columns
        adder_ = self._adder or self._open(round_)
        with_passives = round_ > 0 or not settings.first_tree_own
        rows = self._sample_rows(round_) if with_passives else self._train[:0]
        share = settings.column_sample
        chosen_columns = sample_columns(
            party.own_seed, self.name, party.name, round_, len(self._columns), share
        )
        layout = Layout.of(self._columns, chosen_columns)
        for number in range(outputs):
            tree = Tree()
            if with_passives:
                self._grow_tree(tree, adder_, ShuffledEntries(layout, self._columns), rows, round_)
            self._forest.trees.append(tree)
            party.hooks.tick(self.name, round_, self.rounds, number + 1, outputs)
        done = self._ask_verdict(round_)
        if done or round_ + 1 == self.rounds:
            if settings.early_stopping is not None:
                del self._forest.trees[self._best * outputs :]
            for split in settings.splits:
                first = StepKey(self.name, round_, self._batch)
                self._batch += self._walk.answer(party.rows.get(split), first)
            log_importance(party, self.name, self._forest.importance(), "number of splits")
            self._log_disclosed_bits()
        return RoundReport(outputs, done=done)

    def _sample_rows(self, round_: int) -> Rows:
        """Returns the rows of a round. With GOSS, it receives them and raises PeerError if their
        number is wrong.
        """
        settings, count = self._settings, len(self._train)
        if self._swaps.sample is None:
            return sample_rows(self._party.recipe.seed, self.name, round_, count, settings)
        reply = self._swaps.sample.swap(self._next_step(round_), {}, packed=bytes_for_bits(count))[
            "sampled"
        ]
        rows = np.flatnonzero(np.unpackbits(reply.cpu().numpy(), count=count))
        if len(rows) != count_drawn(count, settings):
            num_rows = count_drawn(count, settings)
            raise self._make_error(
                f"{self._peer}: a round of {self.name} must have {num_rows} rows by goss (got "
                f"{len(rows)})."
            )
        return rows.astype(np.int64)

    def _open(self, round_: int) -> Adder:
        """Receives the public key of this generation. Raises PeerError if the key cannot be
        used.
        """
        facts = torch.tensor([has_heu(), *Offer.of(self._columns).facts()])
        reply = self._swaps.key.swap(self._next_step(round_), {"facts": facts})
        message = reply["key"].cpu().numpy().tobytes()
        length = int.from_bytes(message[:4], "little")
        try:
            if length > max(0, len(message) - 4):
                raise CipherError("its public key is longer than its message")
            key_adder = make_adder(
                self._settings.encryption, self._settings.key_bits, message[4 : 4 + length]
            )
        except CipherError as error:
            raise self._make_error(
                f"{self._peer}: the message with its key cannot be used: {error}."
            ) from None
        self._adder = share_adder(key_adder, self._shards)
        return self._adder

    def _grow_tree(
        self, tree: Tree, key_adder: Adder, entries: ShuffledEntries, rows: Rows, round_: int
    ) -> None:
        """Takes part in growing one tree, level by level."""
        self.offered = entries
        depth, count = self._settings.depth, len(self._routed)
        sizes = torch.tensor(entries.sizes)
        reply = self._swaps.gradients.swap(
            self._next_step(round_), {"sizes": sizes}, rows=len(rows)
        )
        (ciphers,) = reply.values()
        codes_RF, in_sample = self._codes_NF[rows], np.zeros(count, bool)
        try:
            summed = make_summing(
                self._shards, key_adder, ciphers.cpu().numpy(), codes_RF, entries.plan
            )
        except CipherError as error:
            raise self._make_error(
                f"{self._peer}: a ciphertext in {self.name} cannot be used: {error}."
            ) from None
        in_sample[rows] = True
        nodes_N: Nodes = np.zeros(count, np.uint8)
        for level in range(depth):
            present, summed_nodes = (
                list_open_nodes(nodes_N),
                choose_summed_nodes(nodes_N, in_sample),
            )
            members = [np.flatnonzero(nodes_N[rows] == node) for node in summed_nodes]
            wire = torch.from_numpy(self._sum_entries(key_adder, summed, members, entries))
            (name,) = self._swaps.sums.exchange.up.tensors
            step = self._next_step(round_)
            reply_to_sums = self._swaps.sums.swap(
                step, {name: wire}, nodes=len(present), entries=len(entries.order)
            )
            chosen = reply_to_sums["chosen"].cpu().numpy().astype(bool)
            flags_by_node = {
                node: flags for node, flags in zip(present, chosen, strict=True) if flags.any()
            }
            left = self._store_splits(tree, level, flags_by_node, entries, nodes_N, in_sample)
            packed = np.packbits(np.concatenate([np.empty(0, bool), *left.values()]))
            self._log_answer(level, nodes_N, [*left], packed)
            bits = torch.from_numpy(packed)
            is_last = level + 1 == depth
            described_rows = self._routed[np.flatnonzero(np.isin(nodes_N, [*left]))]
            moved = self._swaps.partition.swap(
                self._next_step(round_),
                {"left": bits},
                described_rows,
                rows=0 if is_last else count,
            )
            if is_last:
                return
            moved_N = moved["nodes"].cpu().numpy()
            problem = find_wrong_children(
                nodes_N, moved_N, in_sample, left, self._fewest, self._fewest_open
            )
            if problem:
                raise self._make_error(
                    f"{self._peer}: wrong positions of rows in {self.name}: {problem}."
                )
            nodes_N = moved_N
            if not list_open_nodes(nodes_N):
                return

    def _sum_entries(
        self, key_adder: Adder, row_sums: Summing, members: list[Rows], entries: ShuffledEntries
    ) -> Wire:
        """Returns the sums of a level's nodes for the wire, [sums, bytes], in the secret order.
        Raises PeerError if the ciphertexts cannot be added.

        ``members``: the rows of each node.
        """
        if not entries.order:
            return np.empty(
                (0, cipher_bytes(self._settings.encryption, self._settings.key_bits)), np.uint8
            )
        try:
            sums_by_node = [
                key_adder.take(sums_, entries.order) for sums_ in row_sums.sums(members)
            ]
            return key_adder.wire(key_adder.concatenate(sums_by_node))
        except CipherError as error:
            raise self._make_error(
                f"{self._peer}: the ciphertexts of {self.name} cannot be added: {error}."
            ) from None

    def _store_splits(
        self,
        tree: Tree,
        level: int,
        flags_by_node: dict[int, Bools],
        entries: ShuffledEntries,
        nodes_N: Nodes,
        in_sample: Bools,
    ) -> dict[int, Bools]:
        """Stores this party's splits of a level. Returns {node: whether each of its rows goes
        left}. Raises PeerError if a split has too few rows on a side.

        The check comes before anything about the split is disclosed.
        """
        lefts = {}
        for node, flags in flags_by_node.items():
            own_order = np.zeros(len(flags), bool)
            own_order[entries.order] = flags
            in_node = nodes_N == node
            split = make_split(
                self._columns, entries.layout, own_order, self._codes_NF[in_node & in_sample]
            )
            tree.splits[level, node], lefts[node] = split, split.goes_left(self._codes_NF[in_node])
            sampled = in_sample[in_node]
            rows = min(int((lefts[node] & sampled).sum()), int((~lefts[node] & sampled).sum()))
            if rows < self._fewest:
                raise self._make_error(
                    f"{self._peer}: chose a split of {self._party.name} in {self.name} with too "
                    f"few rows on one side (got {rows}, an honest split has at least "
                    f"{self._fewest})."
                )
        return lefts

    def _log_answer(self, level: int, nodes_N: Nodes, split_nodes: list[int], bits: Nodes) -> None:
        """Logs the next answer. Raises PeerError if it differs from the answer before an
        interruption.
        """
        number = len(self._forest.trees)
        if not self._answered.is_repeated(
            f"{self.name}/tree-{number}/{level}",
            nodes_N.tobytes(),
            bytes(split_nodes),
            bits.tobytes(),
        ):
            raise self._make_error(
                f"{self._peer}: asks {self._party.name} again for its splits of tree "
                f"{number + 1}, level {level + 1}, and chooses different splits than before the "
                f"interruption. {LOST_FOLDER}"
            )
        self._disclosed_bits_N[np.isin(nodes_N, split_nodes)] += 1

    def _log_disclosed_bits(self) -> None:
        """Writes to this party's log how many splits disclosed the side of a row."""
        max_bits, mean = int(self._disclosed_bits_N.max()), float(self._disclosed_bits_N.mean())
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
        """Asks the active party for its verdict on the round. Returns whether the phase ends with
        this round.
        """
        if self._swaps.verdict is None:
            return False
        verdict = int(self._swaps.verdict.swap(self._next_step(round_), {})["verdict"][0])
        if verdict & BEST:
            self._best = round_ + 1
        return bool(verdict & STOP)

    @property
    def _peer(self) -> str:
        return self._party.recipe.active.name

    def _make_error(self, text: str) -> PeerError:
        return PeerError(Code.MALFORMED_MESSAGE, text, party=self._peer)

    def _next_step(self, round_: int) -> StepKey:
        self._batch += 1
        return StepKey(self.name, round_, self._batch - 1)

    def close(self) -> None:
        self._shards.close()

    def keep(self, folder: Path) -> None:
        self._answered.keep(folder)

    def state(self) -> State:
        return {"best": self._best, "bits": torch.from_numpy(self._disclosed_bits_N)}

    def load_state(self, tree: State) -> None:
        self._best = tree["best"]
        # Checkpoints of earlier releases have no ``bits``.
        if "bits" in tree:
            self._disclosed_bits_N = tree["bits"].numpy().copy()
