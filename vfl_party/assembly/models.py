"""Builds a party's models and loads weights of an earlier run."""

from __future__ import annotations

from torch import nn

from vfl_common.config.models import EncoderSettings, GbdtTop, RawSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.models import build_joint, build_top, check_encoder, seed_torch, top
from vfl_party.phases.context import MakeEncoder
from vfl_party.phases.course import Course
from vfl_party.phases.scoring import SOLO


def encoder_settings(recipe: Recipe, name: str, own: EncoderSettings | None) -> EncoderSettings:
    """Returns the settings of a party's encoder.

    They come from the party file, else from the party in the recipe, else from ``model.encoder``.
    Before the last choice, an active party with boosted trees as top model gets ``raw``. Raises
    InputError if the encoder's plug-in is not installed or its settings are invalid, and if a
    passive party has the encoder ``raw``.
    """
    place = recipe.party(name)
    settings, where = recipe.model.encoder, "recipe: model.encoder"
    if own is not None:
        settings, where = own, f"party {name}: encoder"
    elif place is not None and place.encoder is not None:
        settings, where = place.encoder, f"recipe: parties.{name}.encoder"
    elif isinstance(recipe.model.top, GbdtTop) and name == recipe.active.name:
        settings = RawSettings(kind="raw")
    if place is None or place.features:
        check_encoder(settings, where)
    if place is not None and place.role == "passive" and isinstance(settings, RawSettings):
        raise InputError(
            Code.CONFIG_INVALID,
            f'{where}: kind "raw" is only for the active party, because it sends the columns of '
            f"{name} unchanged. Choose another encoder.",
        )
    return settings


def build_models(
    course: Course, name: str, make_encoder: MakeEncoder | None, secret: int | None = None
) -> dict[str, nn.Module]:
    """Builds a party's models on the CPU.

    The initial weights depend only on the seed and the party's name. All phases share the encoder.
    A method may instead build its own models.

    Args:
        course: The course of the recipe's phases.
        name: The party's name.
        make_encoder: Builds the encoder. None for an active party that has only labels.
        secret: The secret seed; see ``Party``. Default: the recipe's seed.
    """
    recipe, models = course.recipe, course.own_models()
    seed = recipe.seed if secret is None else secret
    if models:
        return models
    if make_encoder is not None:
        models["encoder"] = course.encoder(make_encoder)
    if name == recipe.active.name:
        models |= course.upper(seed)
        widths = [recipe.embedding_size(party.name) for party in recipe.modelled if party.features]
        with seed_torch(derive_seed(seed, "init", name, "top")):
            # A network that is cut in two has one embedding for each row, so nothing is combined.
            models["top"] = (
                build_top(recipe.model.top, recipe.model.embedding_size, recipe.task.outputs)
                if "tail" in models
                else build_joint(recipe.model, widths, recipe.task.outputs)
            )
        passives = [party.name for party in recipe.modelled if party.role == "passive"]
        widths_of = {party: recipe.embedding_size(party) for party in passives}
        if isinstance(recipe.model.top, GbdtTop):
            models[top.STAND_INS] = top.MissingNumbers(widths_of)
        elif course.learns == "party_dropout":
            models[top.STAND_INS] = top.StandIns(widths_of)
        solo = course.solo(make_encoder) if make_encoder is not None else None
        models |= {SOLO: solo} if solo is not None else {}
    return models


def load_models(models: dict[str, nn.Module], tree: Tree) -> None:
    """Loads weights from a job's state. Raises InputError if they do not match the models."""
    try:
        for name, model in models.items():
            model.load_state_dict(tree["models"][name])
    except (KeyError, RuntimeError):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            "the checkpoint does not match the models of the recipe and the data. Use the recipe "
            "and the data of the trained run.",
        ) from None


def load_encoder(models: dict[str, nn.Module], tree: Tree, run_id: str, tower: str | None) -> None:
    """Loads only the encoder of another run.

    The new run has its own preprocessing and top model. ``tower``: The tower to load if the encoder
    has two towers. Raises InputError if the weights do not match.
    """
    try:
        if "tail" in models:
            models["tail"].load_state_dict(tree["models"]["tail"])
        if "bottom" in models:
            models["bottom"].load_state_dict(tree["models"]["encoder"])
        if "encoder" in models:
            weights = tree["models"]["encoder"]
            if tower is not None:
                prefix = f"{tower}."
                weights = {
                    name[len(prefix) :]: weight
                    for name, weight in weights.items()
                    if name.startswith(prefix)
                }
            models["encoder"].load_state_dict(weights)
    except (KeyError, RuntimeError):
        raise InputError(
            Code.CHECKPOINT_INVALID,
            f"recipe: start.run: the encoder of {run_id} does not match this recipe and its data. "
            "Set the same model and columns in both recipes, and start.phases to that run's "
            "phases.",
        ) from None
