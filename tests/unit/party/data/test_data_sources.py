"""NPZ files, folders of images, named sets, and views of images."""

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings, ViewSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, load_table


def load(source: str, *, with_label: bool = False, **settings: Any) -> Table:
    return load_table(DataSettings(source=source, **settings), with_label=with_label)


def refused(
    source: str, code: Code = Code.DATA_INVALID, *, with_label: bool = False, **more: Any
) -> None:
    with raises(InputError, code) as caught:
        load(source, with_label=with_label, **more)
    assert str(caught.value).startswith(source)


def npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def pixels(table: Table) -> npt.NDArray[np.float32]:
    assert present(table.images_NCHW).flags.c_contiguous
    return table.pixels()


def numbers(table: Table) -> npt.NDArray[np.float32]:
    return present(table.numeric_NF)


# --- NPZ


def test_npz_table_with_ids_and_labels(tmp_path: Path) -> None:
    x = np.arange(6.0).reshape(3, 2)
    source = npz(
        tmp_path / "x.npz", x=x, who=np.array(["c", "a", "b"]), y=np.array([[2], [0], [1]])
    )
    table = load(source, id="who", label="y", with_label=True)
    assert table.ids == ("a", "b", "c")
    assert table.numeric_names == ("x.0", "x.1")
    np.testing.assert_array_equal(table.numeric_NF, x[[1, 2, 0]])
    assert present(table.labels).tolist() == [0, 1, 2]
    assert load(source, id="who", label="y").labels is None
    refused(source, id="who")
    assert load(source, id="who", drop=("y",)).numeric_names == ("x.0", "x.1")
    refused(source, id="whom")
    refused(source, id="who", with_label=True)
    refused(source, columns=("z",))
    refused(source, id="x", columns=("who",))


def test_npz_row_numbers_are_ids_that_a_limit_does_not_change(tmp_path: Path) -> None:
    source = npz(tmp_path / "x.npz", x=np.zeros((11, 1)))
    assert load(source).ids[:2] == ("00", "01")
    assert load(source, limit=2).ids == ("00", "01")


def test_npz_several_arrays_types_and_view(tmp_path: Path) -> None:
    source = npz(
        tmp_path / "x.npz",
        a=np.array([1, 2], np.int8),
        b=np.array([[True, False], [False, True]]),
        t=np.array([b"u", b"v"]),
        i=np.array([5, 3]),
    )
    table = load(source, id="i", columns=("a", "b", "t"), categorical=("b.1",))
    assert table.ids == ("3", "5")
    assert table.numeric_names == ("a", "b.0")
    assert table.categorical_names == ("b.1", "t")
    assert present(table.categorical).texts().tolist() == [["1", "v"], ["0", "u"]]
    view = ViewSettings(scheme="columns", part=1, parts=2)
    assert load(source, id="i", columns=("a", "b", "t"), view=view).categorical_names == ("t",)


def test_npz_bad_values(tmp_path: Path) -> None:
    source = npz(tmp_path / "x.npz", x=np.array([[1.0], [np.nan]]))
    refused(source)
    refused(npz(tmp_path / "x.npz", x=np.zeros((2, 1)), i=np.zeros(2)), id="i")
    refused(npz(tmp_path / "x.npz", x=np.zeros((2, 1)), y=np.zeros(3)), columns=("x", "y"))
    refused(npz(tmp_path / "x.npz", x=np.zeros((0, 1))))
    refused(npz(tmp_path / "x.npz", x=np.float64(1)))
    refused(npz(tmp_path / "x.npz", x=np.zeros(2, complex)))
    refused(npz(tmp_path / "x.npz", x=np.zeros((2, 2, 2, 2, 2))))
    refused(npz(tmp_path / "x.npz", x=np.zeros((2, 4, 4)), y=np.zeros(2)), columns=("x", "y"))
    bad_image = np.zeros((3, 2, 2))
    bad_image[1, 0, 0] = np.nan
    refused(npz(tmp_path / "x.npz", x=bad_image))
    pixels(load(str(tmp_path / "x.npz"), missing="mean"))
    bad_image[2, 0, 0] = np.inf
    refused(npz(tmp_path / "x.npz", x=bad_image), missing="mean")


def test_npz_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.array([{}], object), allow_pickle=True)
    refused(str(path), Code.FILE_INVALID)
    good = Path(npz(path, x=np.random.default_rng(0).normal(size=(100, 9)))).read_bytes()
    for content in (b"", b"text", good[:300], good[:400] + b"xxxx" + good[404:], b"PK\x03\x04"):
        path.write_bytes(content)
        refused(str(path), Code.FILE_INVALID)
    with path.open("wb") as file:
        np.save(file, np.zeros((2, 2)))
    refused(str(path), Code.FILE_INVALID)


