"""Sources of images: a folder whose sub-folders are classes, an array file, a Hugging Face dataset."""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from seedbed.data import limits
from seedbed.data.images import HELP
from seedbed.data.text_files import load_hub, nearest
from seedbed.errors import UserError
from seedbed.track import files

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
ARRAYS = (".npy", ".npz", ".safetensors")
# A folder with the first and one of the others brings its own split; of several the first of these is used.
TRAIN, VALID = "train", ("valid", "val", "validation", "test")
# What the arrays of a file may be called: those to train on, and those that are held out.
IMAGE_NAMES = (("images", "image", "x", "x_train", "train_images"), ("valid_images", "x_valid", "x_test", "test_images"))
CLASS_NAMES = (
    ("classes", "class", "labels", "label", "y", "y_train", "train_labels"),
    ("valid_classes", "valid_labels", "y_valid", "y_test", "test_labels"),
)
MAX_CLASSES = 1 << 16


class ImageDataset(Protocol):
    """Images by index, each with its class. `held_N` marks the held-out ones where the source has its own split, else None.

    `identity` changes when the images do. `image` may give one that is not decoded yet; any error means that it is bad.
    """

    name: str
    class_names: tuple[str, ...]
    classes_N: np.ndarray
    held_N: np.ndarray | None
    notes: tuple[str, ...] = ()

    def identity(self) -> str: ...
    def image(self, n: int) -> Image.Image: ...
    def label(self, n: int) -> str: ...


class ImageFolder(ImageDataset):
    """Files below a folder; the class is the name of the first sub-folder."""

    def __init__(self, root: Path):
        self.name, self.root = root.resolve().name, root
        parts = self._parts()
        trees = [_classes(root / part) for part in parts]
        self._check(parts, trees)
        self.class_names = tuple(trees[0])
        number = {name: n for n, name in enumerate(self.class_names)}
        found = [(path, number[name], k) for k, tree in enumerate(trees) for name, paths in tree.items() for path in paths]
        self.paths = [path for path, _, _ in found]
        self.classes_N = np.array([n for _, n, _ in found], np.int64)
        self.held_N = np.array([k == 1 for *_, k in found]) if len(parts) == 2 else None

    def _parts(self) -> tuple[str, ...]:
        """The sub-folders that are the split, or the folder itself."""
        names = _folders(self.root)
        held = [name for name in VALID if name in names]
        if TRAIN not in names or not held:
            return ("",)
        left = sorted(set(names) - {TRAIN, held[0]})
        if left:
            self.notes += (f"{self.root}: using {TRAIN}/ and {held[0]}/, leaving out {', '.join(left[:5])}",)
        return TRAIN, held[0]

    def _check(self, parts: tuple[str, ...], trees: list[dict[str, list[str]]]) -> None:
        for part, tree in zip(parts, trees, strict=True):
            if not any(tree.values()):
                raise UserError(f"{self.root / part} holds no images (looked for {', '.join(SUFFIXES[:6])} and so on); {HELP}")
        for tree in trees:
            empty = [name for name, paths in tree.items() if not paths]
            self.notes += tuple(f"the folder {name} holds no images and is no class" for name in empty[:5])
            for name in empty:
                del tree[name]
        strange = sorted(trees[-1].keys() - trees[0].keys())
        if strange:
            raise UserError(f"{self.root}: {parts[1]}/ has the class {strange[0]}, which {TRAIN}/ has not; name classes alike")
        if len(trees[0]) > MAX_CLASSES:
            raise UserError(f"{self.root} has {len(trees[0]):,} classes; at most {MAX_CLASSES:,}")

    def identity(self) -> str:
        """By names, sizes and times: reading every file would take as long as decoding it."""
        whole = hashlib.sha256()
        for path in self.paths:
            size, time = -1, 0  # of a dangling link: a bad image like others
            with contextlib.suppress(OSError):
                info = os.stat(path)
                size, time = info.st_size, info.st_mtime_ns
            whole.update(f"{os.path.relpath(path, self.root)}\0{size}\0{time}\0".encode("utf-8", "replace"))
        return f"stat:{whole.hexdigest()}"

    def image(self, n: int) -> Image.Image:
        os.close(files.open_regular(self.paths[n]))  # reading a FIFO would block, and a device may never end
        return Image.open(self.paths[n])

    def label(self, n: int) -> str:
        return os.path.relpath(self.paths[n], self.root).encode("utf-8", "replace").decode()


def _folders(root: Path) -> list[str]:
    # os.path.isdir: false for a link to itself, where DirEntry.is_dir raises.
    return sorted(name for name in os.listdir(root) if os.path.isdir(root / name) and not name.startswith("."))


def _classes(root: Path) -> dict[str, list[str]]:
    """Class to its files, sorted; a folder with images and no sub-folders is one class."""
    names = _folders(root)
    loose = _images(root, deep=False)
    if not names:
        return {root.resolve().name: loose}
    if loose:
        raise UserError(f"{root} has {len(loose):,} images beside its class folders, such as {Path(loose[0]).name}; move them")
    return {name: _images(root / name, deep=True) for name in names}


