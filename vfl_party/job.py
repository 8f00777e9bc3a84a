"""A party's job for one generation: models and phases made afresh from data and recipe, and the exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.data import DataSettings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError, VflError
from vfl_common.link import Hub, Link
from vfl_party.context import MakeEncoder, Party, Rows, rows_digest
from vfl_party.data import Features, Labels, Preprocessor, Table
from vfl_party.exchange import NOTHING, TensorHub, TensorLink, expect
from vfl_party.methods import handed_on
from vfl_party.models import InputSpec, build_top, combined_size, seeded
from vfl_party.phase import Phase, Tree
from vfl_party.runner import Job
from vfl_party.seeds import derive_seed, split_rows

OPENING = "open"  # the phase in which the rows are compared
ROWS = expect(Kind.ROWS, count=(torch.int64, (1,)), digest=(torch.uint8, (32,)))  # what each passive party says of them
BeginWith = Callable[[dict[str, nn.Module]], None]
Spread = Callable[[nn.Module, InputSpec], Callable[..., Tensor]]


class Transport(Protocol):
    """One generation's exchange; ``app`` makes it, over gRPC."""

    link: Link | None  # to the active party
    hub: Hub | None  # the active party's own
    server: Link | None  # to the aggregation server, where a phase aggregates

    def end(self, error: VflError) -> None: ...
    def close(self, error: BaseException | None) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A party's rows, ready for encoders."""

    table: Table
    preprocessor: Preprocessor | None  # None: an active party with labels only
    features: Features | None
    labels: Labels | None
    targets: Tensor | None
    splits: dict[str, Rows]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of ids, encoder inputs and targets, hexadecimal: equal only for the same data, prepared alike."""
        digest = hashlib.sha256("\x00".join(self.table.ids).encode())
        tensors = [self.targets] if self.features is None else [self.features.x, self.features.categories, self.targets]
        for tensor in tensors:
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


def encoder_settings(recipe: Recipe, name: str, own: EncoderSettings | None) -> EncoderSettings:
    """The party file's encoder, else the recipe's for this party, else the recipe's for all."""
    place = recipe.party(name)
    return own or (place.encoder if place is not None else None) or recipe.model.encoder


def divide_rows(recipe: Recipe, count: int) -> dict[str, Rows]:
    """The splits of so many rows. Raises InputError where there are fewer training rows than are to be labelled."""
    rows = recipe.rows
    splits = split_rows(
        recipe.seed,
        count,
        validation=rows.validation,
        test=rows.test,
        aligned=rows.aligned,
        labelled=rows.labelled,
    )
    if rows.labelled is not None and len(splits["train"]) < rows.labelled:
        text = f"recipe: rows: labelled = {rows.labelled}, but only {len(splits['aligned'])} rows are aligned and for"
        raise InputError(Code.CONFIG_INVALID, f"{text} training; ask for fewer, or give more rows")
    return splits


def prepare(
    recipe: Recipe,
    name: str,
    table: Table,
    settings: DataSettings,
    encoder: EncoderSettings,
    unaligned: Table | None = None,
) -> Prepared:
    """Splits the rows and learns statistics, vocabularies and classes from the training rows. Raises InputError.

    ``unaligned``: rows that this party alone has; they come after those of ``table``, in the split ``local``.
    """
    place, splits = recipe.party(name), divide_rows(recipe, len(table.ids))
    preprocessor = features = labels = targets = None
    if place is None or place.features:
        preprocessor = Preprocessor.fit(
            table,
            splits["local"],
            one_hot=encoder.kind != "tabular",
            flatten=encoder.kind in ("mlp", "tabular"),
            settings=settings,
        )
        features = preprocessor.transform(table)
        if unaligned is not None:
            features = features.followed_by(preprocessor.transform(unaligned))
            own = np.arange(len(table), len(table) + len(unaligned), dtype=np.int64)
            splits["local"] = np.concatenate([splits["local"], own])
    if place is not None and place.role == "active":
        scale = settings.label_scale
        labels = Labels.fit(table.labels, recipe.task, splits["train"], source=table.source, scale=scale)
        targets = labels.encode(table.labels) if table.labels is not None else None
    return Prepared(table, preprocessor, features, labels, targets, splits)


def build_models(recipe: Recipe, name: str, make_encoder: MakeEncoder | None) -> dict[str, nn.Module]:
    """This party's models with their initial weights, on the CPU: drawn from the recipe's seed and the party's name.

    ``make_encoder``: None for an active party with labels only. The encoder is what the phases train and hand on.
    """
    models: dict[str, nn.Module] = {}
    size = recipe.model.embedding_size
    if make_encoder is not None:
        models["encoder"] = handed_on(recipe, make_encoder)
    if name == recipe.active.name:
        width = combined_size(recipe.model.combine, len(recipe.passives) + recipe.active.features, size)
        with seeded(derive_seed(recipe.seed, "init", name, "top")):
            models["top"] = build_top(recipe.model.top, width, recipe.task.outputs)
    return models


