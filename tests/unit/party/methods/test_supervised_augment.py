"""Views of training batches in supervised phases: what they change, and where they are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.assembly.party import Assembled, assemble, expect_rows, open_party
from vfl_party.data import Features
from vfl_party.methods.head.settings import HeadSettings
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.models import generator
from vfl_party.selfsup.augment import BatchViews, make_augment
from vfl_party.selfsup.settings import SupervisedAugment

BINARY: dict[str, Any] = {"kind": "binary"}
COLUMNS, IMAGES = cases.columns("sklearn:breast_cancer", 2, limit=80), cases.digits(2, limit=80)
CNN = {"encoder": {"kind": "cnn", "channels": [4]}}


def assembled(name: str, augment: dict[str, Any], images: bool = False, **more: Any) -> Assembled:
    data = IMAGES if images else COLUMNS
    task, model = (None, CNN) if images else (BINARY, {})
    tables = cases.recipe(2, phase={"augment": augment} | more, model=model, task=task)
    made = Recipe.model_validate(tables)
    opened = open_party(made, name, DataSettings(**data[name]), made.model.encoder)
    return assemble(opened, expect_rows(opened))


def views(name: str, augment: dict[str, Any], images: bool = False) -> BatchViews:
    found = assembled(name, augment, images)
    return BatchViews(found.party, "splitnn", SupervisedAugment(**augment))


ROWS = np.arange(20)


def test_a_batch_has_the_same_view_each_time_and_another_one_has_another() -> None:
    of = views("p1", {"corruption": 0.5})
    (first,), (again,), (next_,) = (of.inputs(ROWS, *at) for at in ((0, 1), (0, 1), (1, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, next_)
    (other,) = views("p0", {"corruption": 0.5}).inputs(ROWS, 0, 1)
    assert not torch.equal(first[:, :15], other[:, :15])


def test_only_the_parties_that_are_named_change_their_rows() -> None:
    augment: dict[str, Any] = {"corruption": 0.5, "parties": ["p1"]}
    for name, changes in (("p0", False), ("p1", True)):
        found = assembled(name, augment)
        plain = found.party.rows.need_features().inputs(ROWS)[0]
        (view,) = BatchViews(found.party, "splitnn", SupervisedAugment(**augment)).inputs(ROWS, 0)
        assert torch.equal(view, plain) is not changes


def test_whole_images_are_mirrored_and_stay_whole() -> None:
    x_BCHW = torch.arange(4 * 3 * 2 * 7.0).view(4, 3, 2, 7)
    settings = SupervisedAugment(flip=1.0).view()
    (view,) = make_augment(settings, Features(x_BCHW), ROWS[:4]).one_view((x_BCHW,), generator(1))
    assert torch.equal(view, x_BCHW.flip(3))
    half = SupervisedAugment(flip=0.5).view()
    many = x_BCHW.repeat(500, 1, 1, 1)
    (view,) = make_augment(half, Features(many), ROWS[:4]).one_view((many,), generator(1))
    mirrored = (view != many).flatten(1).any(1)
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.04)
    assert torch.equal(view[mirrored], many.flip(3)[mirrored])


def test_a_crop_is_the_first_view_of_self_supervision() -> None:
    x_BCHW = torch.rand(6, 3, 8, 8, generator=generator(3))
    settings = SupervisedAugment(crop_scale=(0.4, 1.0), jitter=0.5, blur=0.5).view()
    augment = make_augment(settings, Features(x_BCHW), ROWS[:6])
    (view,) = augment.one_view((x_BCHW,), generator(4))
    ((first,), _) = augment.two_views((x_BCHW,), generator(4))
    assert torch.equal(view, first)
    assert not torch.equal(view, x_BCHW)


@pytest.mark.parametrize(
    ("name", "augment", "images", "more"),
    [
        ("p1", {"flip": 0.5}, False, {}),
        ("p1", {"corruption": 0.5}, True, {}),
        ("p0", {"corruption": 0.5, "parties": ["p1", "p7"]}, False, {}),
        (
            "p1",
            {"corruption": 0.5},
            False,
            {
                "transforms": [
                    {
                        "kind": "clipped_gaussian",
                        "exchange": "embedding",
                        "sent_by": "passive",
                        "clip": 1.0,
                        "epsilon": 1.0,
                        "delta": 1e-5,
                    }
                ]
            },
        ),
    ],
)
def test_what_would_change_nothing_or_break_a_promise_is_refused(
    name: str, augment: dict[str, Any], images: bool, more: dict[str, Any]
) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        assembled(name, augment, images, **more)


@pytest.mark.parametrize(
    ("section", "given"),
    [
        (SplitNNSettings, {"augment": {}}),
        (SplitNNSettings, {"augment": {"hue": 0.2}}),
        (SplitNNSettings, {"augment": {"crop_scale": [0.9, 0.2]}}),
        (SplitNNSettings, {"augment": {"flip": 0.5, "corrupt": "both"}}),
        (SplitNNSettings, {"augment": {"flip": 0.5}, "local_updates": 2}),
        (SplitNNSettings, {"augment": {"flip": 0.5}, "nopeek": 0.1}),
        (HeadSettings, {"augment": {"flip": 0.5}}),
        (
            HeadSettings,
            {"augment": {"corruption": 0.5}, "own_encoder": "trained", "dp": {"epsilon": 1.0}},
        ),
    ],
)
def test_settings_that_make_no_sense_together_are_refused(
    section: Any, given: dict[str, Any]
) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        parse(section, {"epochs": 1} | given, "recipe: phases: one")
