"""``vfl-party check``: everything that can be found wrong before training, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vfl_common.config.data import unaligned_of
from vfl_common.config.party import load_party
from vfl_common.config.recipe import load_recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_common.identity.credentials import load_credentials
from vfl_common.rpc.channel import check_address, connect
from vfl_party.app import Place, read_place
from vfl_party.context import MakeEncoder, Party
from vfl_party.data import describe, load_table
from vfl_party.devices import resolve_device
from vfl_party.job import build_models, load_encoder, prepare
from vfl_party.methods import build_phases, parse_settings
from vfl_party.prediction import load_start

_CONNECT_S = 3.0


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it is fine, what was found or what to do."""

    about: str
    fine: bool
    text: str


def check(path: Path, device: str | None, *, offline: bool) -> Iterator[Finding]:
    """All findings about a party file, in the order in which they would stop a run; ``offline``: no peer is tried."""
    try:
        file = load_party(path)
        yield Finding("party file", True, f"{path}: {file.name}")
        recipe = load_recipe(Path(file.recipe))
        yield Finding("recipe", True, f"{recipe.name}, digest {recipe.digest()[:16]} (the same at every party)")
    except VflError as error:
        yield Finding("files", False, str(error))
        return
    found: list[Finding] = []
    looks: list[tuple[str, Callable[[], str]]] = [
        ("certificate", lambda: f"for {file.name}, valid until {load_credentials(file.tls, name=file.name).not_after}"),
        ("device", lambda: f"{resolve_device(device or file.device)}"),
        ("phases", lambda: ", ".join(f"{phase.name}" for phase in recipe.phases if parse_settings(phase))),
    ]
    for about, look in looks:
        try:
            found.append(Finding(about, True, look()))
        except VflError as error:
            found.append(Finding(about, False, str(error)))
    yield from found
    if not all(finding.fine for finding in found):
        return
    try:
        place = read_place(path, device=device)
    except VflError as error:
        yield Finding("recipe", False, str(error))
        return
    yield Finding("role", True, place.place.role)
    yield from _data(place)
    yield from _network(place, offline)


def _data(place: Place) -> Iterator[Finding]:
    try:
        settings = place.data
        table = load_table(settings, with_label=place.is_active)
        for line in describe(table):
            yield Finding("data", True, line)
        more = unaligned_of(settings)
        unaligned = load_table(more, with_label=False) if more is not None else None
        prepared = prepare(place.recipe, place.name, table, settings, place.encoder, unaligned)
        sizes = ", ".join(f"{len(rows)} {split}" for split, rows in prepared.splits.items())
        yield Finding("rows", True, sizes)
        features = prepared.features
        make = MakeEncoder(place.recipe, place.name, place.encoder, features.spec) if features is not None else None
        models = build_models(place.recipe, place.name, make)
        start = load_start(place.recipe, place.name, Path(place.file.out))
        if start is not None:
            load_encoder(models, start.state, start.run_id, place.recipe.start.tower if place.recipe.start else None)
            yield Finding("start", True, f"the encoder of {start.run_id}")
        for name, model in models.items():
            count = sum(parameter.numel() for parameter in model.parameters())
            yield Finding("model", True, f"{name}: {count:,} parameters")
        party = Party(
            name=place.name,
            recipe=place.recipe,
            device=torch.device("cpu"),
            models=models,
            features=features,
            labels=prepared.labels,
            targets=prepared.targets,
            splits=prepared.splits,
            make_encoder=make,
        )
        rounds = ", ".join(f"{phase.name} ({phase.rounds})" for phase in build_phases(place.recipe, party))
        yield Finding("rounds", True, rounds)
    except VflError as error:
        yield Finding("data", False, str(error))


def _network(place: Place, offline: bool) -> Iterator[Finding]:
    if place.is_active:
        try:
            check_address(place.file.listen)
            reach = "; passive parties must be able to reach it" if place.recipe.passives else ""
            yield Finding("listen", True, f"{place.file.listen} is free{reach}")
        except VflError as error:
            yield Finding("listen", False, str(error))
    if offline:
        return
    yield _reach(place, "server", place.file.server, place.recipe.server)
    if not place.is_active:
        if place.file.active is None:
            yield Finding("active party", True, "its address comes from the server when the run starts: not tried")
        else:
            yield _reach(place, "active party", place.file.active, place.recipe.active.name)


def _reach(place: Place, about: str, address: str, peer: str) -> Finding:
    found = connect(address, place.credentials, peer, _CONNECT_S)
    if isinstance(found, VflError):
        return Finding(about, False, str(found))
    found.close()
    return Finding(about, True, f"{peer} answers at {address}, certificates accepted")


def require(findings: list[Finding]) -> None:
    """Raises InputError where a finding is not fine."""
    bad = [finding.about for finding in findings if not finding.fine]
    if bad:
        raise InputError(Code.CONFIG_INVALID, f"not ready: {', '.join(bad)} (see above)")