class PartyJob(Job):
    """See ``vfl_party.runner.Job``.

    ``begin_with``: puts weights of an earlier run into the models, made afresh. ``spread``: puts the encoder on several
    GPUs.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        prepared: Prepared,
        encoder: EncoderSettings,
        device: torch.device,
        run_id: str,
        transport: Transport,
        *,
        tick: Callable[[str, int, int, int, int], None],
        make_phases: Callable[[Party], Sequence[Phase]],
        begin_with: BeginWith | None = None,
        spread: Spread | None = None,
    ) -> None:
        torch.manual_seed(derive_seed(recipe.seed, "torch", name))
        self._prepared, self._run_id, self._transport = prepared, run_id, transport
        features = prepared.features
        make = MakeEncoder(recipe, name, encoder, features.spec) if features is not None else None
        models = build_models(recipe, name, make)
        if begin_with is not None:
            begin_with(models)
        self.party = Party(
            name=name,
            recipe=recipe,
            device=device,
            models={key: model.to(device) for key, model in models.items()},
            features=prepared.features.to(device) if prepared.features is not None else None,
            labels=prepared.labels,
            targets=prepared.targets.to(device) if prepared.targets is not None else None,
            splits=prepared.splits,
            make_encoder=make,
            tick=tick,
            link=TensorLink(transport.link, recipe.active.name, device) if transport.link is not None else None,
            hub=TensorHub(transport.hub, device) if transport.hub is not None else None,
            server=TensorLink(transport.server, recipe.server, device) if transport.server is not None else None,
        )
        if spread is not None and features is not None:
            self.party.spread = spread(self.party.models["encoder"], features.spec)
        self.phases = make_phases(self.party)

    def open(self) -> None:
        """Compares the rows: each passive party sends their number and keyed digest to the active party."""
        step, ids = StepKey(OPENING, 0, 0), self._prepared.table.ids
        digest = torch.frombuffer(bytearray(rows_digest(self._run_id, ids)), dtype=torch.uint8)
        if self.party.link is not None:
            ours = {"count": torch.tensor([len(ids)]), "digest": digest}
            self.party.link.swap(step, Kind.ROWS, ours, NOTHING)
            return
        hub = self.party.need_hub()
        received = hub.collect(step, ROWS)
        for name, rows in received.items():
            count = int(rows["count"][0])
            if count != len(ids) or not torch.equal(rows["digest"].cpu(), digest):
                what = f"{count} and {len(ids)} rows" if count != len(ids) else f"{count} rows each, with other ids"
                text = f"different row sets: {name} and {self.party.name} hold {what}; every party needs the same ids"
                public = f"different row sets: {name} and {self.party.name} do not hold the same ids"
                raise PeerError(Code.ROWS_DIFFER, text, public=public, party=name)
        hub.acknowledge(step, received)

    def unhurried(self) -> None:
        self.party.unhurried()

    def state(self) -> Tree:
        generators: dict[str, Tensor] = {"cpu": torch.get_rng_state()}
        if self.party.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.party.device)
        return {
            "models": {name: dict(model.state_dict()) for name, model in self.party.models.items()},
            "generators": generators,
            "preprocessor": self._prepared.preprocessor.state() if self._prepared.preprocessor else None,
            "labels": self._prepared.labels.state() if self._prepared.labels else None,
            "data": self._prepared.fingerprint,
        }

    def load_state(self, tree: Tree) -> None:
        if tree["data"] != self._prepared.fingerprint:
            raise InputError(
                Code.DATA_INVALID,
                f"{self._prepared.table.source}: its rows or columns are not those that the unfinished run began with; "
                "restore them, or begin a new run with --fresh at the server and every party",
            )
        load_models(self.party.models, tree)
        torch.set_rng_state(tree["generators"]["cpu"])
        if self.party.device.type == "cuda" and "cuda" in tree["generators"]:
            torch.cuda.set_rng_state(tree["generators"]["cuda"], self.party.device)

    def end(self, error: VflError) -> None:
        self._transport.end(error)

    def close(self, error: BaseException | None) -> None:
        self._transport.close(error)


def load_models(models: dict[str, nn.Module], tree: Tree) -> None:
    """Weights from a job's state. Raises InputError where they do not fit the models."""
    try:
        for name, model in models.items():
            model.load_state_dict(tree["models"][name])
    except (KeyError, RuntimeError):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            "the checkpoint holds other models than the recipe and the data give; use those of the trained run",
        ) from None


def load_encoder(models: dict[str, nn.Module], tree: Tree, run_id: str, tower: str | None) -> None:
    """The encoder of another run's job, and nothing else of it: this run has preprocessing and a top model of its own.

    ``tower``: of an encoder of two, this one alone. Raises InputError where it does not fit.
    """
    try:
        if "encoder" in models:
            weights = tree["models"]["encoder"]
            if tower is not None:
                prefix = f"{tower}."
                weights = {name[len(prefix) :]: each for name, each in weights.items() if name.startswith(prefix)}
            models["encoder"].load_state_dict(weights)
    except (KeyError, RuntimeError):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"recipe: start.run: the encoder of {run_id} is another one than this recipe and the data give; give both "
            "recipes the same model and columns, and start.phases that run's phases",
        ) from None
