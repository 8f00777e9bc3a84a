"""Reads and checks a party file and the recipe, certificate, device and policy that it names."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from vfl_common.config.data import DataSettings, without_features
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import PartyFile, check_code, load_party
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.config.recipe_tables import PartySettings
from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import BOTH, DIALS, collect_members
from vfl_common.identity.keyring import Keyring
from vfl_common.rpc.ask import report_failure
from vfl_common.rpc.channel import means_all_addresses
from vfl_common.rpc.messages import Joining
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import TRAINING, Load, OpenedParty, Work, load, open_party
from vfl_party.base.devices import resolve_device
from vfl_party.outbound.policies import Policy
from vfl_party.outbound.policies import load as load_policy
from vfl_party.phases.course import Course


@dataclass(frozen=True)
class OwnFiles:
    """A checked party file with its recipe, device and encoder. ``open`` reads the data."""

    file: PartyFile
    recipe: Recipe
    settings: PartySettings
    device: torch.device
    encoder: EncoderSettings

    @property
    def name(self) -> str:
        """The party's name."""
        return self.file.name

    @property
    def is_active(self) -> bool:
        """Whether this is the active party."""
        return self.settings.role == "active"

    @cached_property
    def course(self) -> Course:
        """The course of the recipe's phases."""
        return Course(self.recipe)

    def open(self, load: Load = load, work: Work = TRAINING) -> OpenedParty:
        """Reads the party's data with ``load``. Raises InputError if the data are invalid."""
        return open_party(self.recipe, self.name, self.data, self.encoder, load, work)

    @property
    def data(self) -> DataSettings:
        """The settings of the party's data. Raises InputError if the party file lacks them."""
        if self.file.data is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {self.name}: data: missing. Add a table [data] to the party file.",
            )
        if self.is_active and self.file.data.label is None and not self.file.data.is_named:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {self.name}: data.label: missing. Set it to the label column of the active "
                "party.",
            )
        data = self.file.data.model_copy(
            update={"scratch": self.file.data.scratch or self.file.out}
        )
        return data if self.settings.features else without_features(data)


@dataclass(frozen=True)
class PartyFiles(OwnFiles):
    """A checked party file with its recipe, device, encoder, policy and certificate."""

    keyring: Keyring

    def policy(self, after: Policy | None = None) -> Policy:
        """Returns a new policy object, so that no state is shared between generations.

        ``after``: The policy of the previous generation; see ``load_policy``.
        """
        return load_policy(self.file.policy, f"party {self.name}: policy", after)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Reports an error in the ``with`` block to the server. The party has not joined yet."""
        with _report_failure(self.file, self.recipe, self.settings, self.keyring):
            yield


def read_own(path: Path, *, device: str | None = None, recipe: Recipe | None = None) -> OwnFiles:
    """Reads a party file and its recipe for a process that connects to no other party.

    ``device`` and ``recipe``: See ``read_files``. Raises InputError if a file is invalid.
    """
    file, recipe, settings = _load_party_and_recipe(path, recipe)
    check_code(path, file, recipe)
    encoder = encoder_settings(recipe, file.name, file.encoder)
    return OwnFiles(file, recipe, settings, resolve_device(device or file.device), encoder)


def _load_party_and_recipe(
    path: Path, recipe: Recipe | None
) -> tuple[PartyFile, Recipe, PartySettings]:
    """Returns a party file, its recipe, and the party's settings in the recipe.

    Raises InputError if a file is invalid.
    """
    file = load_party(path)
    # The user's own encoder is imported from the party file's folder.
    sys.path.append(str(path.resolve().parent))
    recipe = recipe or load_recipe(Path(file.recipe))
    settings = recipe.party(file.name)
    if settings is None:
        names = ", ".join(party.name for party in recipe.parties)
        raise InputError(
            Code.NOT_IN_RECIPE,
            f"{path}: name: not a party of recipe {recipe.name} (got {file.name}). Choose one of: "
            f"{names}.",
        )
    return file, recipe, settings


def read_files(
    path: Path,
    *,
    device: str | None = None,
    recipe: Recipe | None = None,
    joins: bool = False,
    keyring: Keyring | None = None,
) -> PartyFiles:
    """Reads a party file, its recipe and its certificate.

    Args:
        path: The party file.
        device: A device instead of the one in the file.
        recipe: A recipe instead of the one that the file names.
        joins: Whether the party is about to join. Errors are then reported to the server, once its
            address is known.
        keyring: The keyring of a party that serves several recipes, with the members of all of
            them.

    Raises InputError if a file is invalid.
    """
    file, recipe, settings = _load_party_and_recipe(path, recipe)
    uses = BOTH if settings.role == "active" else DIALS
    if keyring is None:
        members = collect_members(recipe, pins=file.pins)
        keyring = Keyring(file.tls, file.name, members, uses=uses, out=Path(file.out))
    with _report_failure(file, recipe, settings, keyring) if joins else contextlib.nullcontext():
        _check_relayed(path, file, recipe)
        check_code(path, file, recipe)
        resolved = resolve_device(device or file.device)
        encoder = encoder_settings(recipe, file.name, file.encoder)
        files = PartyFiles(file, recipe, settings, resolved, encoder, keyring)
        # This finds an invalid policy now instead of at its first use.
        files.policy()
    return files


@contextlib.contextmanager
def _report_failure(
    file: PartyFile, recipe: Recipe, settings: PartySettings, keyring: Keyring
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        joining = Joining(settings.role, recipe.canonical_json(), "train", 0, "")
        report_failure(file.server, keyring, recipe.server, joining, error)
        raise


def _check_relayed(path: Path, file: PartyFile, recipe: Recipe) -> None:
    """Raises InputError if the server would relay an address that no party can connect to."""
    relayed, key = (
        (file.advertise, "advertise") if file.advertise is not None else (file.listen, "listen")
    )
    if file.name == recipe.active.name and recipe.passives and means_all_addresses(relayed):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: {key}: must be an address that the other parties can connect to, not all "
            f"addresses of this machine (got {relayed}). Set advertise, such as "
            f"{file.name}.example.org:7001.",
        )