@pytest.mark.parametrize("shape", [(10**12,), (10**6, 10**6), (10**6, 1000, 1000)])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("promised", [0, 10**13], ids=["by the array", "by the directory, too"])
def test_npz_that_promises_more_than_its_bytes_can_hold(
    tmp_path: Path, shape: tuple[int, ...], method: int, promised: int
) -> None:
    """The array's header says 8 TB, and 100 bytes follow."""
    path, head = tmp_path / "x.npz", io.BytesIO()
    described = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(head, described)
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("x.npy", head.getvalue() + bytes(100))
        # What the directory is written from.
        file.filelist[0].file_size = promised or file.filelist[0].file_size
    refused(str(path), Code.FILE_INVALID)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, 5, 6), (1, 5, 6)), ((2, 5, 6, 3), (3, 5, 6)), ((2, 3, 5, 6), (3, 5, 6))],
)
def test_npz_images(tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    image = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    found = pixels(load(npz(tmp_path / "x.npz", x=image)))
    assert found.shape[1:] == expected
    assert found.max() == np.float32(image.max()) / np.float32(255)
    channels_last = image if shape[1:] != expected else image.transpose(0, 2, 3, 1)
    if image.ndim == 4:
        np.testing.assert_allclose(found.transpose(0, 2, 3, 1) * 255, channels_last, rtol=1e-6)


def test_npz_images_without_pixels(tmp_path: Path) -> None:
    source = npz(tmp_path / "x.npz", x=np.zeros((3, 4, 0), np.uint8))
    refused(source)
    refused(source, resize=3)


def test_npz_images_whose_channels_cannot_be_told(tmp_path: Path) -> None:
    source = npz(tmp_path / "x.npz", x=np.zeros((2, 3, 5, 3)))
    refused(source)
    assert pixels(load(source, image_shape=(3, 5, 3))).shape == (2, 3, 5, 3)
    assert pixels(load(source, image_shape=(3, 3, 5))).shape == (2, 3, 3, 5)
    refused(npz(tmp_path / "x.npz", x=np.zeros((2, 8, 8))), image_shape=(1, 4, 16))
    refused(str(tmp_path / "x.npz"), categorical=("x",))


def test_npz_flat_bytes_become_images(tmp_path: Path) -> None:
    source = npz(tmp_path / "x.npz", x=np.full((2, 12), 255, np.uint8))
    assert pixels(load(source, image_shape=(3, 2, 2))).max() == 1.0
    refused(source, image_shape=(1, 2, 2))


# --- views of images


def test_quadrants_and_halves_tile_the_image(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), np.uint8)
    source = npz(tmp_path / "x.npz", x=image)
    whole = pixels(load(source))
    q = [
        pixels(load(source, view=ViewSettings(scheme="quadrants", part=p, parts=4)))
        for p in range(4)
    ]
    assert [part.shape[2:] for part in q] == [(3, 4), (3, 3), (2, 4), (2, 3)]
    rows = [np.concatenate(q[:2], axis=3), np.concatenate(q[2:], axis=3)]
    np.testing.assert_array_equal(np.concatenate(rows, axis=2), whole)
    h = [
        pixels(load(source, view=ViewSettings(scheme="halves", part=p, parts=2))) for p in range(2)
    ]
    np.testing.assert_array_equal(np.concatenate(h, axis=3), whole)


def test_columns_of_an_image_set_are_its_pixels(tmp_path: Path) -> None:
    source = npz(tmp_path / "x.npz", x=np.arange(10, dtype=np.uint8).reshape(1, 2, 5))
    parts = [
        load(source, view=ViewSettings(scheme="columns", part=part, parts=3)) for part in range(3)
    ]
    assert [len(part.numeric_names) for part in parts] == [4, 3, 3]
    assert parts[1].numeric_names == ("pixel4", "pixel5", "pixel6")
    assert parts[1].images_NCHW is None
    np.testing.assert_allclose(present(parts[1].numeric_NF) * 255, [[4, 5, 6]], rtol=1e-6)
    half = load(source, view=ViewSettings(scheme="columns", part=1, parts=2), image_shape=(1, 1, 5))
    np.testing.assert_allclose(pixels(half)[0, 0, 0] * 255, [5, 6, 7, 8, 9], rtol=1e-6)
    refused(source, view=ViewSettings(scheme="columns", part=0, parts=11))
    thin = npz(tmp_path / "y.npz", x=np.zeros((1, 1, 4)))
    refused(thin, view=ViewSettings(scheme="quadrants", part=0, parts=4))
    bad = npz(tmp_path / "z.npz", x=np.array([[[1.0, np.nan]]]))
    refused(bad, view=ViewSettings(scheme="columns", part=1, parts=2))


