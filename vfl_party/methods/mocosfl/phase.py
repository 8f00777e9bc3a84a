"""The sides of a phase. The active party is the paper's server. It has one memory of keys and one
tail for the latents of all parties. A passive party is the paper's client. It sends the latents of
two views, receives the gradient of one, and averages its bottom model with other parties. A single
party trains both halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows, derive_seed, full_batches
from vfl_party.methods.mocosfl.memory import TrainedHalf, TrainedTail, make_zero
from vfl_party.methods.mocosfl.resist import Resistance
from vfl_party.methods.mocosfl.settings import MocoSFLSettings, check_phase
from vfl_party.methods.mocosfl.steps import (
    StepPlan,
    build_bottom,
    build_halves,
    declare_bottoms,
    declare_handout,
    declare_latents,
    get_averaged_parameters,
    make_moving_average,
)
from vfl_party.models import generator
from vfl_party.models.training import backward
from vfl_party.outbound.exchange import Asking
from vfl_party.phases.advice import advise
from vfl_party.phases.context import Party
from vfl_party.phases.diverged import check_own, check_sums
from vfl_party.selfsup.augment import Inputs, check_keys, make_augment
from vfl_party.selfsup.losses import ema_update
from vfl_party.selfsup.towers import require_rows


class ActiveMocoSFL(Phase):
    """Trains the tail. One round is the part of an epoch up to the next average. Later phases get
    the tail as one of the party's models.
    """

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._settings = party, settings
        self._plan = StepPlan.of(party, name, settings)
        self._tail = TrainedTail(party, name, settings)
        channels, height, width = build_halves(party.recipe, settings).latent
        sizes = {"channels": channels, "height": height, "width": width}
        self._latents = party.exchanges.open_answering(
            name, declare_latents(settings), rows=settings.batch_size, **sizes
        )
        self._handout = (
            party.exchanges.open_answering(name, declare_handout(party.models["bottom"]))
            if self._plan.hands_out
            else None
        )
        # The active party also declares this exchange, because the server compares the plans of all
        # parties.
        if not settings.frozen:
            bottom = build_bottom(party.recipe, settings)
            shared = get_averaged_parameters(
                bottom, None if party.recipe.preset == "released" else bottom
            )
            party.exchanges.open_asking(name, declare_bottoms(shared, self._plan.draw))

    def run_round(self, round_: int) -> RoundReport:
        party, steps = self._party, len(self._plan.numbers(round_))
        if round_ == 0:
            self._tail.start_from_tail()
            if self._handout is not None:
                step = StepKey(self.name, 0, 0)
                self._handout.reply_all(
                    step, self._handout.collect(step), dict(party.models["bottom"].state_dict())
                )
        total = make_zero(party)
        drawn = self._plan.participants(round_) if self._plan.draw is not None else None
        for num_done, (step, _) in enumerate(self._plan.steps(round_), 1):
            total += self._run_step(step, drawn)
            party.hooks.tick(self.name, round_, self.rounds, num_done, steps)
        if self._plan.ends_epoch(round_):
            self._tail.end_epoch()
        note = self._plan.note if round_ == 0 else ""
        return RoundReport(
            steps, {"train": {"loss": self._tail.compute_mean(total, steps)}}, note=note
        )

    def _run_step(self, step: StepKey, drawn: Sequence[str] | None = None) -> Tensor:
        """Runs one step. ``drawn``: the parties that take part; None for all."""
        settings = self._settings
        senders: dict[str, dict[str, int]] | None = None
        if drawn is not None:
            senders = {name: {} for name in drawn}
        received = self._latents.collect(step, each=senders)
        q, k = (torch.cat([tensors[name] for tensors in received.values()]) for name in ("q", "k"))
        q.requires_grad_(not settings.frozen)
        loss = self._tail.loss(q, k, [*received])
        loss.backward()  # type: ignore[no-untyped-call]
        check_sums(self._party, step, loss, [] if q.grad is None else [q.grad], received)
        # The reply comes before the update, so that the parties continue meanwhile. Each gradient
        # belongs to the weights before the update.
        if q.grad is None:
            self._latents.acknowledge(step, received)
        else:
            parts = torch.split(q.grad, settings.batch_size)
            self._latents.reply(
                step, {name: {"dq": dq} for name, dq in zip(received, parts, strict=True)}
            )
        self._tail.step()
        return loss.detach()

    def state(self) -> Tree:
        return self._tail.state()

    def load_state(self, tree: Tree) -> None:
        self._tail.load_state(tree)


class AugmentedViews:
    """Makes two views of the batch of each step, in an order that only this party knows.

    Raises InputError if the party's rows do not have the shape ``settings.image``, or if there are
    fewer than a batch.
    """

    def __init__(self, party: Party, phase: str, settings: MocoSFLSettings) -> None:
        self._party, self._phase, self._size = party, phase, settings.batch_size
        self._features = party.rows.need_features()
        if self._features.spec.shape != settings.image:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: image must be the shape of the rows of {party.name}, "
                f"{list(self._features.spec.shape)} (got {list(settings.image)}). Correct image, "
                "or the rows.",
            )
        self._rows = require_rows(party, phase, "local", settings.batch_size)
        augment, self._raw = settings.views(party.recipe.preset)
        check_keys(party, phase, settings.augment)
        self._augment = make_augment(augment, self._features, self._rows)
        # The number of the current pass over the rows, and its batches.
        self._pass: tuple[int, list[Rows]] = (-1, [])

    @property
    def batches(self) -> int:
        """The number of full batches in a pass over the rows."""
        return len(self._rows) // self._size

    def rows(self, number: int) -> Rows:
        """Returns the rows of a step's batch, [B]. After the last batch, the rows begin again.
        ``number``: the number of the step, counted through the phase.
        """
        seed, (pass_, batch) = self._party.own_seed, divmod(number, self.batches)
        if self._pass[0] != pass_:
            seed = derive_seed(seed, self._party.name)
            batches = full_batches(seed, self._phase, pass_, self._rows, self._size)
            self._pass = pass_, batches
        return self._pass[1][batch]

    def make_views(self, number: int) -> tuple[Inputs, Inputs]:
        """Returns two views of the rows of a step. ``number``: see ``rows``."""
        inputs = self._features.inputs(self.rows(number))
        name, batch = self._party.name, number % self.batches
        random = generator(derive_seed(self._party.own_seed, "augment", self._phase, name, number))
        for next_rows in self._pass[1][batch + 1 : batch + 2]:
            self._features.expect(next_rows)
        if self._raw:
            return inputs, self._augment.one_view(inputs, random)
        return self._augment.two_views(inputs, random)


class PassiveMocoSFL(Phase):
    """Trains the bottom model, which is the party's encoder. One round is the part of an epoch up
    to the next average.
    """

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        self.name, self.rounds = name, settings.rounds
        self._party, self._settings = party, settings
        self._views = AugmentedViews(party, name, settings)
        self._plan = StepPlan.of(party, name, settings)
        released = party.recipe.preset == "released"
        self._bottom = party.models["encoder"]
        self._half = TrainedHalf(
            self._bottom, settings.of_bottoms, settings.epochs, by_batch=released
        )
        self._momentum = make_moving_average(self._bottom)
        self._averaged = get_averaged_parameters(self._bottom, None if released else self._momentum)
        channels, height, width = build_halves(party.recipe, settings).latent
        self._sizes = {"channels": channels, "height": height, "width": width}
        self._latents = party.exchanges.open_asking(
            name, declare_latents(settings), rows=settings.batch_size, **self._sizes
        )
        self._handout = (
            party.exchanges.open_asking(name, declare_handout(self._bottom))
            if self._plan.hands_out
            else None
        )
        self._bottoms = (
            None
            if settings.frozen
            else party.exchanges.open_asking(name, declare_bottoms(self._averaged, self._plan.draw))
        )
        self.skippable = self._plan.idle(party.name)

    def run_round(self, round_: int) -> RoundReport:
        plan, is_drawn = self._plan, self._party.name in self._plan.participants(round_)
        report = RoundReport(len(plan.numbers(round_)) if is_drawn else 0)
        # Start with the bottom model of earlier phases or of another run.
        if round_ == 0:
            if self._handout is not None:
                self._bottom.load_state_dict(self._handout.swap(StepKey(self.name, 0, 0), {}))
            self._momentum.load_state_dict(self._bottom.state_dict())
            advise(self._party.hooks.show, plan.warn_of_long_epoch(self._party.name))
        if is_drawn:
            if not self._settings.frozen:
                self._half.catch_up(round_ // self._settings.averages_per_epoch)
            self._run_steps(round_, report.steps)
        if self._bottoms is not None:
            self._average(self._bottoms, report, round_, gives=is_drawn)
        return report

    def _run_steps(self, round_: int, steps: int) -> None:
        party = self._party
        for num_done, (step, number) in enumerate(self._plan.steps(round_), 1):
            rows, (v1, v2) = self._views.rows(number), self._views.make_views(number)
            if self._settings.frozen:
                with torch.no_grad():
                    views_latents = {"q": self._bottom(*v1), "k": self._bottom(*v2)}
                check_own(party, step, views_latents)
                self._latents.swap(step, views_latents, rows)
            else:
                self._train(step, rows, v1, v2)
            party.hooks.tick(self.name, round_, self.rounds, num_done, steps)

    def _train(self, step: StepKey, rows: Rows, v1: Inputs, v2: Inputs) -> None:
        with torch.no_grad():
            ema_update(self._momentum, self._bottom, self._settings.momentum)
            k = self._momentum(*v2)
        q = self._bottom(*v1)
        check_own(self._party, step, {"q": q.detach(), "k": k})
        self._latents.send(step, {"q": q, "k": k}, rows)
        self._half.zero_grad()
        backward(q, self._latents.receive(step)["dq"])
        self._half.step()

    @torch.no_grad()
    def _average(self, weights: Asking, report: RoundReport, round_: int, *, gives: bool) -> None:
        """Sends the bottom model to the server if this party has trained it, and loads the mean if
        this party takes part in the next round. The optimizer's state is not averaged.
        """
        step, receives = (
            StepKey(self.name, round_, 0),
            self._party.name in self._plan.takers(round_),
        )
        if gives:
            check_own(self._party, step, self._averaged)
        if gives and not receives:
            # The other parties need nothing more from this party, and may be far ahead when it
            # returns.
            weights.give(step, self._averaged, partial(self._party.hooks.settled, report))
        if not receives:
            return
        mean = weights.swap(step, self._averaged) if gives else weights.take(step)
        for name, parameter in self._averaged.items():
            parameter.copy_(mean[name])

    def state(self) -> Tree:
        return {"half": self._half.state(), "momentum": dict(self._momentum.state_dict())}

    def load_state(self, tree: Tree) -> None:
        self._half.load_state(tree["half"])
        self._momentum.load_state_dict(tree["momentum"])


# The number of rows that are checked together.
_CHECKED_ROWS = 1024
# The tolerance for scaled pixels outside the range from 0 to 1.
_ROUNDING = 1e-4


class SinglePartyMocoSFL(Phase):
    """Trains both halves at a single party. One round is an epoch. Nothing is exchanged or
    averaged.
    """

    alone_from = 0

    def __init__(self, party: Party, name: str, settings: MocoSFLSettings) -> None:
        _check_single_party(party, name, settings)
        self.name, self.rounds = name, settings.epochs
        self._party, self._settings = party, settings
        self._views = AugmentedViews(party, name, settings)
        self._bottom = party.models["encoder"]
        self._half = TrainedHalf(self._bottom, settings.of_bottoms, settings.epochs)
        self._momentum = make_moving_average(self._bottom)
        self._tail = TrainedTail(party, name, settings)
        self._resistance: Resistance | None = None
        if settings.resist is not None:
            self._resistance = Resistance(
                settings.resist,
                build_halves(party.recipe, settings).latent,
                settings.image,
                seed=derive_seed(party.own_seed, name),
                device=party.device,
                by_ssim=party.recipe.preset == "released",
            )

    def run_round(self, round_: int) -> RoundReport:
        party, batches_per_epoch = self._party, self._views.batches
        if round_ == 0:
            self._tail.start_from_tail()
            self._momentum.load_state_dict(self._bottom.state_dict())
        total, total_ssim = make_zero(party), 0.0
        for batch in range(batches_per_epoch):
            v1, v2 = self._views.make_views(round_ * batches_per_epoch + batch)
            with torch.no_grad():
                ema_update(self._momentum, self._bottom, self._settings.momentum)
                k = self._momentum(*v2)
            q = self._bottom(*v1)
            self._half.zero_grad()
            loss = self._tail.loss(q, k)
            if self._resistance is not None:
                dz, similarity = self._resistance.gradient(q, v1[0].clamp(0, 1))
                total_ssim += similarity
                # This adds the penalty's gradient to the loss, but nothing to its value.
                if dz is not None:
                    term = (q * dz).sum()
                    loss = loss + term - term.detach()
            loss.backward()  # type: ignore[no-untyped-call]
            self._half.step()
            self._tail.step()
            total += loss.detach()
            party.hooks.tick(self.name, round_, self.rounds, batch + 1, batches_per_epoch)
        self._half.end_epoch()
        self._tail.end_epoch()
        metrics = {"loss": self._tail.compute_mean(total, batches_per_epoch)}
        return RoundReport(
            batches_per_epoch,
            {
                "train": metrics
                if self._resistance is None
                else metrics | {"ssim": total_ssim / batches_per_epoch}
            },
        )

    def state(self) -> Tree:
        return {
            "half": self._half.state(),
            "momentum": dict(self._momentum.state_dict()),
            "tail": self._tail.state(),
            "resistance": None if self._resistance is None else self._resistance.state(),
        }

    def load_state(self, tree: Tree) -> None:
        self._half.load_state(tree["half"])
        self._momentum.load_state_dict(tree["momentum"])
        self._tail.load_state(tree["tail"])
        if self._resistance is not None:
            self._resistance.load_state(tree["resistance"])


def _check_single_party(party: Party, phase: str, settings: MocoSFLSettings) -> None:
    """Raises InputError if a setting needs several parties, or if ``resist`` cannot work because of
    the range of pixels.
    """
    check_phase(party.recipe, phase, settings)
    where = f"recipe: phases: {phase}"
    if settings.frozen:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: frozen = true leaves the bottom model unchanged, but {party.name} is "
            "alone, so it was never trained. Remove frozen.",
        )
    for key in ("averages_per_epoch", "sample", "auto_adjust", "shared_memory"):
        if key in settings.model_fields_set:
            raise InputError(
                Code.CONFIG_INVALID,
                (f"{where}: {key} needs several parties, but {party.name} is alone. Remove {key}."),
            )
    if settings.resist is not None and not _has_unit_pixels(party):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: resist compares reconstructions with pixels from 0 to 1, but the pixels of "
            f'{party.name} are outside this range. Set data.scale = "minmax".',
        )


def _has_unit_pixels(party: Party) -> bool:
    """Whether all pixels that the bottom model gets are from 0 to 1."""
    rows = party.rows.get("local")
    # Other rows come from data.unaligned and are scaled in the same way.
    rows = rows[rows < len(party.rows.data.ids)]
    for start in range(0, len(rows), _CHECKED_ROWS):
        low, high = torch.aminmax(
            party.rows.need_features().inputs(rows[start : start + _CHECKED_ROWS])[0]
        )
        if low.item() < -_ROUNDING or high.item() > 1.0 + _ROUNDING:
            return False
    return True
