"""Folders, arrays and datasets of images on their way into a store, and every way in which they can be wrong."""

import contextlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import time_limit
from PIL import Image
from safetensors.numpy import save_file

from seedbed.data import image_store
from seedbed.data.image_source import open_data, open_images
from seedbed.data.image_store import partition, prepare_images, shuffled_split
from seedbed.data.images import ImageConfig
from seedbed.data.store import Store
from seedbed.errors import UserError
from seedbed.report import data_verbs as verbs
from seedbed.track import files

SIZE = 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and a disk that is not waited for."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "fsync", lambda fd: None)


def picture(seed: int, size: tuple[int, int] = (SIZE, SIZE), mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8)).convert(mode)


def folder(root: Path, **counts: int) -> Path:
    """A folder with so many PNG files per class; `train__cat` is cat in train."""
    for name, count in counts.items():
        place = root / name.replace("__", "/")
        place.mkdir(parents=True)
        for n in range(count):
            picture(hash_of(name) + n).save(place / f"{n:03}.png")
    return root


def hash_of(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 100_000


def prepared(path: Path | str, **fields) -> tuple[Store, list[str]]:
    lines: list[str] = []
    return prepare_images(ImageConfig(images=str(path), **{"size": SIZE, "valid": 0.25, **fields}), say=lines.append), lines


def rows(store: Store) -> set[tuple[int, bytes]]:
    return {(int(c), x.tobytes()) for c, x in zip(store.arrays["class"], store.arrays["image"], strict=True)}


# ---- what is read --------------------------------------------------------------------------------------------------------


def test_images_become_the_middle_at_the_aspect_ratio_asked_for(tmp_path):
    place = tmp_path / "zoo" / "cat"
    place.mkdir(parents=True)
    stripes = np.repeat(np.arange(0, 240, 10, dtype=np.uint8), 4)  # 24 stripes of 4 columns
    for n in range(4):
        Image.fromarray(np.broadcast_to(stripes[None, :, None] + np.uint8(n), (32, 96, 3)).copy()).save(place / f"{n}.png")
    store, lines = prepared(tmp_path / "zoo", size=16, width=32)
    image = store.arrays["image"][0]
    assert store.arrays["image"].shape[1:] == (16, 32, 3) and lines == []
    # A window of 64 columns from the middle, halved: its first stripe is the fifth.
    assert abs(int(image[8, 0, 0]) - 40) <= 4 and abs(int(image[8, -1, 0]) - 190) <= 4
    data = open_images(ImageConfig(images=str(tmp_path / "zoo"), size=16, width=32, valid=0.25), seed=1)
    assert data.shape == (3, 16, 32) and data.facts["width"] == 32
    square, _ = prepared(tmp_path / "zoo", size=16)
    assert square.path != store.path and square.manifest["images"]["stored_size"] == 16
    with pytest.raises(UserError, match=r"was made with stored_size=\[16, 32\], not 16; name its images instead"):
        prepared(store.path, size=16)


def test_prepare_takes_height_and_width(tmp_path, capsys):
    root = folder(tmp_path / "zoo", cat=4)
    assert verbs.prepare_image_store(str(root), size=8, width=12, json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["shape"] == "8x12x3" and "data.size=8 data.width=12" in told["train on it"]


def test_image_folder_gives_its_images_and_classes(tmp_path):
    root = folder(tmp_path / "zoo", cat=8, dog=4, ant=4)
    store, lines = prepared(root)
    assert store.manifest["class_names"] == ["ant", "cat", "dog"] and lines == [] and store.verify() == []
    wanted = {
        (n, np.asarray(Image.open(path)).tobytes())
        for n, name in enumerate(["ant", "cat", "dog"])
        for path in (root / name).iterdir()
    }
    assert rows(store) == wanted
    assert store.manifest["splits"] == {"train": [0, 12], "valid": [12, 16]}
    assert np.bincount(store.split("valid", "class")).tolist() == [1, 2, 1]


def test_opened_images_carry_names_counts_and_fingerprint(tmp_path):
    config = ImageConfig(images=str(folder(tmp_path / "zoo", cat=8, dog=8)), size=SIZE)
    data = open_images(config, 1)
    assert data.class_names == ("cat", "dog") and data.shape == (3, SIZE, SIZE)
    assert (data.facts["num_images"], data.facts["num_valid_images"]) == (14, 2)
    image, classes = data.train.pick(np.arange(3))
    assert image.shape == (3, 3, SIZE, SIZE) and image.abs().max() <= 1 and classes.dtype == torch.int64


def test_image_store_is_reused_without_decoding(tmp_path, monkeypatch):
    root = folder(tmp_path / "zoo", cat=4)
    first, _ = prepared(root)
    monkeypatch.setattr(image_store, "decode", lambda *args: pytest.fail("decoded again"))
    assert prepared(root)[0].fingerprint == first.fingerprint
    assert prepared(first.path)[0].fingerprint == first.fingerprint, "a store may be named itself"


@pytest.mark.parametrize("held", ["test", "val", "valid", "validation"])
def test_image_folder_may_have_its_own_split(tmp_path, held: str):
    root = folder(tmp_path / "zoo", **{"train__cat": 3, "train__dog": 2, f"{held}__cat": 2, f"{held}__dog": 1})
    store, _ = prepared(root)
    assert store.manifest["splits"] == {"train": [0, 5], "valid": [5, 8]}
    held_out = {np.asarray(Image.open(p)).tobytes() for p in (root / held).rglob("*.png")}
    assert {x.tobytes() for x in store.split("valid", "image")} == held_out


def test_image_folder_with_two_validation_folders_uses_one(tmp_path):
    root = folder(tmp_path / "zoo", train__cat=3, valid__cat=2, test__cat=1)
    store, lines = prepared(root)
    assert len(store.split("valid", "class")) == 2 and lines == [f"{root}: using train/ and valid/, leaving out test"]


def test_image_folder_without_subfolders_is_one_class(tmp_path):
    assert prepared(folder(tmp_path / "flat", **{".": 4}))[0].manifest["class_names"] == ["flat"]
    store, _ = prepared(folder(tmp_path / "deep", cat__a=2, cat__b=2, dog=2))
    assert store.manifest["class_names"] == ["cat", "dog"] and np.bincount(store.arrays["class"]).tolist() == [4, 2]


def test_image_folder_with_link_loops(tmp_path):
    root = folder(tmp_path / "zoo", cat=3)
    (root / "cat" / "again").symlink_to(root / "cat")
    assert len(prepared(root)[0].arrays["class"]) == 3


def test_image_store_key_depends_on_images_settings_and_names(tmp_path):
    root = folder(tmp_path / "zoo", cat=4, dog=4)
    base = prepared(root)[0].path
    others = {prepared(root, **f)[0].path for f in ({"size": 6}, {"valid": 0.5}, {"crop": "random"})}
    picture(1).save(root / "cat" / "new.png")
    others.add(prepared(root)[0].path)
    assert len(others | {base}) == 5


def test_random_crop_stores_a_margin(tmp_path):
    root = folder(tmp_path / "zoo", cat=4)
    assert prepared(root, size=16, crop="random")[0].arrays["image"].shape[1:] == (18, 18, 3)


# ---- modes, sizes and bad files ------------------------------------------------------------------------------------------


def odd(kind: str, path: Path) -> None:
    """An image that is not plain RGB of the right size."""
    base = picture(5, (SIZE, SIZE))
    if kind == "alpha":
        base.putalpha(0)
        base.save(path / "odd.png")
    elif kind == "palette-alpha":
        base.convert("P").save(path / "odd.png", transparency=0)
    elif kind == "animated":
        base.save(path / "odd.gif", save_all=True, append_images=[picture(6), picture(7)])
    elif kind == "CMYK":
        base.convert("CMYK").save(path / "odd.jpg")
    elif kind == "16-bit":
        Image.fromarray(np.full((SIZE, SIZE), 0x8000, np.uint16)).save(path / "odd.png")
    elif kind == "wide":
        picture(5, (3 * SIZE, SIZE)).save(path / "odd.png")
    elif kind == "small":
        picture(5, (2, 3)).save(path / "odd.png")
    else:
        base.convert(kind).save(path / "odd.png")


ODD = [
    ("alpha", "with alpha: put on white"),
    ("palette-alpha", "with alpha: put on white"),
    ("LA", "with alpha: put on white"),
    ("L", "grey: made RGB"),
    ("1", "grey: made RGB"),
    ("16-bit", "grey: made RGB"),
    ("P", "palette: made RGB"),
    ("CMYK", "CMYK: made RGB"),
    ("animated", "with several frames: the first used"),
    ("small", "smaller than asked for: enlarged"),
    ("wide", None),
]


@pytest.mark.parametrize(("kind", "words"), ODD, ids=[kind for kind, _ in ODD])
def test_image_modes_and_sizes_become_rgb(tmp_path, kind: str, words: str | None):
    root = folder(tmp_path / "zoo", cat=4)
    odd(kind, root / "cat")
    store, lines = prepared(root)
    assert len(store.arrays["image"]) == 5 and store.manifest["counts"]["num_bad"] == 0
    changed = [] if words is None else [f"1 {words}"]
    # A palette is what an animation is made of.
    assert set(changed) <= set(lines) and len(lines) <= len(changed) + (kind == "animated")
    images = store.arrays["image"].astype(int)
    if kind == "alpha":
        assert (images == 255).all((1, 2, 3)).sum() == 1, "what is transparent is white"
    if kind == "16-bit":
        assert (images == 128).all((1, 2, 3)).sum() == 1, "16 bits keep their range"
    if kind == "wide":
        middle = np.asarray(picture(5, (3 * SIZE, SIZE)))[:, SIZE : 2 * SIZE]
        assert middle.tobytes() in {x.tobytes() for x in store.arrays["image"]}, "the middle square is kept"


def test_exif_orientation_is_applied(tmp_path):
    root = folder(tmp_path / "zoo", cat=2)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(5).save(root / "cat" / "turned.png", exif=exif)
    upright = np.asarray(picture(5).rotate(-90))
    assert upright.tobytes() in {x.tobytes() for x in prepared(root)[0].arrays["image"]}


def spoil(root: Path, name: str) -> None:
    """A truncated file and one that is no image."""
    whole = root / "cat" / f"{name}.jpg"
    picture(3, (64, 64)).save(whole)
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (root / "cat" / "text.png").write_text("not an image")


def test_bad_image_files_are_counted_and_named(tmp_path):
    root = folder(tmp_path / "zoo", cat=6, dog=4)
    good = rows(prepared(root)[0])
    spoil(root, "half")
    store, lines = prepared(root)
    assert rows(store) == good and store.manifest["counts"]["num_bad"] == 2
    assert len(lines) == 1 and lines[0].startswith("2 of 12 images are bad and left out, such as cat/")
    why = {entry["image"]: entry["why"] for entry in store.manifest["bad"]}
    assert set(why) == {"cat/half.jpg", "cat/text.png"} and "truncated" in why["cat/half.jpg"]
    assert "cannot identify" in why["cat/text.png"]


# ---- the bad-input table -------------------------------------------------------------------------------------------------


def missing(root: Path) -> Path:
    folder(root / "zoo", cat=1)
    return root / "zop"


def empty(root: Path) -> Path:
    (root / "zoo" / "cat").mkdir(parents=True)
    (root / "zoo" / "cat" / "notes.txt").write_text("x")
    return root / "zoo"


def all_alone(root: Path) -> Path:
    return folder(root / "zoo", cat=1, dog=1)


def all_bad(root: Path) -> Path:
    place = root / "zoo" / "cat"
    place.mkdir(parents=True)
    for n in range(3):
        (place / f"{n}.png").write_text("no")
    return root / "zoo"


def loose(root: Path) -> Path:
    folder(root / "zoo", cat=2)
    picture(1).save(root / "zoo" / "here.png")
    return root / "zoo"


def strange_class(root: Path) -> Path:
    return folder(root / "zoo", train__cat=2, test__cow=1)


def saved(name: str, **arrays: np.ndarray):
    def write(root: Path) -> Path:
        path = root / name
        if path.suffix == ".npy":
            np.save(path, arrays["images"])
        elif path.suffix == ".npz":
            np.savez(path, **arrays)
        else:
            save_file(arrays, path)
        return path

    return write


def broken(name: str, content: bytes = b"\x93NUMPY?"):
    def write(root: Path) -> Path:
        (root / name).write_bytes(content)
        return root / name

    return write


PIXELS = np.zeros((4, SIZE, SIZE, 3), np.uint8)
WRONG = [
    (missing, r"there are no images at .*zop \(did you mean zoo\?\); name a folder"),
    (empty, r"zoo holds no images \(looked for \.jpg"),
    (all_alone, "every class has only one image, such as cat"),
    (all_bad, r"has no image left for training: all 3 are bad, the first is cat/\d.png: cannot identify"),
    (loose, "has 1 images beside its class folders, such as here.png"),
    (strange_class, "test/ has the class cow, which train/ has not"),
    (broken("one.jpg", b"x"), r"is a single file and not \.npy"),
    (broken("bad.npy"), r"bad\.npy cannot be read as \.npy"),
    (broken("bad.npz"), r"cannot be read as \.npz"),
    (broken("bad.safetensors", b"123456789"), r"cannot be read as \.safetensors"),
    (saved("a.npy", images=PIXELS.astype(np.float32)), "holds images as float32; they must be uint8"),
    (saved("a.npy", images=PIXELS[0, 0]), r"images of shape \(8, 3\)"),
    (saved("a.npy", images=PIXELS[:0]), r"images of shape \(0, 8, 8, 3\)"),
    (saved("a.npz", pictures=PIXELS), "has arrays pictures; the images must be called one of images"),
    (saved("a.npz", images=PIXELS, labels=np.arange(3)), "has 4 images and 3 classes"),
    (saved("a.npz", images=PIXELS, labels=np.arange(4) - 1), "whole numbers from 0"),
    (saved("a.npz", images=PIXELS, labels=np.arange(4.0)), "classes as float64"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_image_errors_are_one_line(tmp_path, make, words: str):
    with pytest.raises(UserError, match=words) as caught:
        prepared(make(tmp_path))
    assert len(str(caught.value).splitlines()) == 1
    assert not list((tmp_path / "cache").glob(".*.partial")), "nothing half-built is left"


def test_class_with_one_image_is_for_training_and_reported(tmp_path):
    store, lines = prepared(folder(tmp_path / "zoo", cat=4, dog=1))
    assert lines == ["1 classes have only one image, such as dog: it is trained on, and none is held out"]
    assert np.bincount(store.split("train", "class")).tolist() == [3, 1]


def test_class_folder_that_is_empty_is_ignored(tmp_path):
    root = folder(tmp_path / "zoo", cat=4, dog=0)
    store, lines = prepared(root)
    assert store.manifest["class_names"] == ["cat"] and lines == ["the folder dog holds no images and is no class"]


def test_image_store_of_other_data_is_refused(tmp_path):
    store, _ = prepared(folder(tmp_path / "zoo", cat=4))
    with pytest.raises(UserError, match="was made with stored_size=8, not 16; name its images instead"):
        prepared(store.path, size=16)


# ---- interruptions -------------------------------------------------------------------------------------------------------


def test_image_preparation_interrupted_gives_the_same_store(tmp_path, monkeypatch):
    monkeypatch.setattr(image_store, "DECODE_BATCH", 3)
    monkeypatch.setattr(image_store, "SAVE_SECONDS", -1.0)
    root = folder(tmp_path / "zoo", cat=9, dog=9)
    spoil(root, "half")
    whole, _ = prepared(root, cache=str(tmp_path / "whole"))
    real, calls = image_store.decode, []

    def counted(image, size):
        calls.append(1)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return real(image, size)

    monkeypatch.setattr(image_store, "decode", counted)
    with pytest.raises(KeyboardInterrupt):
        prepared(root)
    again, _ = prepared(root)
    assert 11 < len(calls) < 11 + 18, "it began from the start"
    assert again.fingerprint == whole.fingerprint and again.manifest["counts"] == whole.manifest["counts"]
    assert again.manifest["bad"] == whole.manifest["bad"] and again.verify() == []


def test_image_folder_that_changes_while_read_is_refused(tmp_path, monkeypatch):
    root = folder(tmp_path / "zoo", cat=6)
    real = image_store.decode

    def moving(image, size):
        picture(99, (SIZE, 2 * SIZE)).save(root / "cat" / "000.png")
        return real(image, size)

    monkeypatch.setattr(image_store, "decode", moving)
    with pytest.raises(UserError, match="changed while it was read"):
        prepared(root)


# ---- the split -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_split_is_equal_in_every_class(share: float):
    classes = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [1, 2, 10, 100]))
    held = partition(classes, share)
    counts = np.bincount(classes[held], minlength=4).tolist()
    assert counts == [0, 1, max(1, int(10 * share)), int(100 * share)]
    train, valid = shuffled_split(held)
    assert sorted([*train, *valid]) == list(range(len(classes))) and held[valid].all() and not held[train].any()
    assert train.tolist() != sorted(train)


# ---- verbs ---------------------------------------------------------------------------------------------------------------


def test_data_verbs_of_images(tmp_path, capsys):
    root = folder(tmp_path / "zoo", cat=6, dog=4)
    spoil(root, "half")
    assert verbs.prepare_image_store(str(root), size=SIZE, out=tmp_path / "store", json=True) == 0
    made = json.loads(capsys.readouterr().out)
    assert sum(made["images"].values()) == 10
    assert (
        made["classes"] == {"cat": 6, "dog": 4} and made["bad"] == 2 and set(made["listed"]) == {"cat/half.jpg", "cat/text.png"}
    )
    assert made["train on it"].endswith(f"data.images={tmp_path / 'store'} data.size={SIZE}")
    assert verbs.inspect(str(tmp_path / "store")) == 0
    shown = capsys.readouterr().out
    assert "cat 6, dog 4" in shown and made["fingerprint"] in shown
    assert verbs.verify(str(tmp_path / "store")) == 0
    with pytest.raises(UserError, match="holds class, image, no tokens"):
        verbs.bench(str(tmp_path / "store"))


def test_image_store_that_is_damaged_is_rebuilt(tmp_path, capsys):
    root, store = folder(tmp_path / "zoo", cat=6), tmp_path / "store"
    verbs.prepare_image_store(str(root), size=SIZE, out=store)
    content = bytearray((store / "image.bin").read_bytes())
    content[7] ^= 1
    (store / "image.bin").write_bytes(content)
    assert verbs.verify(str(store)) == 1 and "image.bin: chunk 0" in capsys.readouterr().out
    assert verbs.prepare_image_store(str(root), size=SIZE, out=store) == 0 and verbs.verify(str(store)) == 0


def test_generated_data_is_inspected_too(capsys):
    from seedbed import recipes

    assert verbs.inspect("flow/demo", open_recipe=lambda name: open_data(recipes.find(name)[0].preset("demo"))) == 0
    assert "num_classes       24" in capsys.readouterr().out


# ---- arrays, datasets, latents -------------------------------------------------------------------------------------------


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW", "NHW1", "RGBA"])
@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_array_files_in_every_layout(tmp_path, layout: str, suffix: str):
    pixels = noise(6, SIZE, SIZE, 3)
    if layout in ("NHW", "NHW1"):
        pixels[:] = pixels[..., :1]
    arrays = {
        "NHWC": pixels,
        "NCHW": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)),
        "NHW": np.ascontiguousarray(pixels[..., 0]),
        "NHW1": np.ascontiguousarray(pixels[..., :1]),
        "RGBA": np.concatenate([pixels, np.full((6, SIZE, SIZE, 1), 255, np.uint8)], 3),
    }
    store, _ = prepared(saved(f"a.{suffix}", images=arrays[layout])(tmp_path))
    assert rows(store) == {(0, x.tobytes()) for x in pixels} and store.manifest["class_names"] == ["0"]


