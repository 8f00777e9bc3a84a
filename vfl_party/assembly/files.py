"""Reads all that a party file names (recipe, certificate, device, policy) and checks it before
anything else.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from vfl_common.config.data import DataSettings, ids_only
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import PartyFile, check_code, load_party
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.config.recipe_tables import PartySettings
from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import BOTH, DIALS
from vfl_common.identity.keyring import Keyring
from vfl_common.identity.members import members_of
from vfl_common.rpc.channel import means_all_addresses
from vfl_common.rpc.messages import Joining
from vfl_common.rpc.unable import tell_unable
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import TRAINING, Load, OpenedParty, Work, load, open_party
from vfl_party.base.devices import resolve_device
from vfl_party.outbound.policies import Policy
from vfl_party.outbound.policies import load as load_policy
from vfl_party.phases.course import Course


@dataclass(frozen=True)
class OwnFiles:
    """A party file and what it names on this machine, read and checked; `open` reads the data."""

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
        """What the recipe has its parties do."""
        return Course(self.recipe)

    def open(self, load: Load = load, work: Work = TRAINING) -> OpenedParty:
        """Reads the data, with ``load``. Raises InputError."""
        return open_party(self.recipe, self.name, self.data, self.encoder, load, work)

    @property
    def data(self) -> DataSettings:
        """Where the party's rows are. Raises InputError if the file does not say so."""
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
        return data if self.settings.features else ids_only(data)


@dataclass(frozen=True)
class PartyFiles(OwnFiles):
    """A party file with all that it names, read and checked."""

    keyring: Keyring

    def policy(self, after: Policy | None = None) -> Policy:
        """Makes the party's policy: a new one each time, so that no generation finds what another
        left in it. ``after``: see ``load`` of the policies.
        """
        return load_policy(self.file.policy, f"party {self.name}: policy", after)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the server of a failure in the block, which ends before the party joins."""
        with _telling(self.file, self.recipe, self.settings, self.keyring):
            yield


def read_own(path: Path, *, device: str | None = None, recipe: Recipe | None = None) -> OwnFiles:
    """Reads a party file and its recipe, for a process that speaks to no other party. Arguments as
    ``read_files``. Raises InputError.
    """
    file, recipe, settings = _load_named(path, recipe)
    check_code(path, file, recipe)
    encoder = encoder_settings(recipe, file.name, file.encoder)
    return OwnFiles(file, recipe, settings, resolve_device(device or file.device), encoder)


def _load_named(path: Path, recipe: Recipe | None) -> tuple[PartyFile, Recipe, PartySettings]:
    """Returns a party file, the recipe, and the party's place in it. Raises InputError."""
    file = load_party(path)
    # The user's own encoder is imported from the party file's folder.
    sys.path.append(str(path.resolve().parent))
    recipe = recipe or load_recipe(Path(file.recipe))
    settings = recipe.party(file.name)
    if settings is None:
        known = ", ".join(party.name for party in recipe.parties)
        raise InputError(
            Code.NOT_IN_RECIPE,
            f"{path}: name: not a party of recipe {recipe.name} (got {file.name}). Choose one of: "
            f"{known}.",
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
    """Reads a party file, its recipe and its certificate. Raises InputError.

    Args:
        device: replaces the file's.
        recipe: replaces the one that the file names.
        joins: the party is about to join: the server hears of a failure, once it is known which
            server that is.
        keyring: of a party that serves several recipes, whose members are those of all of them.
    """
    file, recipe, settings = _load_named(path, recipe)
    uses = BOTH if settings.role == "active" else DIALS
    if keyring is None:
        members = members_of(recipe, pins=file.pins)
        keyring = Keyring(file.tls, file.name, members, uses=uses, out=Path(file.out))
    with _telling(file, recipe, settings, keyring) if joins else contextlib.nullcontext():
        _check_relayed(path, file, recipe)
        check_code(path, file, recipe)
        resolved = resolve_device(device or file.device)
        encoder = encoder_settings(recipe, file.name, file.encoder)
        files = PartyFiles(file, recipe, settings, resolved, encoder, keyring)
        # A wrong policy is found now, not when it is first used.
        files.policy()
    return files


@contextlib.contextmanager
def _telling(
    file: PartyFile, recipe: Recipe, settings: PartySettings, keyring: Keyring
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        joining = Joining(settings.role, recipe.canonical_json(), "train", 0, "")
        tell_unable(file.server, keyring, recipe.server, joining, error)
        raise


def _check_relayed(path: Path, file: PartyFile, recipe: Recipe) -> None:
    """Raises InputError if the server passes on an address that nobody can dial."""
    relayed, key = (
        (file.advertise, "advertise") if file.advertise is not None else (file.listen, "listen")
    )
    if file.name == recipe.active.name and recipe.passives and means_all_addresses(relayed):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: {key}: must be an address that the other parties can dial, not all addresses "
            f"of this machine (got {relayed}). Set advertise, such as "
            f"{file.name}.example.org:7001.",
        )
