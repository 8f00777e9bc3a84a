"""Recipe tables (model, phases and rows) with the hyperparameters of the papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Tables = dict[str, Any]
# CNN0 of FedOnce (Fig. 4), with the hidden layer of the guests (Table 2).
CNN0: Tables = {"kind": "cnn0", "hidden": [128]}
# Without the last layer, the embedding is the pooled output of ResNet. RESNET18 is for images of 32
# to 64 pixels per side, and the LARGE variants are for larger images.
RESNET18: Tables = {"kind": "resnet18", "last_layer": False}
LARGE_RESNET18: Tables = RESNET18 | {"small_images": False}
LARGE_RESNET50: Tables = LARGE_RESNET18 | {"kind": "resnet50"}


def _adam(lr: float, decay: float) -> Tables:
    return {"kind": "adam", "lr": lr, "weight_decay": decay}


def fedonce(
    encoder: Mapping[str, Any],
    top: Sequence[int],
    guest: tuple[float, float, int, int],
    host: tuple[float, float, int, int],
    *,
    d: int = 3,
    f: int = 1,
) -> Tables:
    """Returns the tables of FedOnce-L0 (Wu et al. 2022, Table 5).

    Args:
        encoder: The settings of the encoder.
        top: The hidden layers of the top model.
        guest: Learning rate η, weight decay λ, batch size b and epochs T of the guests.
        host: Learning rate, weight decay, batch size and epochs of the host.
        d: The width of a representation.
        f: The number of epochs from one matching to the next.
    """
    (guest_lr, guest_decay, guest_batch, guest_epochs) = guest
    (host_lr, host_decay, host_batch, host_epochs) = host
    local = {
        "kind": "fedonce",
        "epochs": guest_epochs,
        "batch_size": guest_batch,
        "match_every": f,
        "optimizer": _adam(guest_lr, guest_decay),
    }
    joint = {
        "kind": "head",
        "own_encoder": "trained",
        "epochs": host_epochs,
        "batch_size": host_batch,
        "optimizer": _adam(host_lr, host_decay),
    }
    model = {"embedding_size": d, "encoder": dict(encoder), "top": {"hidden": list(top)}}
    return {"model": model, "phases": [local, joint, {"kind": "evaluate"}]}


def fedhssl(
    encoder: Mapping[str, Any], d: int, *, rounds: int = 40, batch_size: int = 128
) -> Tables:
    """Returns the tables of FedHSSL-SimSiam with 40 % of the rows aligned and 200 of them labelled,
    followed by split training (He et al. 2022, Table IV and Appendix B).

    ``d`` is the width of an embedding, ``rounds`` the number of pretraining rounds, and
    ``batch_size`` the batch size of fine-tuning.
    """
    tuning = {
        "kind": "splitnn",
        "steps": 1000,
        "batch_size": batch_size,
        "validate_every": 50,
        "optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
    }
    pretraining = {"kind": "fedhssl", "ssl": "simsiam", "rounds": rounds, "batch_size": 512}
    return {
        "rows": {"aligned": 0.4, "labelled": 200},
        "model": {"embedding_size": d, "encoder": dict(encoder)},
        "phases": [pretraining, tuning, {"kind": "evaluate"}],
    }


def ssvfl(encoder: Mapping[str, Any], d: int) -> Tables:
    """Returns the tables of SS-VFL-I: 200 epochs at each party alone, then 500 epochs of a linear
    layer (Castiglia et al. 2022, section 4). All rows are labelled unless ``rows.labelled`` is set.
    """
    return {
        "model": {"embedding_size": d, "encoder": dict(encoder)},
        "phases": [
            {
                "kind": "contrastive",
                "ssl": "moco",
                "rounds": 200,
                "batch_size": 512,
                "queue": 4096,
            },
            {"kind": "head", "epochs": 500, "batch_size": 64},
            {"kind": "evaluate"},
        ],
    }


def mocosfl(encoder: Mapping[str, Any] = RESNET18) -> Tables:
    """Returns the tables of MocoSFL-3 with the batch size for five clients, followed by a linear
    probe (Li et al. 2023, Appendix A.1). The image shape is added from the prepared data.
    """
    return {
        "model": {"embedding_size": 512, "encoder": dict(encoder)},
        "phases": [
            {
                "kind": "mocosfl",
                "cut": 3,
                "batch_size": 20,
                "queue": 6000,
            },
            {"kind": "probe"},
        ],
    }


def splitnn(encoder: Mapping[str, Any], d: int) -> Tables:
    """Returns the tables of split training, for a division that no paper uses."""
    return {
        "model": {"embedding_size": d, "encoder": dict(encoder)},
        "phases": [{"kind": "splitnn", "epochs": 20, "batch_size": 128}, {"kind": "evaluate"}],
    }