def test_array_files_with_classes_and_a_split(tmp_path):
    x, y = noise(9, SIZE, SIZE, 3), np.arange(9) % 3
    path = saved("mnist.npz", x_train=x[:6], y_train=y[:6], x_test=x[6:], y_test=y[6:])(tmp_path)
    store, _ = prepared(path)
    assert rows(store) == {(int(c), i.tobytes()) for c, i in zip(y, x, strict=True)}
    assert {i.tobytes() for i in store.split("valid", "image")} == {i.tobytes() for i in x[6:]}


class Rows(list):
    """What the datasets library gives, as far as it is used."""

    def __init__(self, rows: list, names: list[str] | None):
        super().__init__(rows)
        image, label = type("Image", (), {}), type("ClassLabel", (), {"names": names})
        self.features = {"img": image(), **({"label": label()} if names else {})}
        self._fingerprint = str(len(rows))

    def __getitem__(self, key):
        return [row[key] for row in list(self)] if isinstance(key, str) else super().__getitem__(key)


def hub(monkeypatch, splits: dict) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, split=None: splits  # pyright: ignore
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_image_dataset_is_read(monkeypatch):
    made = [{"img": picture(n), "label": n % 2} for n in range(6)]
    hub(monkeypatch, {"train": Rows(made[:4], ["cat", "dog"]), "test": Rows(made[4:], ["cat", "dog"])})
    store, _ = prepared("hf:somebody/pets")
    assert store.manifest["class_names"] == ["cat", "dog"] and store.manifest["splits"]["valid"] == [4, 6]
    assert rows(store) == {(n % 2, np.asarray(picture(n)).tobytes()) for n in range(6)}


