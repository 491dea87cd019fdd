"""The readers of published data sets, on tiny files in their formats."""

import gzip
import struct

import jax
import numpy as np
import pytest

from benchmarks import catalog, data, harness
from benchmarks.blr import bench_classify, images
from benchmarks.denoise import bench_private

KINDS = "images-idx3", "labels-idx1"
MNIST = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in KINDS]


def pixel(image, row, column, channel):
    """Returns a value that no other place near has."""
    return (image * 101 + row * 37 + column * 11 + channel * 71) % 256


def cifar_record(label, image):
    """Returns a record as the makers describe it: the class, then red row by row, green, blue."""
    planes = [
        pixel(image, row, column, channel)
        for channel in range(3)
        for row in range(32)
        for column in range(32)
    ]
    return bytes([label, *planes])


def write_cifar10(folder):
    """Writes two images into each of the six files; image i has the class i % 10."""
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for index, name in enumerate(names):
        images = (2 * index, 2 * index + 1)
        (folder / name).write_bytes(b"".join(cifar_record(i % 10, i) for i in images))


def write_mnist(folder, *, packed=False, numbers=(5, 3)):
    """Writes the four files with images of another shape than 28 x 28; image i has class i % 10."""
    rows, columns = 4, 3
    for name in MNIST:
        number = numbers["t10k" in name]
        if "images" in name:
            head = struct.pack(">BBBBIII", 0, 0, 8, 3, number, rows, columns)
            places = ((i, r, c) for i in range(number) for r in range(rows) for c in range(columns))
            body = bytes(pixel(*place, 0) for place in places)
        else:
            head, body = (
                struct.pack(">BBBBI", 0, 0, 8, 1, number),
                bytes(i % 10 for i in range(number)),
            )
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(head + body))
        else:
            (folder / name).write_bytes(head + body)


def assert_places(images, start):
    for place, value in np.ndenumerate(images):
        assert value == pixel(place[0] + start, *place[1:])


def test_cifar10_is_read_as_published(tmp_path):
    """Five files in order make the training set; every pixel and color is at its place."""
    write_cifar10(tmp_path)
    found = data.read(tmp_path)
    assert list(found) == ["CIFAR-10"]
    (x, y), (test_x, test_y) = found["CIFAR-10"]
    assert x.shape == (10, 32, 32, 3) and test_x.shape == (2, 32, 32, 3)
    assert x.dtype == np.uint8 and y.dtype == np.int32
    assert y.tolist() == list(range(10)) and test_y.tolist() == [0, 1]
    assert_places(x, 0)
    assert_places(test_x, 10)


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_as_published(tmp_path, packed):
    """Packed or not, with the shape that the file says."""
    write_mnist(tmp_path, packed=packed)
    found = data.read(tmp_path)
    assert list(found) == ["MNIST"]
    (x, y), (test_x, test_y) = found["MNIST"]
    assert x.shape == (5, 4, 3, 1) and test_x.shape == (3, 4, 3, 1)
    assert x.dtype == np.uint8 and y.dtype == np.int32
    assert y.tolist() == list(range(5)) and test_y.tolist() == list(range(3))
    assert_places(x, 0)
    assert_places(test_x, 0)


def test_a_folder_may_hold_both(tmp_path):
    """Each data set is found by its files."""
    write_cifar10(tmp_path)
    write_mnist(tmp_path)
    assert set(data.read(tmp_path)) == {"CIFAR-10", "MNIST"}


def test_folder_without_a_data_set_is_named(tmp_path):
    """And so are the files that it should hold."""
    with pytest.raises(ValueError, match=rf"data_batch_1.*train-images.*{tmp_path.name}"):
        data.read(tmp_path)


@pytest.mark.parametrize("name", ["data_batch_1.bin", "data_batch_4.bin", "test_batch.bin"])
def test_missing_cifar_file_is_named(tmp_path, name):
    """One file that lacks is an error, not a smaller data set."""
    write_cifar10(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"must hold {name}"):
        data.read(tmp_path)