# --- folders of images


def folder(path: Path, index: str, **images: Image.Image) -> str:
    path.mkdir(exist_ok=True)
    (path / "index.csv").write_text(index)
    for name, image in images.items():
        image.save(path / f"{name}.png")
    return str(path)


def test_folder_of_images(tmp_path: Path) -> None:
    red = Image.new("RGB", (4, 3), (255, 0, 51))
    grey = Image.new("L", (4, 3), 102)
    source = folder(
        tmp_path / "set",
        "file,who,kind,age,part\nred.png,b,x,1,train\ngrey.png,a,y,2,test\n",
        red=red,
        grey=grey,
    )
    refused(source)
    table = load(source, id="who", label="kind", with_label=True, channels=3)
    assert table.ids == ("a", "b")
    assert present(table.labels).tolist() == ["y", "x"]
    assert pixels(table).shape == (2, 3, 3, 4)
    np.testing.assert_allclose(pixels(table)[1, :, 0, 0], [1, 0, 0.2])
    np.testing.assert_allclose(pixels(table)[0, :, 0, 0], [0.4, 0.4, 0.4])
    assert load(source, channels=3).ids == ("grey.png", "red.png")
    assert load(source, limit=1).ids == ("red.png",)
    splits = present(load(source, label="kind", split="part", with_label=True, channels=3).splits)
    assert splits.tolist() == ["test", "train"]
    labels = present(load(source, label="age", with_label=True, channels=3).labels)
    assert labels.tolist() == [2.0, 1.0]


def test_folder_of_other_modes(tmp_path: Path) -> None:
    index = "file\na.png\nb.png\n"
    wide = Image.fromarray(np.full((2, 2), 65535, np.uint16))
    assert pixels(load(folder(tmp_path / "wide", index, a=wide, b=wide))).max() == 1.0
    bits, colours = Image.new("1", (2, 2), 1), Image.new("P", (2, 2))
    assert pixels(load(folder(tmp_path / "bits", index, a=bits, b=bits))).shape[1] == 1
    clear = Image.new("RGBA", (2, 2), "white")
    assert pixels(load(folder(tmp_path / "colours", index, a=colours, b=clear))).shape[1] == 3
    mixed = folder(tmp_path / "mixed", index, a=bits, b=colours)
    refused(mixed)
    refused(folder(tmp_path / "depths", index, a=bits, b=wide), channels=1)
    for channels in (1, 3):
        assert pixels(load(mixed, channels=channels)).shape[1] == channels


def test_folder_of_more_than_8_bits(tmp_path: Path) -> None:
    """Pillow would cut them off at 255."""
    deep = np.arange(0, 60_000, 10_000).reshape(2, 3)
    for name, kind in (("little", "<u2"), ("big", ">u2")):
        source = folder(tmp_path / name, "file\nx.tif\n")
        Image.fromarray(deep.astype(kind)).save(Path(source) / "x.tif")
        np.testing.assert_allclose(pixels(load(source))[0, 0], deep / np.float32(65535))
    for name, other in (("int32", deep.astype(np.int32)), ("float32", deep.astype(np.float32))):
        source = folder(tmp_path / name, "file\nx.tif\n")
        Image.fromarray(other).save(Path(source) / "x.tif")
        refused(source)


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_colours_of_16_bits_are_not_cut_to_8(tmp_path: Path, kind: int, channels: int) -> None:
    """Pillow, which writes no such PNG, reads 8 bits of them. ``kind``: PNG's type of colour."""
    source = folder(tmp_path / "images", "file\nx.png\n")
    lines = (b"\0" + bytes(range(2 * channels * 4))) * 3
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", 4, 3, 16, kind, 0, 0, 0),
        b"IDAT": zlib.compress(lines),
        b"IEND": b"",
    }
    (Path(source) / "x.png").write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in chunks.items()
        )
    )
    refused(source)