def test_hub_dataset_without_images_or_library_is_refused(monkeypatch):
    rows = Rows([{"img": picture(1)}], None)
    del rows.features["img"]
    hub(monkeypatch, {"train": rows})
    with pytest.raises(UserError, match="has no column of images"):
        prepared("hf:somebody/texts")
    hub(monkeypatch, {"test": rows})
    with pytest.raises(UserError, match="has no split `train`; it has test"):
        prepared("hf:somebody/texts")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs the extra `hub`"):
        prepared("hf:somebody/texts")


ENCODER = """
import torch.nn.functional as F

def halve(x_BCHW):
    return F.avg_pool2d(x_BCHW, 2).repeat(1, 2, 1, 1)[:, :4]

def flat(x_BCHW):
    return x_BCHW.flatten(1)
"""


def test_latents_are_encoded_once(tmp_path, monkeypatch):
    (tmp_path / "own_encoder.py").write_text(ENCODER)
    monkeypatch.syspath_prepend(str(tmp_path))
    root = folder(tmp_path / "zoo", cat=6)
    data = open_images(ImageConfig(images=str(root), size=SIZE, encode="own_encoder:halve"), 1)
    assert data.shape == (4, 4, 4)
    plain = open_images(ImageConfig(images=str(root), size=SIZE), 1)
    wanted = torch.nn.functional.avg_pool2d(plain.train.pick(np.arange(5))[0], 2)
    torch.testing.assert_close(data.train.pick(np.arange(5))[0][:, :3], wanted, atol=1e-3, rtol=0)
    raw = {"image": torch.from_numpy(np.array(data.train.arrays["image"])), "class": torch.zeros(5), "index": torch.arange(5)}
    assert data.train.batch(raw)["image"].dtype == torch.float32


