"""The active side: encrypts gradients, decrypts sums, finds the best split of each node, and stores
the leaves.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.base.devices import count_threads
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.phase import Tree as State
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.homomorphic import (
    CipherError,
    Integers,
    Keys,
    Wire,
    ciphers_for,
    has_heu,
    key_room,
    make_keys,
    together,
)
from vfl_party.homomorphic.none import PlainAdder
from vfl_party.homomorphic.shards import Shards, share_keys, summing
from vfl_party.homomorphic.sums import Summing
from vfl_party.methods.secureboost.columns import Codes, Column, encode_rows, learn, sample_columns
from vfl_party.methods.secureboost.common import (
    begin,
    get_routed_rows,
    make_split,
    note_constant,
    note_importance,
    open_exchanges,
)
from vfl_party.methods.secureboost.exchanges import BEST, STOP
from vfl_party.methods.secureboost.joint_walk import Walk, forest_of
from vfl_party.methods.secureboost.offer import Offer
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.entries import Layout, plan_of
from vfl_party.methods.secureboost.tree.forest import Tree
from vfl_party.methods.secureboost.tree.gains import BestSplit, Gains, Sums
from vfl_party.methods.secureboost.tree.growing_tree import GrowingTree
from vfl_party.methods.secureboost.tree.objective import Doubles, Fixed, base, derivatives
from vfl_party.methods.secureboost.tree.positions import (
    Bools,
    bytes_for_bits,
    open_nodes,
    rows_of_nodes,
    to_sum,
)
from vfl_party.methods.secureboost.tree.sampling import by_gradient, derive_secret_seed, sample
from vfl_party.models.metrics import loss_fn
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics

log = logging.getLogger(__name__)


class ActiveSecureBoost(Phase):
    """One round grows the trees of one round of boosting."""

    def __init__(self, party: Party, name: str, settings: SecureBoostSettings) -> None:
        self.name, self.rounds = name, settings.trees
        self._party, self._settings, self._forest = party, settings, forest_of(party)
        begin(party, name, settings)
        where_ = f"recipe: phases: {name}"
        if party.data.columns is None and settings.first_tree_own:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where_}: first_tree_own needs columns, but {party.name} has none. Remove "
                "first_tree_own.",
            )
        self._train, self._routed = party.rows("train"), get_routed_rows(party, settings)
        self._y_N = self._targets()
        self._columns = (
            learn(party, settings.bins, self._train)
            if party.data.columns is not None
            else list[Column]()
        )
        note_constant(party, name, self._columns)
        self._codes_NF: Codes = np.empty((len(self._routed), 0), np.int8)
        if self._columns:
            self._codes_NF = encode_rows(party, self._columns)[self._routed]
        self._swaps = open_exchanges(party.answering, name, settings)
        self._walk = Walk(party, name, settings, "after the last tree")
        self._passives = [passive.name for passive in party.recipe.passives]
        self._keys: Keys | None = None
        self._shards = Shards(count_threads())
        self._offers: dict[str, Offer] = {}
        self._scores_NK: Doubles | None = None
        self._best, self._least, self._batch = 0, np.inf, 0

    def _targets(self) -> Doubles:
        """Returns the targets of the routed rows. Raises InputError if the training rows have only
        one class.
        """
        party = self._party
        y_N = (
            party.take(party.need_labels()[1], self._routed)
            .reshape(-1)
            .cpu()
            .numpy()
            .astype(np.float64)
        )
        train = y_N[: len(self._train)]
        if party.recipe.task.kind != "regression" and train.min() == train.max():
            raise InputError(
                Code.DATA_INVALID,
                f"{party.name}: all training rows have labels of one class, so trees cannot "
                "learn. Add rows of other classes.",
            )
        return y_N

    # -- rounds of boosting
    # ------------------------------------------------------------

    def run_round(self, round_: int) -> RoundReport:
        party, settings, outputs = self._party, self._settings, self._party.recipe.task.outputs
        self._batch = 0
        if self._scores_NK is None:
            self._forest.columns = self._columns
            self._forest.base = base(party.recipe.task, self._y_N[: len(self._train)]).tolist()
            self._scores_NK = np.tile(np.array(self._forest.base), (len(self._routed), 1))
        if self._keys is None and self._passives:
            self._open(round_)
        with_others = bool(self._passives) and (round_ > 0 or not settings.first_tree_own)
        before_NK = self._scores_NK.copy()
        rows, weights_R = self._sample_rows(round_, before_NK, with_others)
        for k in range(outputs):
            g_R, h_R = derivatives(party.recipe.task, before_NK[rows], self._y_N[rows], k)
            growing = self._begin(round_, rows, g_R * weights_R, h_R * weights_R, with_others)
            self._grow(growing, round_)
            self._forest.trees.append(growing.tree)
            self._scores_NK[:, k] += growing.values
            party.tick(self.name, round_, self.rounds, k + 1, outputs)
        metrics, done = self._judge(round_)
        if not done and round_ + 1 < self.rounds:
            return RoundReport(outputs, metrics)
        return self._end(round_, metrics, done)

    def _sample_rows(
        self, round_: int, scores_NK: Doubles, with_others: bool
    ) -> tuple[Rows, Doubles]:
        """Returns the rows of a round and their weights; with GOSS, sends the rows to the passive
        parties.
        """
        recipe, settings, count = self._party.recipe, self._settings, len(self._train)
        if settings.goss is None:
            rows = sample(recipe.seed, self.name, round_, count, settings)
            return rows, np.ones(len(rows))
        y_N, classes = self._y_N[:count], range(recipe.task.outputs)
        g_KN = np.stack([derivatives(recipe.task, scores_NK[:count], y_N, k)[0] for k in classes])
        seed = derive_seed(derive_secret_seed(self._party.own_seed, self.name, y_N), round_)
        rows, weights_R = by_gradient(settings.goss, np.abs(g_KN).sum(axis=0), seed)
        if self._swaps.sample is not None and with_others:
            step, chosen = self._step(round_), np.zeros(count, bool)
            chosen[rows] = True
            self._swaps.sample.collect(step)
            self._swaps.sample.reply_all(
                step,
                self._passives,
                {"sampled": torch.from_numpy(np.packbits(chosen))},
                self._train,
            )
        return rows, weights_R

    def _end(self, round_: int, metrics: dict[str, dict[str, float]], done: bool) -> RoundReport:
        """Removes the trees after the best one, and scores the splits of the data."""
        party, settings, outputs = self._party, self._settings, self._party.recipe.task.outputs
        if settings.early_stopping is not None:
            del self._forest.trees[self._best * outputs :]
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        for split in settings.splits:
            rows = party.rows(split)
            scored = self._walk.score(rows, StepKey(self.name, round_, self._batch))
            self._batch += scored.steps
            if len(rows):
                predictions[split] = rows, scored.outputs
        metrics |= compute_metrics(party, predictions)
        note_importance(party, self.name, self._forest.importance(), "gain")
        count = len(self._forest.trees)
        sent = f"; gradients {settings.protection}" if party.recipe.passives else ""
        note = f"{self.name}: {count} {'tree' if count == 1 else 'trees'}{sent}"
        return RoundReport(outputs, metrics, done=done, note=note, predictions=predictions)

    def _judge(self, round_: int) -> tuple[dict[str, dict[str, float]], bool]:
        """Returns the losses after a round, and whether the phase ends here."""
        task, split = self._party.recipe.task, len(self._train)
        assert self._scores_NK is not None  # noqa: S101 - made by run_round
        kind = torch.int64 if task.kind == "multiclass" else torch.float64
        y = torch.from_numpy(self._y_N).to(kind)
        y, scores = (
            y if task.kind == "multiclass" else y[:, None],
            torch.from_numpy(self._scores_NK),
        )
        loss = loss_fn(task)
        metrics = {"train": {"loss": float(loss(scores[:split], y[:split]))}}
        if self._settings.early_stopping is None:
            return metrics, False
        value = float(loss(scores[split:], y[split:]))
        metrics["validation"] = {"loss": value}
        verdict = 0
        if value < self._least:
            self._best, self._least, verdict = round_ + 1, value, BEST
        done = round_ + 1 - self._best >= self._settings.early_stopping
        verdict |= STOP * done
        if self._swaps.verdict is not None and self._passives:
            step = self._step(round_)
            self._swaps.verdict.collect(step)
            bits = torch.tensor([verdict], dtype=torch.uint8)
            self._swaps.verdict.reply_all(step, self._passives, {"verdict": bits})
        return metrics, done

    def _open(self, round_: int) -> None:
        """Makes the keys of this generation, and sends the public key."""
        step, settings = self._step(round_), self._settings
        received = self._swaps.key.collect(step)
        for party, tensors in received.items():
            self._check_offer(party, tensors["facts"].tolist()[1:])
        with_heu = has_heu() and all(int(tensors["facts"][0]) for tensors in received.values())
        keys, public = make_keys(settings.encryption, settings.key_bits, with_heu=with_heu)
        self._keys = share_keys(keys, self._shards)
        room = key_room(settings.encryption, settings.key_bits)
        written = len(public).to_bytes(4, "little") + public.ljust(room - 4, b"\0")
        key = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        self._swaps.key.reply_all(step, self._passives, {"key": key})

    def _check_offer(self, party: str, facts: list[int]) -> None:
        """Stores what a party's columns offer, before the first gradients are sent. Raises
        PeerError.
        """
        offer = Offer.read(facts, self._settings)
        if offer is None:
            raise self._wrong(
                party, "declares splits that columns with this number of bins cannot have"
            )
        if self._offers.setdefault(party, offer) != offer:
            raise self._wrong(party, "declares other columns than before the interruption")
        log.info("phase %s: %s offers %s", self.name, party, offer, extra={"event": "offered"})

    # -- one tree
    # ------------------------------------------------------------

    def _begin(
        self, round_: int, rows: Rows, g_N: Doubles, h_N: Doubles, with_others: bool
    ) -> GrowingTree:
        """Prepares a tree, and sends its gradients to the passive parties."""
        settings, party, count = self._settings, self._party, len(self._routed)
        fixed = Fixed.of(g_N, h_N)
        g, h = fixed.integers(g_N), fixed.integers(h_N)
        share, width = settings.column_sample, len(self._columns)
        own = (
            sample_columns(party.own_seed, self.name, party.name, round_, width, share)
            if width
            else []
        )
        layout = Layout.of(self._columns, own)
        in_sample = np.zeros(count, bool)
        in_sample[rows] = True
        sizes = self._send(round_, g, h) if with_others else {}
        return GrowingTree(
            Tree(),
            settings,
            Gains(settings, fixed),
            rows,
            np.stack([g, h], axis=1),
            np.zeros(count, np.uint8),
            np.zeros(count),
            layout,
            self._summing(g, h, rows, layout),
            sizes,
            in_sample,
        )

    def _summing(self, g_R: Integers, h_R: Integers, rows: Rows, layout: Layout) -> Summing:
        """Prepares the sums of this party's own entries from a tree's gradients."""
        own, plan = PlainAdder(), plan_of(self._columns, layout)
        wire_R = own.raw(np.stack([g_R, h_R], axis=1))
        return summing(self._shards, own, wire_R, self._codes_NF[rows], plan)

    def _send(self, round_: int, g_N: Integers, h_N: Integers) -> dict[str, list[int]]:
        """Sends the encrypted gradients of a tree; returns the sizes of each party's entries."""
        step = self._step(round_)
        assert self._keys is not None  # noqa: S101 - made by run_round
        ciphers = torch.from_numpy(self._keys.encrypt(g_N, h_N).copy())
        parts = {name: {"parts": 1 + offer.columns} for name, offer in self._offers.items()}
        received = self._swaps.gradients.collect(step, each=parts)
        sizes_by_party = {party: tensors["sizes"].tolist() for party, tensors in received.items()}
        for party, sizes in sizes_by_party.items():
            if not self._offers[party].allows(np.array(sizes), self._settings):
                raise self._wrong(
                    party,
                    f"declares {sum(sizes):,} splits for a tree, which do not match its declared "
                    "columns",
                )
        (name,) = self._swaps.gradients.exchange.down.tensors
        self._swaps.gradients.reply_all(step, self._passives, {name: ciphers}, self._routed)
        return sizes_by_party

    def _grow(self, of: GrowingTree, round_: int) -> None:
        """Grows one tree, level by level."""
        for level in range(self._settings.depth):
            present = open_nodes(of.nodes)
            entries = self._collect(of, round_, present)
            step_sums = self._step(round_, -1)
            best = of.best_splits(present, entries)
            self._tell(of, step_sums, present, best)
            of.settle(level + 1, self._move(of, level, present, best, round_))
            if of.sizes:
                last = level + 1 == self._settings.depth
                moved = torch.from_numpy(of.nodes[:0] if last else of.nodes.copy())
                step = self._step(round_, -1)
                self._swaps.partition.reply_all(step, of.sizes, {"nodes": moved}, self._routed)
            if not open_nodes(of.nodes):
                return

    def _collect(
        self, of: GrowingTree, round_: int, present: list[int]
    ) -> dict[str, dict[int, Sums]]:
        """Returns {party: {node: the sums of its entries}}, this party first. The sums of every
        second sibling follow by subtraction.
        """
        sums = {self._party.name: of.own_sums(present)}
        if not of.sizes:
            return sums
        wanted = to_sum(of.nodes, of.in_sample)
        counts = {name: sum(sizes) for name, sizes in of.sizes.items()}
        at_once = together(self._settings.encryption, self._settings.key_bits)
        sizes = {
            name: {"sums": ciphers_for(len(wanted) * count, at_once)}
            for name, count in counts.items()
        }
        received = self._swaps.sums.collect(self._step(round_), each=sizes)
        for party, tensors in received.items():
            (wire,), count = tensors.values(), counts[party]
            whole = self._read(party, wire.cpu().numpy(), len(wanted) * count)
            mine = {
                node: Sums(
                    whole.g[at * count : (at + 1) * count], whole.h[at * count : (at + 1) * count]
                )
                for at, node in enumerate(wanted)
            }
            before = of.sums.get(party, {})
            mine |= {
                node: before[node // 2] - mine[node ^ 1] for node in present if node not in mine
            }
            self._check(of, party, mine)
            sums[party] = mine
        of.sums = sums
        return sums

    def _read(self, party: str, wire: Wire, count: int) -> Sums:
        assert self._keys is not None  # noqa: S101 - made by run_round
        try:
            return Sums(*self._keys.decrypt(wire, count))
        except CipherError as error:
            raise self._wrong(party, f"sends a sum that cannot be used: {error}") from None

    def _check(self, of: GrowingTree, party: str, sums_: dict[int, Sums]) -> None:
        """Raises PeerError if a sum cannot be that of rows in its node."""
        if not all(of.fits(node, entry_sums) for node, entry_sums in sums_.items()):
            raise self._wrong(party, "sends sums that do not match the gradients that it received")
        if not all(of.adds_up(party, node, entry_sums) for node, entry_sums in sums_.items()):
            raise self._wrong(
                party, "sends sums of categories that do not add up to those of all rows"
            )

    def _tell(
        self,
        of: GrowingTree,
        step: StepKey,
        present: list[int],
        best: dict[int, tuple[str, BestSplit]],
    ) -> None:
        """Sends each passive party the entries that were chosen."""
        replies = {}
        for party, sizes in of.sizes.items():
            chosen = np.zeros((len(present), sum(sizes)), np.uint8)
            for at, node in enumerate(present):
                if node in best and best[node][0] == party:
                    chosen[at] = best[node][1].flags
            replies[party] = {"chosen": torch.from_numpy(chosen)}
        if replies:
            self._swaps.sums.reply(step, replies)

    def _move(
        self,
        of: GrowingTree,
        level: int,
        present: list[int],
        best: dict[int, tuple[str, BestSplit]],
        round_: int,
    ) -> dict[int, Bools]:
        """Stores the splits and returns {split node: whether each of its rows goes left}. Raises
        PeerError.
        """
        won = {
            party: [node for node in best if best[node][0] == party]
            for party in (self._party.name, *of.sizes)
        }
        lefts: dict[int, Bools] = {}
        for node, (party, choice) in best.items():
            of.tree.owners[level, node], of.tree.gains[level, node] = party, choice.gain
            if party == self._party.name:
                here = of.nodes == node
                split = make_split(
                    self._columns, of.layout, choice.flags, self._codes_NF[here & of.in_sample]
                )
                of.tree.splits[level, node] = split
                lefts[node] = split.goes_left(self._codes_NF[here])
        if of.sizes:
            counts = {party: len(rows_of_nodes(of.nodes, won[party])) for party in of.sizes}
            received = self._swaps.partition.collect(
                self._step(round_),
                each={party: {"packed": bytes_for_bits(count)} for party, count in counts.items()},
            )
            for party, tensors in received.items():
                bits = np.unpackbits(tensors["left"].cpu().numpy(), count=counts[party]).astype(
                    bool
                )
                for node in won[party]:
                    here = int((of.nodes == node).sum())
                    lefts[node], bits = bits[:here], bits[here:]
                    if not of.agrees(party, node, best[node][1].flags, lefts[node]):
                        raise self._wrong(
                            party, "divides rows differently from the sums that it sent"
                        )
        for node in present:
            if node not in lefts:
                of.leaf(level, node)
        return lefts

    # -- helper functions of a round
    # ------------------------------------------------------------

    def _step(self, round_: int, again: int = 0) -> StepKey:
        """Returns the next step, or with ``again`` = -1 the last one once more."""
        self._batch += 1 + again
        return StepKey(self.name, round_, self._batch - 1)

    def _wrong(self, party: str, what: str) -> PeerError:
        return PeerError(Code.MALFORMED_MESSAGE, f"phase {self.name}: {party} {what}", party=party)

    def close(self) -> None:
        self._shards.close()

    def state(self) -> State:
        assert self._scores_NK is not None  # noqa: S101 - a round has run
        offers = {name: offer.facts() for name, offer in self._offers.items()}
        scores = torch.from_numpy(self._scores_NK)
        return {"scores": scores, "best": self._best, "least": float(self._least), "offers": offers}

    def load_state(self, tree: State) -> None:
        self._scores_NK = tree["scores"].numpy().copy()
        self._best, self._least = tree["best"], tree["least"]
        # Checkpoints of earlier releases have no offers.
        facts = tree.get("offers", {})
        offers = {name: Offer.read(numbers, self._settings) for name, numbers in facts.items()}
        self._offers = {name: offer for name, offer in offers.items() if offer is not None}
