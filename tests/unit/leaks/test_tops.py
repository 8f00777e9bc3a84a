"""Attacks on shared weights find what made-up weights give away, and nothing where they took no
part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.harness.errors import raises
from vfl_common.config.task import TaskSettings
from vfl_leaks import attacks
from vfl_leaks.attacks.shared_weights import (
    Upload,
    collect_shared,
    collect_uploads,
    compute_changes,
    compute_spectrum,
    describe_rank,
)
from vfl_leaks.fitting import draw_view
from vfl_leaks.scene import Figure, Heard, Owner, Scene, UnfitError
from vfl_party.models import build_predictor, build_projector, mark_top, top_state

ROWS, WIDTH, SERVER = 100, 64, "server"
MEMBERS, OTHERS = np.arange(25), np.arange(25, 50)
SPLITS = {"local": MEMBERS, "train": MEMBERS, "validation": OTHERS[:5], "test": OTHERS[5:]}

Tower = dict[str, nn.Module]


def tower(seed: int = 1) -> Tower:
    torch.manual_seed(seed)
    encoder = mark_top(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), "1")
    return {
        "encoder": encoder,
        "projector": build_projector(WIDTH, [WIDTH, 16]),
        "predictor": build_predictor(16, 8),
    }


def weights_of(own: Tower) -> dict[str, Tensor]:
    found = {f"encoder.{name}": each for name, each in top_state(own["encoder"]).items()}
    for part in ("projector", "predictor"):
        found |= {
            f"{part}.{name}": each
            for name, each in own[part].state_dict().items()
            if each.is_floating_point()
        }
    return {name: each.detach().clone() for name, each in found.items()}


def table(seed: int = 2) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def owner(own: Tower, x_NF: Tensor) -> Owner:
    return Owner(own["encoder"], lambda rows: (x_NF[torch.from_numpy(rows)],), SPLITS)


def messages(
    sender: str, receiver: str, weights: Mapping[str, Tensor], round_: int = 0
) -> Iterator[Heard]:
    for name, each in weights.items():
        yield Heard("fedhssl", "weights", round_, sender, receiver, each, None, name)


def scene(attacker: str, heard: list[Heard], owners: dict[str, Owner]) -> Scene:
    role: Any = "server" if attacker == SERVER else "active" if attacker == "p0" else "passive"
    labels = torch.zeros(ROWS, dtype=torch.int64)
    task = TaskSettings(kind="binary")
    return Scene(
        attacker,
        role,
        task,
        labels,
        SPLITS,
        3,
        lambda: iter(()),
        owners=owners,
        heard=lambda: iter(heard),
    )


def played(kind: str, where: Scene) -> dict[tuple[str, str], Figure]:
    return {(each.of, each.knows): each for each in attacks.load(kind, "test").play(where)}


def cosines(own: Tower, x_NF: Tensor, rows: Any, drawn: torch.Generator) -> Tensor:
    z = [own["projector"](own["encoder"](*draw_view((x_NF,), rows, drawn))) for _ in range(2)]
    return functional.cosine_similarity(own["predictor"](z[0]), z[1]).mean()


def separated(own: Tower, x_NF: Tensor) -> None:
    """Trains a top that makes the views of members alike, and those of other rows unlike."""
    drawn = torch.Generator().manual_seed(1)
    for part in own.values():
        # BatchNorm with the statistics of the upload, as an attacker has them.
        part.eval()
    trained = [
        *own["encoder"][1].parameters(),  # type: ignore[index]
        *own["projector"].parameters(),
        *own["predictor"].parameters(),
    ]
    optimizer = torch.optim.Adam(trained, lr=0.003)
    for _ in range(150):
        loss = cosines(own, x_NF, OTHERS, drawn) - cosines(own, x_NF, MEMBERS, drawn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_top_that_fits_its_own_rows_gives_them_away_and_another_does_not() -> None:
    victim, x_NF = tower(), table()
    separated(victim, x_NF)
    owners = {"p1": owner(victim, x_NF), "p0": owner(tower(7), x_NF)}
    heard = [
        *messages("p1", SERVER, weights_of(victim)),
        *messages("p0", SERVER, weights_of(tower(8))),
    ]
    figures = played("uploads", scene(SERVER, heard, owners))
    oracle = "its encoder and columns (an oracle)"
    found = figures["p1: rows it trained on, by fit", oracle]
    assert found.value > 0.95
    assert found.baselines["untrained top"] < 0.7
    assert found.chance_high is not None
    assert found.chance_high < 0.7
    assert figures["p0: rows it trained on, by fit", oracle].value < 0.7
    assert figures["p1: rows it trained on, by fit", "the rows' columns, no encoder"].value < 0.8


def stepped(own: Tower, x_NF: Tensor) -> dict[str, Tensor]:
    """Returns the weights after one step of plain SGD on the members."""
    for part in own.values():
        part.train()
    h = own["encoder"](x_NF[torch.from_numpy(MEMBERS)])
    z = own["projector"](h)
    (z * torch.randn(z.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    layer = own["projector"][0]  # type: ignore[index]
    with torch.no_grad():
        layer.weight -= 0.1 * layer.weight.grad
    return weights_of(own)


@pytest.mark.parametrize("attacker", [SERVER, "p0"])
def test_one_step_gives_its_rows_away_by_the_span_of_the_change(attacker: str) -> None:
    """The row space of the change is that of 25 inputs in 64 directions; a mean of two tells a peer
    as much.
    """
    victim, x_NF = tower(), table()
    before = weights_of(victim)
    after, own = stepped(victim, x_NF), weights_of(tower(8))
    mean = {name: (after[name] + own[name]) / 2 for name in own}
    heard = [*messages("p0", SERVER, before), *messages(SERVER, "p0", before)]
    heard += [*messages("p0", SERVER, own, 1), *messages(SERVER, "p0", mean, 1)]
    if attacker == SERVER:
        heard += [*messages("p1", SERVER, before), *messages("p1", SERVER, after, 1)]
    # The peer sees rows as the victim does.
    owners = {"p1": owner(victim, x_NF), "p0": owner(victim, x_NF)}
    where = scene(attacker, heard, owners)
    kind, knows = ("tops", "own encoder, own columns")
    if attacker == SERVER:
        kind, knows = ("uploads", "its encoder and columns (an oracle)")
    figure = played(kind, where)["p1: rows it trained on, by span", knows]
    assert figure.value > 0.95
    assert figure.baselines["random directions"] < 0.75
    rank, _ = compute_spectrum(compute_changes(collect_uploads(where)["p1"])[-1])
    # What a peer subtracts is rounded.
    if attacker == SERVER:
        # BatchNorm's gradients add up to zero over the batch.
        assert rank == len(MEMBERS) - 1


def test_a_peer_subtracts_its_own_weights_from_the_mean() -> None:
    own = {name: weights_of(tower(seed)) for seed, name in enumerate(("p0", "p1", "p2"))}
    for names in (("p0", "p1"), ("p0", "p1", "p2")):
        mean = {
            key: torch.stack([own[name][key] for name in names]).mean(dim=0) for key in own["p0"]
        }
        heard = [*messages("p0", SERVER, own["p0"]), *messages(SERVER, "p0", mean)]
        owners = {name: owner(tower(), table()) for name in names}
        found = collect_uploads(scene("p0", heard, owners))
        assert [*found] == [*names[1:]]
        rest = {
            key: torch.stack([own[name][key] for name in names[1:]]).mean(dim=0) for key in mean
        }
        for name in names[1:]:
            assert found[name][0].weights.keys() == rest.keys()
            assert all(
                torch.allclose(found[name][0].weights[key].float(), rest[key], atol=1e-6)
                for key in rest
            )
            assert found[name][0].before is None
        assert collect_shared(scene("p0", heard, owners)).newest("p0").keys() == own["p0"].keys()


def test_rank_and_energy_of_a_change_by_hand() -> None:
    change = torch.zeros(8, 6)
    # Energy: 100, 1, 0.01.
    change[0, 0], change[1, 1], change[2, 2] = 10.0, 1.0, 0.1
    assert compute_spectrum(change) == (3, 1)
    change[1, 1] = 2.0
    assert compute_spectrum(change) == (3, 2)
    name = "projector.0.weight"
    found = [Upload(1, {name: change}, {name: torch.zeros(8, 6)})]
    assert describe_rank("p1", found) == (
        "p1: a round changes the first layer above the encoder by a matrix of rank 3 of 6 "
        "(99 % of its energy in 2 directions), so it has at least as many inputs"
    )
    assert describe_rank("p1", [Upload(0, {name: change})]) == ""


def test_what_cannot_be_played_is_said() -> None:
    owners = {name: owner(tower(), table()) for name in ("p0", "p1")}
    with raises(UnfitError):
        played("uploads", scene(SERVER, [], owners))
    with raises(UnfitError):
        played("tops", scene("p0", [*messages("p0", SERVER, weights_of(tower()))], owners))
    few = {
        name: Owner(each.encoder, each.inputs, SPLITS | {"test": OTHERS[:1]})
        for name, each in owners.items()
    }
    with raises(UnfitError, names="20"):
        played("uploads", scene(SERVER, [*messages("p1", SERVER, weights_of(tower()))], few))
    bare = {"encoder.1.weight": torch.zeros(WIDTH, WIDTH)}
    with raises(UnfitError):
        played("uploads", scene(SERVER, [*messages("p1", SERVER, bare)], owners))