@pytest.mark.parametrize(
    ("encode", "words"),
    [
        ("no_such_module:f", "cannot be loaded: No module named"),
        ("own_encoder2:missing", "cannot be loaded: .*missing"),
        ("own_encoder2:flat", r"must give a tensor \(B, C, h, w\)"),
    ],
)
def test_encoders_that_do_not_work(tmp_path, monkeypatch, encode: str, words: str):
    (tmp_path / "own_encoder2.py").write_text(ENCODER)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=words):
        prepared(folder(tmp_path / "zoo", cat=4), encode=encode)


ODD_IMAGES = {
    "dangling": lambda path: path.symlink_to("nowhere.png"),
    "loop": lambda path: path.symlink_to(path),
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", ODD_IMAGES)
def test_odd_entry_in_an_image_folder_is_a_bad_image(tmp_path: Path, kind: str):
    """A link that leads nowhere or to itself, a FIFO, a device: named and left out, like a file that does not decode."""
    root = folder(tmp_path / "zoo", cat=6, dog=6)
    ODD_IMAGES[kind](root / "cat" / "odd.png")
    with time_limit(30.0, kind):
        store, _ = prepared(root)
    assert sum(end - start for start, end in store.manifest["splits"].values()) == 12
    bad = [entry["image"] for entry in store.manifest["bad"]]
    assert bad == ([] if kind == "folder" else ["cat/odd.png"])


def test_link_loop_beside_class_folders_is_no_class(tmp_path: Path):
    root = folder(tmp_path / "zoo", cat=6, dog=6)
    (root / "loop").symlink_to(root / "loop")
    (root / "back").symlink_to(root)
    with time_limit(30.0, "loop"), contextlib.suppress(UserError):
        store, _ = prepared(root)
        assert "loop" not in store.manifest["class_names"]


def test_data_that_breaks_its_reader_leaves_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from helpers import TOY

    from seedbed.launch import local
    from seedbed.recipes import Recipe
    from seedbed.report import summaries

    def broken(self: Recipe, config: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Recipe, "open_data", broken)
    with pytest.raises(OSError):
        local.train(TOY, [], root=tmp_path, run_name="one", dirty=True)
    assert [one["status"] for one in summaries.summaries(tmp_path)] == ["failed"]
