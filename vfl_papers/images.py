"""The data sets of the papers whose rows are images."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_papers import dividing
from vfl_papers.dataset import (
    TEST,
    TRAIN,
    Block,
    Content,
    ContentPart,
    DataSet,
    Division,
    Files,
    Form,
    Need,
    PaperUse,
    Request,
    compute_md5,
    damage_error,
)
from vfl_papers.dividing import IMAGE_DIVISIONS, make_parts
from vfl_papers.formats import (
    Images,
    PictureRows,
    folders_in,
    images_in,
    join_splits,
    open_files,
    read_cifar_binary,
    read_cifar_pickle,
    read_idx_pair,
    read_jpegs,
    read_npz,
    read_svhn,
)
from vfl_party.base.seeds import derive_seed, draw_permutation

_FEDHSSL_TABLES = "Tables IV-VII, IX-XII; Figs. 5-8"
# The values of FedOnce's Table 5 for images.
_FEDONCE = dividing.fedonce(
    dividing.CNN0, [128], (1e-4, 1e-5, 128, 100), (1e-3, 1e-5, 128, 200), d=16, f=3
)


# -- Four IDX files: MNIST (LeCun et al. 1998), KMNIST (Clanuwat et al. 2018), and Fashion-MNIST
# -- (Xiao et al. 2017)

# {MD5 digest of the 10,000 test labels, without the header of their file: data set}. The digest of
# KMNIST's labels is not known; its files are recognized by their published digests.
_TEST_LABELS = {
    "073c3904dfbd3e141ff8aa01cfde6b15": "MNIST",
    "8dea97a4e78c1bd1b5a6e8efbb870b6e": "Fashion-MNIST",
}
# Images and labels for training, then images and labels for testing.
_IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx_set(
    title: str,
    folder: str,
    publisher: str,
    what: str,
    digests: Sequence[tuple[int, str]],
    where: str,
    *other_forms: Form,
) -> DataSet:
    """Returns a data set of four IDX files with grey images of 28 × 28 in ten classes.

    Args:
        title: The name of the data set.
        folder: The folder of its files in torchvision, which is also searched.
        publisher: The publisher.
        what: A description of the images.
        digests: The size in bytes and the MD5 digest of each of ``_IDX_FILES``.
        where: The tables and figures of FedOnce that use the data set.
        other_forms: Forms that are not official.
    """
    needs = []
    for name, (size, md5) in zip(_IDX_FILES, digests, strict=True):
        plain = name.removesuffix(".gz")
        needs.append(
            Need(
                name,
                (
                    plain,
                    *(f"{folder}/{file}" for file in (name, plain)),
                    *(f"{folder}/raw/{file}" for file in (name, plain)),
                ),
                size,
                md5,
            )
        )
    silent = (
        "The paper does not say which of the training images are for validation; it tunes by five "
        "folds."
    )
    return DataSet(
        title=title,
        publisher=publisher,
        holds=f"grey images of 28 × 28, {what}",
        rows=70_000,
        task={"kind": "multiclass", "classes": 10},
        forms=(
            Form(tuple(needs), partial(_read_idx_files, title), {TRAIN: 60_000, TEST: 10_000}),
            *other_forms,
        ),
        divisions=IMAGE_DIVISIONS,
        uses=(PaperUse("FedOnce", where, "quadrants", 4, _FEDONCE, silent=silent),),
        memory="about 200 MB",
    )


def _read_idx_files(title: str, files: Files, _: Request) -> Content:
    """Reads four IDX files. Raises InputError if they belong to another data set than ``title``."""
    paths = [files[name] for name in _IDX_FILES]
    test = read_idx_pair(*paths[2:])
    owner = _identify_labels(paths[3], test[1].tobytes())
    if owner not in (None, title):
        raise InputError(
            Code.FILE_INVALID,
            f"{paths[3]}: holds the labels of {owner} (expected {title}). Give the folder with the "
            f"files of {title}.",
        )
    differs = () if owner == title else ("The test labels are not the published ones.",)
    return replace(join_splits([read_idx_pair(*paths[:2]), test]), differs=differs)


def _identify_labels(path: Path, labels: bytes) -> str | None:
    """Returns the data set of a file of test labels; None if it is unknown. MNIST, KMNIST and
    Fashion-MNIST have the same file names.
    """
    digest = hashlib.md5(labels, usedforsecurity=False).hexdigest()
    published = {
        DATASETS[name].forms[0].needs[3].md5: DATASETS[name].title
        for name in ("fashion_mnist", "kmnist", "mnist")
    }
    return _TEST_LABELS.get(digest) or published.get(compute_md5(path))


# -- CIFAR-10 and CIFAR-100 (Krizhevsky 2009), and SVHN (Netzer et al. 2011)


def _cifar_forms(
    archive: Need,
    folder: str,
    train: Sequence[str],
    test: str,
    read: Callable[[str, bytes], Images],
    classes: tuple[str, ...] = (),
) -> list[Form]:
    """Returns the forms of a version of CIFAR, as an archive and unpacked.

    Args:
        archive: The archive.
        folder: The name of the folder in it.
        train: The names of the files of training rows.
        test: The name of the file of test rows.
        read: A function that reads a file from its name and its content.
        classes: The names of the classes.
    """

    def read_all(need: Need, files: Files, _: Request) -> Content:
        with open_files(files[need.name]) as read_file:
            batches = [read(name, read_file(name)) for name in train]
            images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
            return join_splits([(images, labels), read(test, read_file(test))], classes)

    rows = {TRAIN: 50_000, TEST: 10_000}
    needs = (archive, Need(folder, folder=True))
    return [Form((need,), partial(read_all, need), rows) for need in needs]


_CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_SVHN_FILES = (
    Need("train_32x32.mat", (), 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
    Need("test_32x32.mat", (), 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
)


# -- ImageNet (Deng et al. 2009): folders of photographs of mixed sizes. Some classes are drawn.

# The sizes are those of the archives.
_TRAIN_FOLDER = Need("train", bytes=147_897_477_120, folder=True)
_VAL_FOLDER = Need("val", ("validation",), bytes=6_744_924_160, folder=True)
# Kaggle's list of the classes of validation images, which are in one folder there.
_VAL_LIST = Need("LOC_val_solution.csv", optional=True)


def _imagenet(classes: int, title: str, rows: int, *uses: PaperUse) -> DataSet:
    """Returns a data set of ``classes`` classes of ImageNet, which have about ``rows`` images."""
    return DataSet(
        title=title,
        publisher="https://image-net.org (ILSVRC 2012, a folder for each class, as n01440764)",
        holds=f"photographs of mixed sizes, in {classes} of 1,000 classes",
        rows=rows,
        task={"kind": "multiclass", "classes": classes},
        forms=(Form((_TRAIN_FOLDER, _VAL_FOLDER, _VAL_LIST), partial(_read_imagenet, classes)),),
        divisions=IMAGE_DIVISIONS,
        uses=uses,
        memory="about 300 MB",
        options={
            "size": (224, "the height and width of an image, in pixels"),
            "classes": ("", "the folders of the classes, with commas between; drawn if empty"),
        },
    )


def _read_imagenet(classes: int, files: Files, request: Request) -> Content:
    train, val = files[_TRAIN_FOLDER.name], files[_VAL_FOLDER.name]
    names, listed = _choose_classes(train, classes, request), _read_val_list(files)
    rows = PictureRows(request.options["size"], single=True)
    for label, name in enumerate(names):
        for split, root in ((TRAIN, train), (TEST, val)):
            paths = images_in(root / name) or (listed.get(name, []) if split == TEST else [])
            if not paths:
                raise InputError(
                    Code.FILE_INVALID,
                    f"{root / name}: holds no images, but each class needs {split} rows. Unpack "
                    "the archives of ImageNet.",
                )
            for path in paths:
                rows.add([path], label, split, f"{split}/{name}/{path.name}")
    return rows.content(
        names, "The validation images are for testing, because the test images have no labels"
    )


def _choose_classes(root: Path, classes: int, request: Request) -> list[str]:
    """Returns the names of the requested or drawn classes, sorted. Raises InputError."""
    known = [folder.name for folder in folders_in(root)]
    names = {name.strip() for name in str(request.options["classes"]).split(",") if name.strip()}
    unknown = sorted(names.difference(known))
    if unknown:
        raise InputError(
            Code.CONFIG_INVALID,
            f"classes: there is no folder {root / unknown[0]}. Correct the name.",
        )
    if names and len(names) != classes:
        raise InputError(
            Code.CONFIG_INVALID,
            f"classes: must be {classes} names (got {len(names)}). Name {classes}, or none to "
            "draw them.",
        )
    if len(known) < classes:
        raise InputError(
            Code.FILE_INVALID,
            f"{root}: must hold {classes} folders (got {len(known)}). Unpack the archives of "
            "ImageNet.",
        )
    order = draw_permutation(derive_seed(request.seed, "imagenet"), len(known))
    return sorted(names or [known[at] for at in order[:classes]])


def _read_val_list(files: Files) -> Mapping[str, list[Path]]:
    """Returns {class: validation images} of Kaggle's list; {} without it. Raises InputError."""
    images: dict[str, list[Path]] = {}
    if _VAL_LIST.name not in files:
        return images
    path = files[_VAL_LIST.name]
    path_of = {image.stem: image for image in images_in(files[_VAL_FOLDER.name])}
    try:
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                image = path_of.get(line["ImageId"])
                if image is not None:
                    images.setdefault(line["PredictionString"].split()[0], []).append(image)
    except (OSError, ValueError, KeyError, IndexError, AttributeError, csv.Error):
        raise damage_error(path, "not a list with ImageId and PredictionString") from None
    return images


