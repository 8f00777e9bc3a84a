"""The student: an encoder of the active party's own columns, and a top model on the encoder's
embedding.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from vfl_common.config.models import PluginCombination
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.student.settings import StudentSettings
from vfl_party.models import build_top, check_encoder, combine_widths, seed_torch
from vfl_party.models.training import Precision, forward
from vfl_party.phases.context import MakeEncoder


class Student(nn.Module):
    """A student, with outputs [B, O]. ``match``: a linear map of the student's embedding to the
    joint representation, only for training; None without ``StudentSettings.match``.
    """

    def __init__(self, encoder: nn.Module, top: nn.Module, match: nn.Module | None) -> None:
        super().__init__()
        self.encoder, self.top, self.match = encoder, top, match

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs: Tensor = self.top(self.encoder(*inputs))
        return outputs

    def compute_parts(self, precision: Precision, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs [B, O] and the mapped embedding [B, D], or None without ``match``,
        both in ``precision``.
        """
        z_BD = forward(self.encoder, *inputs, precision=precision)
        mapped = None if self.match is None else forward(self.match, z_BD, precision=precision)
        return forward(self.top, z_BD, precision=precision), mapped


def build_student(settings: StudentSettings, make: MakeEncoder) -> Student:
    """Makes a student on the CPU, with initial weights derived from the party's seeds. Raises
    InputError if the encoder does not fit the party's inputs, or if there is no joint
    representation to match.
    """
    recipe = make.recipe
    if settings.encoder is not None:
        check_encoder(settings.encoder, "recipe: phases: student: encoder")
        make = replace(make, settings=settings.encoder)
    width = settings.embedding_size or make.width
    encoder = make("solo", width=width)
    root = recipe.seed if make.secret is None else make.secret
    with seed_torch(derive_seed(root, "init", make.party, "solo top")):
        top = build_top(settings.top, width, recipe.task.outputs)
        if not settings.match:
            return Student(encoder, top, None)
        rule = recipe.model.combine
        if rule == "attention" or isinstance(rule, PluginCombination):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: student: match: with model.combine = {str(rule)!r} the top "
                "model combines the embeddings, so there is no joint representation. Remove "
                "match, or choose another combine.",
            )
        widths = [
            recipe.embedding_size(member.name) for member in recipe.parties if member.features
        ]
        return Student(encoder, top, nn.Linear(width, combine_widths(rule, widths)))