def test_bad_folders(tmp_path: Path) -> None:
    image = Image.new("L", (4, 3))
    source = str(tmp_path)
    refused(source, Code.FILE_INVALID)
    refused(source, Code.FILE_INVALID, columns=("x",))
    refused(folder(tmp_path / "a", "name\nx\n"))
    refused(folder(tmp_path / "a", "file\n"))
    refused(folder(tmp_path / "a", "file\nx.png\n"), Code.FILE_INVALID)
    refused(folder(tmp_path / "a", "file\nx.png\nx.png\n", x=image))
    refused(str(tmp_path / "a"), id="who")
    refused(str(tmp_path / "a"), with_label=True)
    refused(str(tmp_path / "a"), columns=("file",))
    two = folder(tmp_path / "b", "file\nx.png\ny.png\n", x=image, y=Image.new("L", (5, 3)))
    refused(two)
    assert pixels(load(two, resize=(6, 8))).shape == (2, 1, 6, 8)
    good = (tmp_path / "b" / "x.png").read_bytes()
    for content in (b"", b"text", good[:45], good[:20]):
        (tmp_path / "b" / "y.png").write_bytes(content)
        refused(two, Code.FILE_INVALID)


# --- named sets


@pytest.mark.parametrize(
    ("name", "n", "f"), [("breast_cancer", 569, 30), ("iris", 150, 4), ("wine", 178, 13)]
)
def test_sklearn_tables(name: str, n: int, f: int) -> None:
    table = load(f"sklearn:{name}", with_label=True)
    assert present(table.numeric_NF).shape == (n, f)
    assert table.ids[:2] == ("000", "001")
    assert len(set(present(table.labels).tolist())) in (2, 3)
    assert load(f"sklearn:{name}").labels is None


def test_sklearn_views_and_columns() -> None:
    names = load("sklearn:diabetes").numeric_names
    parts = [
        load("sklearn:diabetes", view=ViewSettings(scheme="columns", part=p, parts=3))
        for p in range(3)
    ]
    assert sum((part.numeric_names for part in parts), ()) == names
    assert load("sklearn:diabetes", columns=("bmi", "age"), limit=5).numeric_names == ("bmi", "age")
    refused("sklearn:diabetes", columns=("bmj",))


def test_sklearn_digits_are_images() -> None:
    table = load("sklearn:digits", with_label=True)
    assert pixels(table).shape == (1797, 1, 8, 8)
    assert pixels(table).max() == 1.0
    quarter = load(
        "sklearn:digits", view=ViewSettings(scheme="quadrants", part=3, parts=4), limit=10
    )
    np.testing.assert_array_equal(pixels(quarter), pixels(table)[:10, :, 4:, 4:])
    columns = load("sklearn:digits", view=ViewSettings(scheme="columns", part=0, parts=2))
    np.testing.assert_array_equal(columns.numeric_NF, pixels(table).reshape(-1, 64)[:, :32])


def test_bad_names() -> None:
    refused("sklearn:digit")
    refused("sklearn:iris", id="pid")
    refused("sklearn:iris", label="y")
    refused("sklearn:digits", drop=("x",))


def write_idx(path: Path, array: npt.NDArray[np.uint8]) -> None:
    path.write_bytes(
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    )


def test_torchvision_from_local_files(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    settings: dict[str, Any] = {"download_dir": str(tmp_path)}
    refused("torchvision:MNIST", Code.FILE_INVALID, **settings)
    for part, rows in (("train", slice(0, 3)), ("t10k", slice(3, 5))):
        write_idx(raw / f"{part}-images-idx3-ubyte", images[rows])
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.array([1, 0, 2, 4, 3], np.uint8)[rows])
    table = load("torchvision:MNIST", with_label=True, **settings)
    assert table.ids == ("0", "1", "2", "3", "4")
    assert present(table.labels).tolist() == [1, 0, 2, 4, 3]
    np.testing.assert_allclose(pixels(table)[:, 0] * 255, images, rtol=1e-6)
    assert load("torchvision:MNIST", limit=4, **settings).labels is None
    for with_label in (True, False):
        own = present(
            load("torchvision:MNIST", with_label=with_label, split="part", **settings).splits
        )
        assert own.tolist() == ["train"] * 3 + ["test"] * 2
    refused("torchvision:MNIST", split="own", **settings)
    half = load(
        "torchvision:MNIST", view=ViewSettings(scheme="halves", part=1, parts=2), **settings
    )
    np.testing.assert_array_equal(pixels(half), pixels(table)[..., 14:])
    (raw / "train-images-idx3-ubyte").write_bytes(b"text")
    refused("torchvision:MNIST", Code.FILE_INVALID, **settings)
    refused("torchvision:MNISTT")
    refused("torchvision:FakeData")
    refused("torchvision:MNIST", columns=("x",), **settings)