# -- Rows of several images: ModelNet10 and ModelNet40 (Wu et al. 2015), and BHI (Janowczyk and
# -- Madabhushi 2016)


def _pick_view(number: int, block: Block) -> Block:
    return block[:, number]


def _make_view_parts(_: Content, request: Request) -> list[ContentPart]:
    return make_parts(request, [partial(_pick_view, number) for number in range(request.parties)])


def _views(says: str, *parties: int) -> Division:
    """Returns the division in which each party has one image of each row, in their order."""
    return Division(says, _make_view_parts, parties)


_VIEWS = 12
# The names are like airplane_0001_001.png, airplane_0001.1.png or airplane_0001-1.jpg.
_VIEW_NAME = re.compile(r"(?P<object>.+)[._-](?P<view>\d+)")


def _modelnet(
    title: str, objects: int, size: int, folders: Sequence[str], use: PaperUse
) -> DataSet:
    """Returns a data set of rendered views of objects.

    Args:
        title: The name of the data set.
        objects: The number of objects in the first ten classes by name.
        size: The default height and width of an image.
        folders: The possible names of the folder of rendered views.
        use: The paper's use of the data set.
    """
    need = Need(folders[0], tuple(folders[1:]), folder=True)
    run = "one image of its own run of the twelve views of each object"
    return DataSet(
        title=title,
        publisher="https://modelnet.cs.princeton.edu as shapes, and as twelve rendered views by "
        "https://github.com/jongchyisu/mvcnn_pytorch (modelnet40_images_new_12x)",
        holds="twelve views of an object, in the first ten classes",
        rows=objects,
        task={"kind": "multiclass", "classes": 10},
        forms=(Form((need,), partial(_read_modelnet, need.name, objects)),),
        divisions={"views": _views(run, 1, 2, 3, 4, 6, 12)},
        uses=(use,),
        memory="about 300 MB",
        options={
            "size": (size, "the height and width of an image, in pixels"),
            "samples": (1, "the maximum number of rows of an object, each with other views"),
        },
    )