def _images(root: Path, deep: bool) -> list[str]:
    found, seen = [], set()
    for folder, folders, names in os.walk(root, followlinks=True):
        place = os.stat(folder)
        # Links may form a loop.
        again = (place.st_dev, place.st_ino) in seen
        seen.add((place.st_dev, place.st_ino))
        folders[:] = sorted(f for f in folders if deep and not again and not f.startswith("."))
        if not again:
            found += [os.path.join(folder, n) for n in names if n.lower().endswith(SUFFIXES) and not n.startswith(".")]
    return sorted(found)


class ImageArrayFile(ImageDataset):
    """Bytes in an array file, (N, H, W), (N, H, W, C) or (N, C, H, W); without classes there is one class."""

    def __init__(self, path: Path):
        self.name, self.path = path.stem, path
        arrays = _read_arrays(path)
        images = [_find(arrays, names) for names in IMAGE_NAMES]
        if images[0] is None:
            known = ", ".join(IMAGE_NAMES[0])
            raise UserError(f"{path} has arrays {', '.join(arrays) or 'none'}; the images must be called one of {known}")
        given = [_find(arrays, names) for names in CLASS_NAMES]
        self.parts = [_pixels(path, array) for array in images if array is not None]
        classes = [_labels(path, array, len(part)) for array, part in zip(given, self.parts, strict=False)]
        self.classes_N = np.concatenate(classes)
        self.class_names = tuple(str(n) for n in range(int(self.classes_N.max()) + 1))
        self.held_N = np.arange(len(self.classes_N)) >= len(self.parts[0]) if len(self.parts) == 2 else None

    def identity(self) -> str:
        info = self.path.stat()
        return f"stat:{self.path.name}:{info.st_size}:{info.st_mtime_ns}"

    def image(self, n: int) -> Image.Image:
        first = len(self.parts[0])
        return Image.fromarray(np.ascontiguousarray(self.parts[0][n] if n < first else self.parts[1][n - first]))

    def label(self, n: int) -> str:
        return f"image {n}"


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            limits.require_header(path)
            return load_file(path)
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        return {"images": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except Exception as error:
        # The formats' readers raise whatever a damaged file leads them to.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read as {path.suffix}: {reason}") from None


def _find(arrays: dict[str, np.ndarray], names: Sequence[str]) -> np.ndarray | None:
    return next((arrays[name] for name in names if name in arrays), None)


def _pixels(path: Path, array: np.ndarray) -> np.ndarray:
    """(N, H, W) or (N, H, W, C) bytes."""
    if array.dtype != np.uint8:
        raise UserError(f"{path} holds images as {array.dtype}; they must be uint8, 0 to 255")
    if array.ndim == 4 and array.shape[1] in (1, 3, 4) and array.shape[3] not in (1, 3, 4):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim == 4 and array.shape[3] == 1:
        array = array[..., 0]
    if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (3, 4)) or not array.size:
        raise UserError(f"{path} has images of shape {array.shape}; wanted (N, H, W), (N, H, W, C) or (N, C, H, W), C 1, 3 or 4")
    return array


def _labels(path: Path, array: np.ndarray | None, num: int) -> np.ndarray:
    if array is None:
        return np.zeros(num, np.int64)
    array = array.reshape(-1)
    if len(array) != num:
        raise UserError(f"{path} has {num:,} images and {len(array):,} classes")
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= MAX_CLASSES:
        raise UserError(f"{path} has classes as {array.dtype}; they must be whole numbers from 0 to {MAX_CLASSES - 1}")
    return array.astype(np.int64)


class HubImageDataset(ImageDataset):
    """A Hugging Face dataset with a column of images and, for classes, one of labels."""

    def __init__(self, name: str):
        self.name, self.dataset = name.rpartition("/")[2], name
        splits = load_hub(name, None)
        if TRAIN not in splits:
            raise UserError(f"dataset {name} has no split `train`; it has {', '.join(splits)}")
        held = next((part for part in VALID if part in splits), None)
        self.rows = [splits[TRAIN], *([splits[held]] if held else [])]
        kinds = {type(feature).__name__: column for column, feature in reversed(self.rows[0].features.items())}
        if "Image" not in kinds:
            raise UserError(f"dataset {name} has no column of images; it has {', '.join(self.rows[0].features)}")
        self.column, label = kinds["Image"], kinds.get("ClassLabel")
        self.class_names = tuple(self.rows[0].features[label].names) if label else ("image",)
        self.classes_N = np.concatenate([np.array(r[label], np.int64) if label else np.zeros(len(r), int) for r in self.rows])
        self.held_N = np.arange(len(self.classes_N)) >= len(self.rows[0]) if held else None
        if self.classes_N.min() < 0:
            raise UserError(f"dataset {name} has images without a class (label -1); choose one whose splits are labelled")

    def identity(self) -> str:
        return f"hub:{self.dataset}:{':'.join(rows._fingerprint for rows in self.rows)}"

    def image(self, n: int) -> Image.Image:
        first = len(self.rows[0])
        return (self.rows[0][n] if n < first else self.rows[1][n - first])[self.column]

    def label(self, n: int) -> str:
        return f"row {n}"


def open_image_dataset(name: str) -> ImageDataset:
    if name.startswith("hf:"):
        return HubImageDataset(name.removeprefix("hf:"))
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return ImageFolder(path)
        if path.is_file() and path.suffix in ARRAYS:
            return ImageArrayFile(path)
        if path.is_file():
            raise UserError(f"{path} is a single file and not {', '.join(ARRAYS)}; {HELP}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    raise UserError(f"there are no images at {path}{nearest(path, ['shapes'])}; {HELP}")
