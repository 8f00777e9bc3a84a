"""The active party's side: encrypts gradients, decrypts sums, finds the best split of each node,
and stores the leaves.
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
    count_sums_per_cipher,
    has_heu,
    key_room,
    make_keys,
)
from vfl_party.homomorphic.scheme import PlainAdder
from vfl_party.homomorphic.shards import Shards, make_summing, share_keys
from vfl_party.homomorphic.sums import Summing
from vfl_party.methods.secureboost.columns import (
    Codes,
    Column,
    Layout,
    Offer,
    encode_rows,
    learn_columns,
    plan_of,
    sample_columns,
)
from vfl_party.methods.secureboost.common import (
    check_phase,
    get_routed_rows,
    log_constant_columns,
    log_importance,
    make_split,
    open_exchanges,
)
from vfl_party.methods.secureboost.forest import (
    Bools,
    Tree,
    bytes_for_bits,
    choose_summed_nodes,
    list_open_nodes,
    rows_of_nodes,
)
from vfl_party.methods.secureboost.growing import (
    BestSplit,
    Doubles,
    Fixed,
    Gains,
    GrowingTree,
    Sums,
    by_gradient,
    compute_base,
    derivatives,
    derive_secret_seed,
    sample_rows,
)
from vfl_party.methods.secureboost.joint_walk import Walk, forest_of
from vfl_party.methods.secureboost.settings import BEST, STOP, SecureBoostSettings
from vfl_party.models.losses import loss_fn
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics

log = logging.getLogger(__name__)


class ActiveSecureBoost(Phase):
    """Grows trees. One round of the phase is one round of boosting."""

    def __init__(self, party: Party, name: str, settings: SecureBoostSettings) -> None:
        self.name, self.rounds = name, settings.trees
        self._party, self._settings, self._forest = party, settings, forest_of(party)
        check_phase(party, name, settings)
        where = f"recipe: phases: {name}"
        if party.rows.data.columns is None and settings.first_tree_own:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: first_tree_own needs columns, but {party.name} has none. Remove "
                "first_tree_own.",
            )
        self._train, self._routed = party.rows.get("train"), get_routed_rows(party, settings)
        self._y_N = self._get_targets()
        self._columns = (
            learn_columns(party, settings.bins, self._train)
            if party.rows.data.columns is not None
            else list[Column]()
        )
        log_constant_columns(party, name, self._columns)
        self._codes_NF: Codes = np.empty((len(self._routed), 0), np.int8)
        if self._columns:
            self._codes_NF = encode_rows(party, self._columns)[self._routed]
        self._swaps = open_exchanges(party.exchanges.open_answering, name, settings)
        self._walk = Walk(party, name, settings, "after the last tree")
        self._passives = [passive.name for passive in party.recipe.passives]
        self._keys: Keys | None = None
        self._shards = Shards(count_threads())
        self._offers: dict[str, Offer] = {}
        self._scores_NK: Doubles | None = None
        self._best, self._least, self._batch = 0, np.inf, 0

    def _get_targets(self) -> Doubles:
        """Returns the targets of the routed rows. Raises InputError if the training rows have only
        one class.
        """
        party = self._party
        y_N = (
            party.rows.take(party.rows.need_labels()[1], self._routed)
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
            self._forest.base = compute_base(
                party.recipe.task, self._y_N[: len(self._train)]
            ).tolist()
            self._scores_NK = np.tile(np.array(self._forest.base), (len(self._routed), 1))
        if self._keys is None and self._passives:
            self._open(round_)
        with_passives = bool(self._passives) and (round_ > 0 or not settings.first_tree_own)
        before_NK = self._scores_NK.copy()
        rows, weights_R = self._sample_rows(round_, before_NK, with_passives)
        for k in range(outputs):
            g_R, h_R = derivatives(party.recipe.task, before_NK[rows], self._y_N[rows], k)
            growing = self._begin_tree(
                round_, rows, g_R * weights_R, h_R * weights_R, with_passives
            )
            self._grow_tree(growing, round_)
            self._forest.trees.append(growing.tree)
            self._scores_NK[:, k] += growing.values
            party.hooks.tick(self.name, round_, self.rounds, k + 1, outputs)
        metrics, done = self._compute_losses(round_)
        if not done and round_ + 1 < self.rounds:
            return RoundReport(outputs, metrics)
        return self._finish_phase(round_, metrics, done)

    def _sample_rows(
        self, round_: int, scores_NK: Doubles, with_passives: bool
    ) -> tuple[Rows, Doubles]:
        """Returns the rows of a round and their weights. With GOSS, it sends the rows to the
        passive parties.
        """
        recipe, settings, count = self._party.recipe, self._settings, len(self._train)
        if settings.goss is None:
            rows = sample_rows(recipe.seed, self.name, round_, count, settings)
            return rows, np.ones(len(rows))
        y_N, classes = self._y_N[:count], range(recipe.task.outputs)
        g_KN = np.stack([derivatives(recipe.task, scores_NK[:count], y_N, k)[0] for k in classes])
        seed = derive_seed(derive_secret_seed(self._party.own_seed, self.name, y_N), round_)
        rows, weights_R = by_gradient(settings.goss, np.abs(g_KN).sum(axis=0), seed)
        if self._swaps.sample is not None and with_passives:
            step, is_sampled = self._next_step(round_), np.zeros(count, bool)
            is_sampled[rows] = True
            self._swaps.sample.collect(step)
            self._swaps.sample.reply_all(
                step,
                self._passives,
                {"sampled": torch.from_numpy(np.packbits(is_sampled))},
                self._train,
            )
        return rows, weights_R

    def _finish_phase(
        self, round_: int, metrics: dict[str, dict[str, float]], done: bool
    ) -> RoundReport:
        """Removes the trees after the best round, and evaluates the splits of the data."""
        party, settings, outputs = self._party, self._settings, self._party.recipe.task.outputs
        if settings.early_stopping is not None:
            del self._forest.trees[self._best * outputs :]
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        for split in settings.splits:
            rows = party.rows.get(split)
            scored = self._walk.score(rows, StepKey(self.name, round_, self._batch))
            self._batch += scored.steps
            if len(rows):
                predictions[split] = rows, scored.outputs
        metrics |= compute_metrics(party, predictions)
        log_importance(party, self.name, self._forest.importance(), "gain")
        count = len(self._forest.trees)
        sent = f"; gradients {settings.protection}" if party.recipe.passives else ""
        note = f"{self.name}: {count} {'tree' if count == 1 else 'trees'}{sent}"
        return RoundReport(outputs, metrics, done=done, note=note, predictions=predictions)

    def _compute_losses(self, round_: int) -> tuple[dict[str, dict[str, float]], bool]:
        """Returns the losses after a round, and whether early stopping ends the phase."""
        task, num_train = self._party.recipe.task, len(self._train)
        assert self._scores_NK is not None  # noqa: S101 - made by run_round
        kind = torch.int64 if task.kind == "multiclass" else torch.float64
        y = torch.from_numpy(self._y_N).to(kind)
        y, scores = (
            y if task.kind == "multiclass" else y[:, None],
            torch.from_numpy(self._scores_NK),
        )
        loss = loss_fn(task)
        metrics = {"train": {"loss": float(loss(scores[:num_train], y[:num_train]))}}
        if self._settings.early_stopping is None:
            return metrics, False
        value = float(loss(scores[num_train:], y[num_train:]))
        metrics["validation"] = {"loss": value}
        verdict = 0
        if value < self._least:
            self._best, self._least, verdict = round_ + 1, value, BEST
        done = round_ + 1 - self._best >= self._settings.early_stopping
        verdict |= STOP * done
        if self._swaps.verdict is not None and self._passives:
            step = self._next_step(round_)
            self._swaps.verdict.collect(step)
            bits = torch.tensor([verdict], dtype=torch.uint8)
            self._swaps.verdict.reply_all(step, self._passives, {"verdict": bits})
        return metrics, done

    def _open(self, round_: int) -> None:
        """Makes new keys for this generation, and sends the public key to the passive parties."""
        step, settings = self._next_step(round_), self._settings
        received = self._swaps.key.collect(step)
        for party, tensors in received.items():
            self._check_offer(party, tensors["facts"].tolist()[1:])
        with_heu = has_heu() and all(int(tensors["facts"][0]) for tensors in received.values())
        keys, public = make_keys(settings.encryption, settings.key_bits, with_heu=with_heu)
        self._keys = share_keys(keys, self._shards)
        key_room_bytes = key_room(settings.encryption, settings.key_bits)
        message = len(public).to_bytes(4, "little") + public.ljust(key_room_bytes - 4, b"\0")
        key = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._swaps.key.reply_all(step, self._passives, {"key": key})

    def _check_offer(self, party: str, facts: list[int]) -> None:
        """Checks and stores a party's declaration of its possible splits, before the first
        gradients are sent. Raises PeerError if the declaration is impossible or has changed.
        """
        offer = Offer.read(facts, self._settings)
        if offer is None:
            raise self._make_error(
                party, "declares splits that are impossible for columns with this number of bins"
            )
        if self._offers.setdefault(party, offer) != offer:
            raise self._make_error(party, "declares different columns than before the interruption")
        log.info("phase %s: %s offers %s", self.name, party, offer, extra={"event": "offered"})

    # -- one tree
    # ------------------------------------------------------------

    def _begin_tree(
        self, round_: int, rows: Rows, g_N: Doubles, h_N: Doubles, with_passives: bool
    ) -> GrowingTree:
        """Prepares a tree, and sends the encrypted gradients to the passive parties."""
        settings, party, count = self._settings, self._party, len(self._routed)
        fixed = Fixed.of(g_N, h_N)
        g, h = fixed.to_integers(g_N), fixed.to_integers(h_N)
        share, width = settings.column_sample, len(self._columns)
        chosen_columns = (
            sample_columns(party.own_seed, self.name, party.name, round_, width, share)
            if width
            else []
        )
        layout = Layout.of(self._columns, chosen_columns)
        in_sample = np.zeros(count, bool)
        in_sample[rows] = True
        sizes = self._send_gradients(round_, g, h) if with_passives else {}
        return GrowingTree(
            Tree(),
            settings,
            Gains(settings, fixed),
            rows,
            np.stack([g, h], axis=1),
            np.zeros(count, np.uint8),
            np.zeros(count),
            layout,
            self._prepare_summing(g, h, rows, layout),
            sizes,
            in_sample,
        )

    def _prepare_summing(self, g_R: Integers, h_R: Integers, rows: Rows, layout: Layout) -> Summing:
        """Prepares the sums of a tree's gradients for the active party's own entries."""
        adder, plan = PlainAdder(), plan_of(self._columns, layout)
        wire_R = adder.raw(np.stack([g_R, h_R], axis=1))
        return make_summing(self._shards, adder, wire_R, self._codes_NF[rows], plan)

    def _send_gradients(self, round_: int, g_N: Integers, h_N: Integers) -> dict[str, list[int]]:
        """Sends the encrypted gradients for a tree. Returns {passive party: its numbers of
        entries}, which the parties declare; see ``Layout.sizes``.
        """
        step = self._next_step(round_)
        assert self._keys is not None  # noqa: S101 - made by run_round
        ciphers = torch.from_numpy(self._keys.encrypt(g_N, h_N).copy())
        parts = {name: {"parts": 1 + offer.columns} for name, offer in self._offers.items()}
        received = self._swaps.gradients.collect(step, each=parts)
        sizes_by_party = {party: tensors["sizes"].tolist() for party, tensors in received.items()}
        for party, sizes in sizes_by_party.items():
            if not self._offers[party].allows(np.array(sizes), self._settings):
                raise self._make_error(
                    party,
                    f"declares {sum(sizes):,} splits for a tree, which do not match its declared "
                    "columns",
                )
        (name,) = self._swaps.gradients.exchange.down.tensors
        self._swaps.gradients.reply_all(step, self._passives, {name: ciphers}, self._routed)
        return sizes_by_party

    def _grow_tree(self, tree: GrowingTree, round_: int) -> None:
        """Grows one tree, level by level."""
        for level in range(self._settings.depth):
            present = list_open_nodes(tree.nodes)
            entries = self._collect_sums(tree, round_, present)
            step_sums = self._next_step(round_, -1)
            best = tree.best_splits(present, entries)
            self._send_choices(tree, step_sums, present, best)
            tree.settle(level + 1, self._divide_rows(tree, level, present, best, round_))
            if tree.sizes:
                last = level + 1 == self._settings.depth
                moved = torch.from_numpy(tree.nodes[:0] if last else tree.nodes.copy())
                step = self._next_step(round_, -1)
                self._swaps.partition.reply_all(step, tree.sizes, {"nodes": moved}, self._routed)
            if not list_open_nodes(tree.nodes):
                return

    def _collect_sums(
        self, tree: GrowingTree, round_: int, present: list[int]
    ) -> dict[str, dict[int, Sums]]:
        """Returns {party: {node: the sums of the party's entries}}, this party first. Only one of
        two sibling nodes is summed. The sums of its sibling follow by subtraction from the parent.
        """
        sums = {self._party.name: tree.compute_own_sums(present)}
        if not tree.sizes:
            return sums
        summed_nodes = choose_summed_nodes(tree.nodes, tree.in_sample)
        counts = {name: sum(sizes) for name, sizes in tree.sizes.items()}
        sums_per_cipher = count_sums_per_cipher(self._settings.encryption, self._settings.key_bits)
        sizes = {
            name: {"sums": ciphers_for(len(summed_nodes) * count, sums_per_cipher)}
            for name, count in counts.items()
        }
        received = self._swaps.sums.collect(self._next_step(round_), each=sizes)
        for party, tensors in received.items():
            (wire,), count = tensors.values(), counts[party]
            all_sums = self._decrypt_sums(party, wire.cpu().numpy(), len(summed_nodes) * count)
            node_sums = {
                node: Sums(
                    all_sums.g[place * count : (place + 1) * count],
                    all_sums.h[place * count : (place + 1) * count],
                )
                for place, node in enumerate(summed_nodes)
            }
            parent_sums = tree.sums.get(party, {})
            node_sums |= {
                node: parent_sums[node // 2] - node_sums[node ^ 1]
                for node in present
                if node not in node_sums
            }
            self._check_sums(tree, party, node_sums)
            sums[party] = node_sums
        tree.sums = sums
        return sums

    def _decrypt_sums(self, party: str, wire: Wire, count: int) -> Sums:
        assert self._keys is not None  # noqa: S101 - made by run_round
        try:
            return Sums(*self._keys.decrypt(wire, count))
        except CipherError as error:
            raise self._make_error(
                party, f"sends a sum that cannot be decrypted: {error}"
            ) from None

    def _check_sums(self, tree: GrowingTree, party: str, sums_: dict[int, Sums]) -> None:
        """Raises PeerError if sums are impossible for the rows of their node."""
        if not all(tree.are_possible(node, entry_sums) for node, entry_sums in sums_.items()):
            raise self._make_error(
                party, "sends sums that do not match the gradients that it received"
            )
        if not all(tree.add_up(party, node, entry_sums) for node, entry_sums in sums_.items()):
            raise self._make_error(
                party, "sends sums of categories that do not add up to the sum over all rows"
            )

    def _send_choices(
        self,
        tree: GrowingTree,
        step: StepKey,
        present: list[int],
        best: dict[int, tuple[str, BestSplit]],
    ) -> None:
        """Sends each passive party the flags of its chosen entries."""
        replies = {}
        for party, sizes in tree.sizes.items():
            chosen = np.zeros((len(present), sum(sizes)), np.uint8)
            for place, node in enumerate(present):
                if node in best and best[node][0] == party:
                    chosen[place] = best[node][1].flags
            replies[party] = {"chosen": torch.from_numpy(chosen)}
        if replies:
            self._swaps.sums.reply(step, replies)

    def _divide_rows(
        self,
        tree: GrowingTree,
        level: int,
        present: list[int],
        best: dict[int, tuple[str, BestSplit]],
        round_: int,
    ) -> dict[int, Bools]:
        """Stores the splits of a level and returns {split node: whether each of its rows goes
        left}. Raises PeerError if a party's answer does not match its sums.
        """
        nodes_by_party = {
            party: [node for node in best if best[node][0] == party]
            for party in (self._party.name, *tree.sizes)
        }
        lefts: dict[int, Bools] = {}
        for node, (party, choice) in best.items():
            tree.tree.owners[level, node], tree.tree.gains[level, node] = party, choice.gain
            if party == self._party.name:
                here = tree.nodes == node
                split = make_split(
                    self._columns, tree.layout, choice.flags, self._codes_NF[here & tree.in_sample]
                )
                tree.tree.splits[level, node] = split
                lefts[node] = split.goes_left(self._codes_NF[here])
        if tree.sizes:
            counts = {
                party: len(rows_of_nodes(tree.nodes, nodes_by_party[party])) for party in tree.sizes
            }
            received = self._swaps.partition.collect(
                self._next_step(round_),
                each={party: {"packed": bytes_for_bits(count)} for party, count in counts.items()},
            )
            for party, tensors in received.items():
                bits = np.unpackbits(tensors["left"].cpu().numpy(), count=counts[party]).astype(
                    bool
                )
                for node in nodes_by_party[party]:
                    here = int((tree.nodes == node).sum())
                    lefts[node], bits = bits[:here], bits[here:]
                    if not tree.agrees(party, node, best[node][1].flags, lefts[node]):
                        raise self._make_error(
                            party, "divides rows differently from the sums that it sent"
                        )
        for node in present:
            if node not in lefts:
                tree.make_leaf(level, node)
        return lefts

    # -- helper functions of a round
    # ------------------------------------------------------------

    def _next_step(self, round_: int, again: int = 0) -> StepKey:
        """Returns the next step, or with ``again`` = -1 the last step again."""
        self._batch += 1 + again
        return StepKey(self.name, round_, self._batch - 1)

    def _make_error(self, party: str, problem: str) -> PeerError:
        return PeerError(
            Code.MALFORMED_MESSAGE, f"phase {self.name}: {party} {problem}", party=party
        )

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
        # Checkpoints of earlier releases have no ``offers``.
        facts = tree.get("offers", {})
        offers = {name: Offer.read(numbers, self._settings) for name, numbers in facts.items()}
        self._offers = {name: offer for name, offer in offers.items() if offer is not None}