def _read_modelnet(need: str, published: int, files: Files, request: Request) -> Content:
    root = files[need]
    kinds = [folder for folder in folders_in(root) if images_in(folder / TRAIN)][:10]
    if len(kinds) < 10:
        raise InputError(
            Code.FILE_INVALID,
            f"{root}: must hold 10 folders CLASS/train with images (got {len(kinds)}). Render "
            "twelve views of each object into it.",
        )
    rows, objects = PictureRows(request.options["size"]), 0
    for label, kind in enumerate(kinds):
        for split in (TRAIN, TEST):
            for name, views in _find_objects(kind / split).items():
                for sample, chosen in enumerate(_draw_samples(views, request, objects)):
                    rows.add(chosen, label, split, f"{kind.name}/{split}/{name}/{sample}")
                objects += 1
    note = f"The folder has {objects:,} objects (published: {published:,})."
    differs = [note] if objects != published else []
    names = [kind.name for kind in kinds]
    return rows.content(names, "The makers' split is kept", differs=differs)


def _find_objects(folder: Path) -> dict[str, list[Path]]:
    """Returns {object: its views in their order}. Raises InputError unless each has twelve."""
    objects: defaultdict[str, dict[int, Path]] = defaultdict(dict)
    for path in images_in(folder):
        parts = _VIEW_NAME.fullmatch(path.stem)
        if parts is None or int(parts["view"]) in objects[parts["object"]]:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: is not named OBJECT_VIEW, such as chair_0001_003.png, or is a second "
                "file of this view. Rename or remove it.",
            )
        objects[parts["object"]][int(parts["view"])] = path
    for name, views in objects.items():
        if len(views) != _VIEWS:
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: {name} must have {_VIEWS} views (got {len(views)}). Render it again, "
                "or remove it.",
            )
    return {name: [views[at] for at in sorted(views)] for name, views in sorted(objects.items())}