@pytest.mark.parametrize("name", MNIST)
def test_missing_mnist_file_is_named(tmp_path, name):
    """With both of its possible names."""
    write_mnist(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=rf"must hold {name} or {name}\.gz"):
        data.read(tmp_path)


def change(path, edit):
    path.write_bytes(edit(path.read_bytes()))


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda x: x[:-1], "data_batch_2.bin must hold records of 3073 bytes, got 6145"),
        (lambda x: b"", "got 0 bytes"),
        (lambda x: bytes([10]) + x[1:], "data_batch_2.bin must hold classes below 10, got 10"),
    ],
)
def test_damaged_cifar_file_is_named(tmp_path, edit, match):
    """A part of a record, nothing, or what is no class of CIFAR-10."""
    write_cifar10(tmp_path)
    change(tmp_path / "data_batch_2.bin", edit)
    with pytest.raises(ValueError, match=match):
        data.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "edit", "match"),
    [
        ("train-images", lambda x: x[:-1], r"60 bytes of shape \[5, 4, 3\], got 59"),
        ("train-images", lambda x: x + b"x", "got 61"),
        ("train-images", lambda x: x[:9], "begins with 00 00 08 03"),
        ("train-images", lambda x: b"", "begins with"),
        ("train-images", lambda x: b"\0\0\x0d\3" + x[4:], "3 axes, got .* 00 00 0d 03"),
        ("t10k-labels", lambda x: x[:4] + b"\0\0\0\2" + x[8:-1], "each of 2 labels, got 3"),
        ("t10k-labels", lambda x: x[:-1] + b"\x0a", "classes below 10, got 10"),
    ],
)
def test_damaged_mnist_file_is_named(tmp_path, name, edit, match):
    """Too short, too long, no idx file, another type, other numbers of images and labels."""
    write_mnist(tmp_path)
    change(next(tmp_path.glob(f"{name}*")), edit)
    with pytest.raises(ValueError, match=match):
        data.read(tmp_path)


@pytest.mark.parametrize("edit", [lambda x: x[:-9], lambda x: b"no gzip" + x, lambda x: x[:20] + x])
def test_damaged_gzip_file_is_named(tmp_path, edit):
    """Cut, or packed in another way."""
    write_mnist(tmp_path, packed=True)
    change(tmp_path / "t10k-images-idx3-ubyte.gz", edit)
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte.gz must be a whole gzip file"):
        data.read(tmp_path)


def labels_of(images):
    """Returns ``{image as bytes: class}``, which no two images share."""
    found = {np.asarray(x).tobytes(): int(y) for x, y in zip(*images, strict=True)}
    assert len(found) == len(images[0])
    return found


def test_a_sixth_of_the_training_set_is_for_validation(tmp_path):
    """No image is in both parts, each keeps its class, and the test set stays as it is."""
    write_mnist(tmp_path, numbers=(90, 20))
    published = data.mnist(tmp_path)
    train, validation, test = data.split(published)
    assert len(train[0]) == 75 and len(validation[0]) == 15 and test is published.test
    assert labels_of(train) | labels_of(validation) == labels_of(published.train)
    assert len(set(validation[1])) > 5  # drawn at random, not the first


def test_posterior_benchmark_learns_eight_classes(tmp_path):
    """The others are in no part but outside, and there they are all of the test set."""
    write_mnist(tmp_path, numbers=(90, 20))
    ((name, task),) = images.found(tmp_path).items()
    made, published = task.make(), data.mnist(tmp_path)
    assert name == "MNIST, classes 0 to 7, conv net 32-64-64"
    seen = {image: label for image, label in labels_of(published.train).items() if label < 8}
    assert labels_of(made.train) | labels_of(made.validation) == seen
    assert np.array_equal(made.test[1], [*range(8), *range(8)])
    assert np.array_equal(made.outside, published.test[0][[8, 9, 18, 19]])
    shape = jax.eval_shape(task.model.init_with_output, jax.random.key(0), made.test[0])[0].shape
    assert shape == (16, 8)


