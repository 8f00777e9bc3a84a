"""What MocoSFL's tables share: dealt images, networks, and the settings of appendix A.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.papers.describe import At, Column, Data, Line, Tables

IID, OTHER = "IID", "non-IID"
_DEAL = {IID: "even", OTHER: "classes:2"}
# The height and width of images.
SIDE = At(32, 16)
SMALL = (
    "3,000 images of 16 x 16, 10 epochs, a CNN of four convolutions, a queue of 400 keys and a "
    "learning rate of 0.01"
)
NOTES = (
    "two classes a client where the paper says non-IID; its appendix does not say how",
    "at the scale `small` a random network already has about 40 % by a linear probe",
    "at the scale `small` the cut of MocoSFL-3 leaves the server one convolution of the CNN's four;"
    " of ResNet-18's 17 it leaves it 14",
    "bottoms of K clients move a K-th as far as one client's, since each has its part of the "
    "gradient of one mean loss",
    "the scale `small` was changed after its first results, from 4 epochs on 32 x 32 to 10 on 16 x 16:"
    " 4 epochs gave hardly more than a random network",
    "the last epoch is probed, and not the one with the best vote of neighbours",
)
_SMALL_CNN: Tables = {"kind": "cnn", "channels": [32, 64, 128, 256]}
# {network: (its encoder, the width of its features)}
NETWORKS = {
    "ResNet-18": ("resnet18", 512),
    "ResNet-50": ("resnet50", 2048),
    "MobileNetV2": ("mobilenet_v2", 1280),
    "VGG-13": ("vgg13", 512),
}


def model(network: str) -> Tables:
    """Returns a recipe's model; at the scale small, a CNN in place of ResNet-18."""
    kind, width = NETWORKS[network]
    if network != "ResNet-18":
        return {"embedding_size": width, "encoder": {"kind": kind}}
    return {"embedding_size": At(width, 256), "encoder": At({"kind": kind}, _SMALL_CNN)}


def dealt(name: str, prepare: str, classes: int, parties: int = 5) -> Data:
    """Returns a data set of images that are dealt to clients."""
    return Data(
        name,
        prepare,
        {"kind": "multiclass", "classes": classes},
        parties,
        "accuracy",
        model("ResNet-18"),
        At(None, 3000),
        options={"divide": "rows"},
        reading={"resize": SIDE},
        dealt=True,
        # The probe has no learning rate to choose.
        shares=(0.0, 0.2),
        # A linear probe of a network that was not trained reaches this at the scale small.
        untrained=At(None, 45.0) if classes == 10 else None,
    )


CIFAR10 = dealt("CIFAR-10", "cifar10", 10)
CIFAR100 = dealt("CIFAR-100", "cifar100", 100)
PROBE: Tables = {
    "kind": "probe",
    "splits": ["test"],
    "epochs": At(100, 20),
    "least_steps": At(1, 1000),
}


def pretraining(cut: int, **more: Any) -> Tables:
    """Returns MocoSFL with ``cut`` convolutions at the clients; the number of clients decides batch,
    averages and sampling, as the paper's auto-adjust.
    """
    return {
        "kind": "mocosfl",
        "image": [3, SIDE, SIDE],
        "cut": cut,
        "epochs": At(200, 10),
        "queue": At(6000, 400),
        "auto_adjust": True,
        "optimizer": {
            "kind": "sgd",
            "lr": At(0.06, 0.01),
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "schedule": "cosine",
        },
        **more,
    }


def line(cut: int, network: str = "", probe: Tables = PROBE, **more: Any) -> Line:
    """Returns MocoSFL-``cut``, with a network if the table has several."""
    phases = [pretraining(cut, **more), probe]
    if not network:
        return Line(f"MocoSFL-{cut}", phases)
    small = network == "ResNet-18"
    return Line(
        f"MocoSFL-{cut} ({network})",
        phases,
        changes={"model": model(network)},
        at=("paper", "small") if small else ("paper",),
    )


def columns(
    clients: Sequence[int], small: Sequence[int], deals: Sequence[str] = (IID, OTHER), **more: Any
) -> tuple[Column, ...]:
    """Returns a column for each number of clients and way to deal."""
    return tuple(
        Column(
            f"{n} clients, {deal}" if len(clients) > 1 else deal,
            parties=n,
            prepare={"deal": _DEAL[deal]},
            at=("paper", "small") if n in small else ("paper",),
            **more,
        )
        for n in clients
        for deal in deals
    )