def _draw_samples(views: Sequence[Path], request: Request, place: int) -> list[list[Path]]:
    """Returns different rows of an object: one random view from each party's run of views."""
    k = request.parties
    run = _VIEWS // k
    codes = draw_permutation(derive_seed(request.seed, "modelnet", place), run**k)
    chosen = codes[: request.options["samples"]].tolist()
    return [[views[run * part + code // run**part % run] for part in range(k)] for code in chosen]


_BHI_FOLDER = Need("IDC_regular_ps50_idx5", (".",), folder=True)
_BHI_IMAGES = 277_524


def _read_bhi(files: Files, request: Request) -> Content:
    """Groups images of each patient with the same label at random. Images that do not fill a row
    are left out.
    """
    patients = _find_patients(files[_BHI_FOLDER.name])
    order = draw_permutation(derive_seed(request.seed, "bhi", "patients"), len(patients))
    training = set(order[: round(0.8 * len(patients))].tolist())
    rows, k, images = PictureRows(request.options["size"]), request.parties, 0
    for place, patient in enumerate(patients):
        split = TRAIN if place in training else TEST
        for label in (0, 1):
            paths = images_in(patient / str(label))
            images += len(paths)
            order = draw_permutation(derive_seed(request.seed, "bhi", place, label), len(paths))
            for start in range(0, len(paths) - k + 1, k):
                views = [paths[at] for at in order[start : start + k]]
                rows.add(views, label, split, f"{patient.name}-{label}-{start // k:05d}")
    unread = images - k * len(rows)
    note = f"{unread:,} images had no partner of the same patient and label, and were left out."
    difference = f"The folder has {images:,} images (published: {_BHI_IMAGES:,})."
    return rows.content(
        ("no cancer", "cancer (IDC)"),
        "80 % of the patients were drawn for training, and the others are for testing",
        [note] if unread else [],
        [difference] if images != _BHI_IMAGES else [],
    )


def _find_patients(root: Path) -> Sequence[Path]:
    """Returns the patients' folders, whose names are numbers. Raises InputError."""
    folders = [folder for folder in folders_in(root) if folder.name.isdigit()]
    inner = root / _BHI_FOLDER.name
    if not folders and inner.is_dir():
        return _find_patients(inner)
    if not any(images_in(folder / label) for folder in folders for label in "01"):
        raise InputError(
            Code.FILE_INVALID,
            f"{root}: holds no images of a patient, as in 10253/0 and 10253/1. Unpack the "
            "archive of BHI into it.",
        )
    return folders


# {name: data set}
DATASETS: Mapping[str, DataSet] = {
    "bhi": DataSet(
        title="BHI",
        publisher="Kaggle: paultimothymooney/breast-histopathology-images (IDC_regular_ps50_idx5)",
        holds="two colour images of 50 × 50 of one patient with the same label",
        rows=138_000,
        task={"kind": "binary", "positive": 1},
        forms=(Form((_BHI_FOLDER,), _read_bhi),),
        divisions={
            "patients": _views("one of the images of a patient with the same label", 2, 3, 4)
        },
        uses=(
            PaperUse(
                "FedHSSL",
                _FEDHSSL_TABLES,
                "patients",
                2,
                dividing.fedhssl(dividing.RESNET18, 512),
                silent="The paper does not say how images are paired, how many pairs there are, "
                "or what happens to images at an edge, which are smaller than 50 × 50. Here each "
                "image is in one pair, drawn at random, and smaller ones are enlarged.",
            ),
        ),
        memory="about 300 MB",
        options={"size": (50, "the height and width of an image, in pixels")},
    ),
    "cifar10": DataSet(
        title="CIFAR-10",
        publisher="https://www.cs.toronto.edu/~kriz/cifar.html",
        holds="colour images of 32 × 32 in ten classes",
        rows=60_000,
        task={"kind": "multiclass", "classes": 10},
        forms=(
            *_cifar_forms(
                Need("cifar-10-python.tar.gz", (), 170_498_071, "c58f30108f718f92721af3b95e74349a"),
                "cifar-10-batches-py",
                [f"data_batch_{number}" for number in range(1, 6)],
                "test_batch",
                partial(read_cifar_pickle, "labels"),
                _CIFAR10_CLASSES,
            ),
            *_cifar_forms(
                Need("cifar-10-binary.tar.gz", (), 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
                "cifar-10-batches-bin",
                [f"data_batch_{number}.bin" for number in range(1, 6)],
                "test_batch.bin",
                partial(read_cifar_binary, 1),
                _CIFAR10_CLASSES,
            ),
            Form(
                (Need("cifar10.parquet"),),
                lambda files, _: read_jpegs(files["cifar10.parquet"], 32),
                unofficial="a table of JPEG images, whose compression loses detail",
            ),
        ),
        divisions=IMAGE_DIVISIONS,
        uses=(
            PaperUse(
                "MocoSFL",
                "Tables 2-12",
                "rows",
                5,
                dividing.mocosfl(),
                silent="The paper's non-IID division, two classes a client, is `deal = classes:2`. "
                "Here the test images lie at the clients, who send their features to be scored; in "
                "the paper they lie at the server.",
            ),
            PaperUse(
                "FedOnce",
                "Fig. 11",
                "quadrants",
                4,
                _FEDONCE,
                silent="The paper does not give the numbers of this experiment: they are those of "
                "MNIST.",
            ),
        ),
        memory="about 450 MB",
    ),
    "cifar100": DataSet(
        title="CIFAR-100",
        publisher="https://www.cs.toronto.edu/~kriz/cifar.html",
        holds="colour images of 32 × 32 in a hundred classes",
        rows=60_000,
        task={"kind": "multiclass", "classes": 100},
        forms=(
            *_cifar_forms(
                Need(
                    "cifar-100-python.tar.gz", (), 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"
                ),
                "cifar-100-python",
                ["train"],
                "test",
                partial(read_cifar_pickle, "fine_labels"),
            ),
            *_cifar_forms(
                Need(
                    "cifar-100-binary.tar.gz", (), 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"
                ),
                "cifar-100-binary",
                ["train.bin"],
                "test.bin",
                partial(read_cifar_binary, 2),
            ),
        ),
        divisions=IMAGE_DIVISIONS,
        uses=(
            PaperUse(
                "MocoSFL",
                "Table 13; the source of Tables 4, 10, 11",
                "rows",
                5,
                dividing.mocosfl(),
                deal="classes:20",
                silent="The text at hand does not say how many classes of CIFAR-100 a client has "
                "without IID; FedEMA, with which it compares, gives 20 of 100.",
            ),
        ),
        memory="about 450 MB",
    ),
    "fashion_mnist": _idx_set(
        "Fashion-MNIST",
        "FashionMNIST",
        "https://github.com/zalandoresearch/fashion-mnist",
        "pieces of clothing",
        (
            (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        "Tables 4, 5; Figs. 5c, 6c",
    ),
    "imagenet100": _imagenet(
        100,
        "ImageNet100",
        131_000,
        PaperUse(
            "SS-VFL",
            "Table 1; Figs. 2, 3",
            "halves",
            2,
            dividing.ssvfl("resnet50"),
            silent="The paper draws its classes at random and does not name them, and does not say "
            "which half is whose, how images are brought to one size, or how wide an embedding is: "
            "128 numbers fit the bytes of Table 1.",
        ),
    ),
    "imagenet12": _imagenet(
        12,
        "ImageNet-12",
        16_000,
        PaperUse(
            "MocoSFL",
            "main text",
            "rows",
            5,
            dividing.mocosfl(dividing.LARGE_RESNET18),
            silent="Only the paper's appendix is at hand, which names neither the classes nor the "
            "size: they are drawn, unless `classes` names them.",
        ),
    ),
    "kmnist": _idx_set(
        "KMNIST",
        "KMNIST",
        "http://codh.rois.ac.jp/kmnist (Kuzushiji-MNIST)",
        "cursive Japanese characters",
        (
            (18_165_135, "bdb82020997e1d708af4cf47b453dcf7"),
            (29_497, "e144d726b3acfaa3e44228e80efcd344"),
            (3_041_136, "5c965bf0a639b31b8f53240b1b52f4d7"),
            (5_120, "7320c461ea6c1c855c0b718fb2a4b134"),
        ),
        "Tables 4, 5, 7; Figs. 5c, 6c",
    ),
    "mnist": _idx_set(
        "MNIST",
        "MNIST",
        "http://yann.lecun.com/exdb/mnist, or its mirrors (Hugging Face: ylecun/mnist)",
        "handwritten digits",
        (
            (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        "Tables 4-7, 10; Figs. 5c, 6c, 7",
        Form(
            (Need("mnist10k.npz"),),
            lambda files, _: read_npz(files["mnist10k.npz"]),
            unofficial="an NPZ file of the 10,000 test images, without the training images",
        ),
    ),
    "modelnet10": _modelnet(
        "ModelNet10",
        4_899,
        224,
        ("ModelNet10", "modelnet10_images_new_12x", "modelnet10"),
        PaperUse(
            "SS-VFL",
            "Table 1; Fig. 3",
            "views",
            12,
            dividing.ssvfl("resnet18"),
            silent="The paper does not give the size of a view, the renderer, the batch size, or "
            "the width of an embedding: 128 numbers fit the bytes of Table 1.",
        ),
    ),
    "modelnet40": _modelnet(
        "ModelNet40",
        4_354,
        32,
        ("ModelNet40", "modelnet40_images_new_12x", "modelnet40v1", "modelnet40"),
        PaperUse(
            "FedHSSL",
            _FEDHSSL_TABLES,
            "views",
            4,
            dividing.fedhssl(dividing.RESNET18, 512),
            silent="The paper has 24,630 training rows and 6,204 for testing, of about 3,644 and "
            "710 objects, and does not say how they are drawn: `samples = 7` comes near. It does "
            "not give the size of an image; its released code has 32 × 32.",
        ),
    ),
    "svhn": DataSet(
        title="SVHN",
        publisher="http://ufldl.stanford.edu/housenumbers (format 2: cropped digits)",
        holds="colour images of 32 × 32 in ten classes",
        rows=99_289,
        task={"kind": "multiclass", "classes": 10},
        forms=(
            Form(
                _SVHN_FILES,
                lambda files, _: join_splits([read_svhn(files[need.name]) for need in _SVHN_FILES]),
                {TRAIN: 73_257, TEST: 26_032},
            ),
        ),
        divisions=IMAGE_DIVISIONS,
        uses=(
            PaperUse(
                "MocoSFL",
                "Table 9, the source data",
                "rows",
                1,
                dividing.mocosfl(),
                silent="The paper mixes the images with 0 to 1 % of CIFAR-10's. It does not say "
                "whether the 531,131 images of `extra_32x32.mat` take part; here they do not.",
            ),
        ),
        memory="about 900 MB",
    ),
}