@pytest.mark.slow
def test_posterior_benchmark_runs_on_the_folder(tmp_path, standard_promotion):
    """It has all its rows for the data set, and says whose settings it takes."""
    write_mnist(tmp_path, numbers=(90, 20))
    settings, notes = catalog.settings("blr")["classify"], []
    context = harness.Context("smoke", settings, tmp_path, lambda names: names, notes.append)
    rows = list(bench_classify.run(context))
    cases = {row.case for row in rows}
    (name,) = images.found(tmp_path)
    assert cases == {bench_classify.DIGITS, name}
    kinds = [
        {(row.method, row.rival, row.metric, row.seed) for row in rows if row.case == case}
        for case in cases
    ]
    assert kinds[0] == kinds[1]
    assert all(np.isfinite(row.value) for row in rows)
    assert len(notes) == 1 and name in notes[0] and bench_classify.DIGITS in notes[0]


@pytest.mark.slow
def test_posterior_benchmark_tunes_on_the_folder(tmp_path, standard_promotion, monkeypatch):
    """Its data set gets the grids of the digits, and a run takes what was chosen there."""
    write_mnist(tmp_path, numbers=(90, 20))
    rates = {"learning_rate": (1e-3, 1e-2), "weight_decay": (0.1,)}
    grids = {bench_classify.ADAMW: rates | {"b2": (0.9,)}, "alpha 2": rates | {"ess": (4.0,)}}
    known = dict.fromkeys((bench_classify.BREAST, bench_classify.DIGITS), grids)
    monkeypatch.setattr(bench_classify, "GRIDS", known)
    notes, (name,) = [], images.found(tmp_path)
    context = harness.Context("smoke", {}, tmp_path, lambda names: names, notes.append)
    found = bench_classify.tune(context)
    assert list(found["methods"]) == [f"{task}: {x}" for task in (*known, name) for x in grids]
    rows = list(bench_classify.run(context._replace(settings=found)))
    assert {row.case for row in rows} == {bench_classify.DIGITS, name} and not notes


def test_private_benchmark_draws_from_the_training_part(tmp_path, standard_promotion):
    """A Poisson batch holds rows of the five sixths that train, and an MLP takes them."""
    write_mnist(tmp_path, numbers=(90, 20))
    size, where = bench_private.Size(1, 16, (2.0,)), ("MNIST", tmp_path)
    task = bench_private.task(size, where)
    batch = task.draw(jax.random.key(0))
    train, *_ = data.split(data.mnist(tmp_path))
    known = {row.tobytes() for row in train[0].reshape(len(train[0]), -1)}
    assert {np.asarray(row).tobytes() for row in batch.examples[0]} <= known
    assert 0 < batch.mask.sum() < len(batch.mask) <= len(known)
    loss = task.loss_fn(task.start(jax.random.key(1)), batch.examples, None)
    assert abs(loss - np.log(10)) < 1
    assert bench_private.epsilon(size, 2.0, where)[1] == 1e-4  # 75 rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # jax_privacy's
def test_private_benchmark_runs_on_the_folder(tmp_path, standard_promotion):
    """It has all its rows for the data set, and says whose settings it takes."""
    write_mnist(tmp_path, numbers=(90, 20))
    settings, notes = catalog.settings("denoise")["private"], []
    context = harness.Context("smoke", settings, tmp_path, lambda names: names, notes.append)
    rows = list(bench_private.run(context))
    assert {row.case.split(",")[0] for row in rows} == {"digits", "MNIST"}
    assert all(np.isfinite(row.value) for row in rows)
    assert len(notes) == 1 and "MNIST" in notes[0]
