"""One upload of frozen representations, followed by training at the active party: SS-VFL-I and
FedOnce.

SS-VFL-I (Castiglia et al. 2022, Alg. 1, lines 4 to 10) trains only the top model. FedOnce (Wu et
al. 2022, Alg. 1, lines 16 to 30) also trains the active party's encoder. The passive encoders keep
the weights of the earlier phase and run in eval mode, on rows without augmentation. Each party
sends one upload for its training rows and receives no gradients. With ``model.top.kind = "gbdt"``
the active party grows boosted trees on its own columns and the representations.
"""

from __future__ import annotations

from vfl_common.config.models import GbdtTop
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase
from vfl_party.methods.head.active import ActiveHead, TreesHead
from vfl_party.methods.head.settings import TREE_KEYS, HeadSettings
from vfl_party.methods.head.upload import PassiveHead, traffic
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import WHOLE_TASK, Method, MethodFacts
from vfl_party.privacy.plan import PrivatePhase


class HeadMethod(Method[HeadSettings]):
    """Head: one upload by each passive party, followed by training at the active party."""

    def facts(self, settings: HeadSettings) -> MethodFacts:
        no_partial = "dp needs rows that all parties hold" if settings.dp is not None else ""
        if settings.deadline_s is not None:
            no_partial = "deadline_s needs parties that hold all rows"
        return MethodFacts(
            own_sizes=True,
            noise=settings.noise,
            follows=WHOLE_TASK,
            no_partial=no_partial,
            learns=settings.learns,
        )

    def check_top(self, phase: str, settings: HeadSettings, recipe: Recipe) -> None:
        where, task, top = f"recipe: phases: {phase}", recipe.task, recipe.model.top
        if not isinstance(top, GbdtTop):
            if settings.epochs is None and settings.steps is None:
                raise InputError(
                    Code.CONFIG_INVALID, f"{where}: epochs and steps are missing. Set one of them."
                )
            return
        for key in sorted(settings.model_fields_set - TREE_KEYS):
            raise InputError(
                Code.CONFIG_INVALID,
                f'{where}: {key} has no effect with model.top.kind = "gbdt". Remove {key}.',
            )
        if settings.own_encoder == "trained":
            raise InputError(
                Code.CONFIG_INVALID,
                f'{where}: with model.top.kind = "gbdt" no encoder can be trained (got '
                "own_encoder = 'trained'). Remove own_encoder, or choose another top model.",
            )
        if recipe.model.combine != "concat":
            raise InputError(
                Code.CONFIG_INVALID,
                f'{where}: model.top.kind = "gbdt" needs model.combine = "concat" (got '
                f'"{recipe.model.combine}"). Set model.combine = "concat".',
            )
        if task.kind not in ("binary", "multiclass", "regression") or task.label_smoothing:
            got = f'"{task.kind}"' if not task.label_smoothing else "label_smoothing"
            raise InputError(
                Code.CONFIG_INVALID,
                f'{where}: model.top.kind = "gbdt" needs a binary, multiclass or regression task '
                f'without label_smoothing (got {got}). Use a top model of kind "mlp", or a phase '
                'of kind "splitnn".',
            )

    def traffic(self, party: Party, phase: str, settings: HeadSettings) -> Traffic:
        return traffic(party, phase, settings)

    def private(
        self, phase: str, settings: HeadSettings, recipe: Recipe, rows: int
    ) -> PrivatePhase | None:
        if settings.dp is None:
            return None
        # Nothing is matched here, so a row's label depends on no other row.
        dp = settings.dp.model_copy(update={"mode": "fixed"})
        epochs = settings.epochs_over(rows)
        return PrivatePhase(phase, dp, (recipe.active.name,), settings.batch_size, epochs)


def _make_active(party: Party, phase: str, settings: HeadSettings) -> Phase:
    if isinstance(party.recipe.model.top, GbdtTop):
        return TreesHead(party, phase, settings)
    return ActiveHead(party, phase, settings)


METHOD = HeadMethod(HeadSettings, _make_active, PassiveHead)
