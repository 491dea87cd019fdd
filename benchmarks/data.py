"""Reads CIFAR-10 and MNIST from the files in which they are published; nothing is downloaded."""

import gzip
import math
import zlib
from typing import NamedTuple

import numpy as np

CLASSES = 10
SIDE = 32  # of an image of CIFAR-10, in pixels
CIFAR_TRAIN = [f"data_batch_{number}.bin" for number in range(1, 6)]
CIFAR_TEST = ["test_batch.bin"]
MNIST_FILES = "{}-images-idx3-ubyte", "{}-labels-idx1-ubyte"


class Images(NamedTuple):
    """Images ``[n, height, width, channels]`` uint8 with classes ``[n]`` int32, as published."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def read(folder):
    """Returns ``{name: Images}`` of the data sets of which the folder holds a file, at least one.

    CIFAR-10 is the binary version, five files for training and one for the test, MNIST four idx
    files, each of these packed by gzip or not. A data set that lacks a file is an error.
    """
    found = {}
    if any((folder / name).exists() for name in (*CIFAR_TRAIN, *CIFAR_TEST)):
        found["CIFAR-10"] = cifar10(folder)
    names = [name.format(part) for name in MNIST_FILES for part in ("train", "t10k")]
    if any((folder / (name + end)).exists() for name in names for end in ("", ".gz")):
        found["MNIST"] = mnist(folder)
    if not found:
        raise ValueError(
            f"--data must hold CIFAR-10 ({CIFAR_TRAIN[0]}, ...) or MNIST ({names[0]}, ...), "
            f"got {str(folder)!r} with neither."
        )
    return found


def split(images):
    """Returns what trains, a sixth of the training set to validate on, and the test set."""
    order = np.random.default_rng(0).permutation(len(images.train[0]))
    validation, train = np.split(order, [len(order) // 6])
    return *(tuple(x[part] for x in images.train) for part in (train, validation)), images.test


def cifar10(folder):
    """Returns the :class:`Images` in the binary files of CIFAR-10."""
    return Images(*(_cifar10(folder, names) for names in (CIFAR_TRAIN, CIFAR_TEST)))


def mnist(folder):
    """Returns the :class:`Images` in the idx files of MNIST."""
    return Images(*(_mnist(folder, part) for part in ("train", "t10k")))


def _cifar10(folder, names):
    records, size = [], 1 + 3 * SIDE**2  # a class, then the red, green and blue of all pixels
    for name in names:
        _, content = _content(folder, [name])
        if not content or len(content) % size:
            raise ValueError(
                f"{folder / name} must hold records of {size} bytes, got {len(content)} bytes."
            )
        records.append(np.frombuffer(content, np.uint8).reshape(-1, size))
        _check_classes(folder / name, records[-1][:, 0])
    records = np.concatenate(records)
    images = records[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0].astype(np.int32)


def _mnist(folder, part):
    names = [name.format(part) for name in MNIST_FILES]
    (path, images), (_, labels) = _idx(folder, names[0], 3), _idx(folder, names[1], 1)
    if len(images) != len(labels):
        raise ValueError(
            f"{path} must hold an image for each of {len(labels)} labels, got {len(images)}."
        )
    return images[..., None], labels.astype(np.int32)


def _idx(folder, name, rank):
    """Returns the path and the array of an idx file of bytes with ``rank`` axes."""
    path, content = _content(folder, [name, f"{name}.gz"])
    start = 4 + 4 * rank
    if content[:4] != bytes([0, 0, 8, rank]) or len(content) < start:
        raise ValueError(
            f"{path} must be an idx file of bytes with {rank} axes, got one that begins with "
            f"{content[:4].hex(' ')}."
        )
    shape = np.frombuffer(content, ">u4", rank, offset=4).tolist()
    wanted, given = math.prod(shape), len(content) - start
    if given != wanted:
        raise ValueError(f"{path} must hold {wanted} bytes of shape {shape}, got {given}.")
    array = np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    if rank == 1:
        _check_classes(path, array)
    return path, array


def _content(folder, names):
    """Returns the path of the first of these files that is there, and its unpacked bytes."""
    for path in (folder / name for name in names):
        if path.exists():
            content = path.read_bytes()
            try:
                return path, gzip.decompress(content) if path.suffix == ".gz" else content
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"{path} must be a whole gzip file, got {error}.") from error
    raise ValueError(f"{folder} must hold {' or '.join(names)}, got no such file.")


def _check_classes(path, labels):
    if labels.max(initial=0) >= CLASSES:
        raise ValueError(f"{path} must hold classes below {CLASSES}, got {labels.max()}.")
