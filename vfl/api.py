"""The names that plug-ins may rely on.

A plug-in, in a package or in a notebook, imports names of ``vfl`` only from this module::

    from vfl.api import Filter, Section, Transform

``docs/reference/api-for-plugins.md`` lists the names and their guarantees. Each name
is imported on first use, so that a party without torch does not load it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Names of satellites (vfl_leaks, vfl_papers) are not in __all__: they go when a satellite does.
    from vfl_common.bundle import BundleSpec, DType, Kind, StepKey, TensorSpec
    from vfl_common.config.base import Section
    from vfl_common.errors import Code, InputError, VflError
    from vfl_leaks.scene import Attack as Attack
    from vfl_leaks.scene import Figure as Figure
    from vfl_leaks.scene import Scene as Scene
    from vfl_leaks.scene import UnfitError as UnfitError
    from vfl_leaks.scores import Tally as Tally
    from vfl_papers.dataset import Content as Content
    from vfl_papers.dataset import DataSet as DataSet
    from vfl_papers.dataset import Form as Form
    from vfl_papers.dataset import Need as Need
    from vfl_papers.dataset import PaperUse as PaperUse
    from vfl_papers.dataset import Request as Request
    from vfl_papers.dataset import blocks_of as blocks_of
    from vfl_papers.dividing import COLUMNS as COLUMNS
    from vfl_papers.dividing import IMAGE_DIVISIONS as IMAGE_DIVISIONS
    from vfl_party.base.mechanism import Mechanism
    from vfl_party.base.phase import Phase, RoundReport
    from vfl_party.base.seeds import Rows, batches, derive_seed
    from vfl_party.models import Combination, Encoder, InputSpec, combine
    from vfl_party.models.external import Top
    from vfl_party.models.losses import LossOfRows, loss_fn
    from vfl_party.models.metrics import Metric, evaluate, lower_is_better
    from vfl_party.outbound.codecs import Codec, Float16, Place
    from vfl_party.outbound.declared import (
        NOTHING,
        Exchange,
        Occurrence,
        Sent,
        Traffic,
        Use,
        f32,
        i64,
        u8,
    )
    from vfl_party.outbound.exchange import Answering, Asking
    from vfl_party.outbound.filter import Filter, NoisyFilter, Passage, Tensors
    from vfl_party.outbound.policies import Policy
    from vfl_party.outbound.transforms import Transform
    from vfl_party.phases.absence import LatePolicy
    from vfl_party.phases.context import MakeEncoder, Party
    from vfl_party.phases.method import Method, MethodFacts
    from vfl_party.phases.scoring import Scored, Scorer, SplitScorer, scoring, scoring_traffic
    from vfl_party.privacy.dpsgd import PrivateSteps
    from vfl_party.privacy.plan import DpSettings, PrivatePhase

__all__ = [
    "NOTHING",
    "Answering",
    "Asking",
    "BundleSpec",
    "Code",
    "Codec",
    "Combination",
    "DType",
    "DpSettings",
    "Encoder",
    "Exchange",
    "Filter",
    "Float16",
    "InputError",
    "InputSpec",
    "Kind",
    "LatePolicy",
    "LossOfRows",
    "MakeEncoder",
    "Mechanism",
    "Method",
    "MethodFacts",
    "Metric",
    "NoisyFilter",
    "Occurrence",
    "Party",
    "Passage",
    "Phase",
    "Place",
    "Policy",
    "PrivatePhase",
    "PrivateSteps",
    "RoundReport",
    "Rows",
    "Scored",
    "Scorer",
    "Section",
    "Sent",
    "SplitScorer",
    "StepKey",
    "TensorSpec",
    "Tensors",
    "Top",
    "Traffic",
    "Transform",
    "Use",
    "VflError",
    "batches",
    "combine",
    "derive_seed",
    "evaluate",
    "f32",
    "i64",
    "loss_fn",
    "lower_is_better",
    "scoring",
    "scoring_traffic",
    "u8",
]

# {public name: the module that defines it}
FROM = {
    name: module
    for module, names in {
        "vfl_common.bundle": "BundleSpec DType Kind StepKey TensorSpec",
        "vfl_common.config.base": "Section",
        "vfl_common.errors": "Code InputError VflError",
        "vfl_party.base.mechanism": "Mechanism",
        "vfl_party.base.phase": "Phase RoundReport",
        "vfl_party.base.seeds": "Rows batches derive_seed",
        "vfl_party.models": "Combination Encoder InputSpec combine",
        "vfl_party.models.external": "Top",
        "vfl_party.models.losses": "LossOfRows loss_fn",
        "vfl_party.models.metrics": "Metric evaluate lower_is_better",
        "vfl_party.outbound.codecs": "Codec Float16 Place",
        "vfl_party.outbound.declared": ("Exchange NOTHING Occurrence Sent Traffic Use f32 i64 u8"),
        "vfl_party.outbound.exchange": "Answering Asking",
        "vfl_party.outbound.filter": "Filter NoisyFilter Passage Tensors",
        "vfl_party.outbound.policies": "Policy",
        "vfl_party.outbound.transforms": "Transform",
        "vfl_party.phases.absence": "LatePolicy",
        "vfl_party.phases.context": "MakeEncoder Party",
        "vfl_party.phases.method": "Method MethodFacts",
        "vfl_party.phases.scoring": "Scored Scorer SplitScorer scoring scoring_traffic",
        "vfl_party.privacy.dpsgd": "PrivateSteps",
        "vfl_party.privacy.plan": "DpSettings PrivatePhase",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name in FROM:
        return getattr(import_module(FROM[name]), name)
    # Other packages add names to ``vfl.api`` with entry points in the group ``vfl.api``.
    for entry_point in entry_points(group="vfl.api", name=name):
        return entry_point.load()
    raise AttributeError(f"module 'vfl.api' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(entry.name for entry in entry_points(group="vfl.api"))})
