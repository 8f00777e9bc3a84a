"""What the head exchanges: every passive party's upload, once."""

from __future__ import annotations

import torch

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.base import Section
from vfl_party.context import Party
from vfl_party.exchange import expect
from vfl_party.methods.head.settings import UPLOAD, HeadSettings
from vfl_party.methods.head.upload import answer
from vfl_party.traffic import Traffic, with_active


def traffic(party: Party, name: str, settings: Section) -> Traffic:
    """See ``Method.traffic``."""
    assert isinstance(settings, HeadSettings)  # noqa: S101 - parsed by our own METHOD
    up = expect(Kind.EMBEDDING, z=(torch.float32, (len(party.rows("train")), party.embedding_size)))
    return Traffic([with_active(party, StepKey(name, UPLOAD, 0), up, answer(settings))])
