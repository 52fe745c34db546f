"""A small convolutional classifier of real images, whose features and classes score generated ones.

It is trained once on the training part, cached with the hash of its weights, and never trained on samples.
Shape suffixes: N B images, C channels, H W pixels, D features, K classes.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from seedbed.data import limits
from seedbed.data.image_source import ImageData, ImageSource, to_float
from seedbed.data.store import digest
from seedbed.errors import UserError

NUM_FEATURES = 64
# Images per batch of inference.
BATCH = {"cuda": 2048, "cpu": 256}


@dataclass(frozen=True)
class ClassifierConfig:
    """Training settings; their hash is part of the cached file's name, so a change here trains another classifier."""

    width: int = 64
    epochs: int = 24
    batch: int = 256
    lr: float = 3e-3
    weight_decay: float = 0.05
    smoothing: float = 0.1
    seed: int = 0


class Block(nn.Module):
    """A convolution that may change the width, then a residual one."""

    def __init__(self, width_in: int, width: int):
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norms[0](self.first(x)))
        return x + F.gelu(self.norms[1](self.second(x)))


class Classifier(nn.Module):
    """About a million parameters at width 64. Features are standardised by the statistics of the training images."""

    mean: Tensor
    std: Tensor

    def __init__(self, num_classes: int, width: int = ClassifierConfig.width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(Block(a * width, b * width) for a, b in ((1, 1), (1, 2), (2, 4)))
        self.narrow = nn.Linear(4 * width, NUM_FEATURES, bias=False)
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.head = nn.Linear(NUM_FEATURES, num_classes)
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("std", torch.ones(NUM_FEATURES))
        self.hash, self.accuracy = "", math.nan

    def raw(self, x_NCHW: Tensor) -> Tensor:
        x = self.stem(x_NCHW)
        for block in self.blocks:
            x = F.max_pool2d(block(x), 2)
        return F.gelu(self.norm(self.narrow(x.mean((2, 3)))))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.head(self.raw(x_NCHW))

    @torch.no_grad()
    def classify(self, x_NCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised features (N, D) and predicted classes (N,), in float32."""
        device = self.mean.device
        found = []
        for part in x_NCHW.split(BATCH[device.type]):
            raw_ND = self.raw(part.to(device, torch.float32))
            found.append(((raw_ND - self.mean) / self.std, self.head(raw_ND).argmax(1)))
        return torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found])


def open_classifier(
    data: ImageData,
    folder: Path,
    device: torch.device,
    config: ClassifierConfig = ClassifierConfig(),  # noqa: B008
    say: Callable[[str], None] = lambda line: None,
) -> Classifier:
    """The classifier of these images from `folder`; trained and saved there if missing."""
    if data.train.arrays["image"].dtype != np.uint8:
        raise UserError("latents cannot be scored: the classifier needs images; evaluate a run without data.encode")
    if data.num_classes < 2:
        raise UserError("a classifier needs at least two classes, and these images have one; put each class into its own folder")
    if device.type == "mps":
        device = torch.device("cpu")  # the distances need float64
    name = f"classifier-{data.facts['fingerprint']}-{digest(asdict(config))[:8]}"
    classifier = _load(folder / f"{name}.json", Classifier(data.num_classes, config.width), say)
    if classifier is None:
        start = time.monotonic()
        classifier = train_classifier(data, device, config, say)
        # The features of a classifier at chance level are meaningless.
        chance = np.bincount(data.valid.arrays["class"]).max() / data.valid.num_items
        if classifier.accuracy <= chance + 2 * math.sqrt(chance * (1 - chance) / data.valid.num_items):
            raise UserError(
                f"the classifier is right on {classifier.accuracy:.1%} of the real held-out images, and chance is "
                f"{chance:.1%}: its scores would be meaningless; check that the images are in the folders of their classes "
                "(seedbed data inspect)"
            )
        _save(folder / f"{name}.json", classifier)
        trained = f"classifier {classifier.hash} trained in {time.monotonic() - start:.0f} s"
        say(f"{trained}: {classifier.accuracy:.1%} of the held-out images right")
    return classifier.to(device).eval().requires_grad_(False)


def _save(path: Path, classifier: Classifier) -> None:
    """Weights first, then the JSON with their hash."""
    content = save_tensors({name: value.detach().cpu().contiguous() for name, value in classifier.state_dict().items()})
    classifier.hash = hashlib.sha256(content).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    note = json.dumps({"hash": classifier.hash, "accuracy": classifier.accuracy}).encode()
    for file, written in ((path.with_suffix(".safetensors"), content), (path, note)):
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        aside.write_bytes(written)
        aside.replace(file)


def _load(path: Path, classifier: Classifier, say: Callable[[str], None]) -> Classifier | None:
    if not path.is_file():
        return None
    try:
        note, content = json.loads(path.read_bytes()), path.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(content).hexdigest()[:16] != note["hash"]:
            raise ValueError("its weights differ from their hash")
        if problem := limits.header_problem(content[:8]):
            raise ValueError(problem)
        classifier.load_state_dict(load_tensors(content))
        classifier.hash, classifier.accuracy = note["hash"], note["accuracy"]
    except Exception as error:
        say(f"{path} is damaged ({error}); training the classifier again")
        return None
    return classifier


def train_classifier(
    data: ImageData, device: torch.device, config: ClassifierConfig, say: Callable[[str], None] = lambda line: None
) -> Classifier:
    """A new classifier; the same seed, images and machine give the same one."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        classifier = Classifier(data.num_classes, config.width).to(device).train()
        _fit(classifier, data.train, device, config, say)
    classifier.eval()
    with torch.no_grad():
        batches = (part for x in all_images(data.train) for part in x.split(BATCH[device.type]))
        raw_ND = torch.cat([classifier.raw(part.to(device)) for part in batches])
    # A constant feature must not be scaled up.
    classifier.mean.copy_(raw_ND.mean(0))
    classifier.std.copy_(raw_ND.std(0).clamp_min(1e-3))
    seen_N = torch.cat([classifier.classify(x)[1].cpu() for x in all_images(data.valid)])
    right_N = seen_N == torch.from_numpy(data.valid.arrays["class"].astype(np.int64))
    classifier.accuracy = right_N.double().mean().item()
    return classifier


def _fit(
    classifier: Classifier, source: ImageSource, device: torch.device, config: ClassifierConfig, say: Callable[[str], None]
) -> None:
    images_NHWC = torch.from_numpy(np.array(source.arrays["image"])).to(device)
    class_N = torch.from_numpy(source.arrays["class"].astype(np.int64)).to(device)
    batch = min(config.batch, len(images_NHWC))
    steps = config.epochs * (len(images_NHWC) // batch)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, steps, pct_start=0.2)
    last_message = time.monotonic()
    kept = len(images_NHWC) // batch * batch  # whole batches, reshuffled every epoch
    shuffled = (rows_B for _ in range(config.epochs) for rows_B in torch.randperm(len(images_NHWC))[:kept].split(batch))
    for step, rows_B in enumerate(shuffled):
        rows_B = rows_B.to(device)
        x_BCHW = to_float(_jitter(images_NHWC[rows_B], source.flip)).contiguous(memory_format=torch.channels_last)
        # Without its cache: inside another autocast, cast weights would be cached, and every step would use those of the first.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            logits_BK = classifier(x_BCHW)
        loss = F.cross_entropy(logits_BK.float(), class_N[rows_B], label_smoothing=config.smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if time.monotonic() - last_message > 10:
            say(f"training the classifier: step {step + 1:,} of {steps:,}, loss {loss.item():.3f}")
            last_message = time.monotonic()


def _jitter(image_BHWC: Tensor, flip: bool) -> Tensor:
    """Each image shifted by up to a sixteenth of its shorter side with edge padding, and randomly flipped."""
    num, height, width, _ = image_BHWC.shape
    far = max(1, min(height, width) // 16)
    device = image_BHWC.device
    shift_2B = torch.randint(-far, far + 1, (2, num), device=device)
    row_BH, column_BW = (
        (torch.arange(side, device=device) + shift[:, None]).clamp(0, side - 1)
        for side, shift in zip((height, width), shift_2B, strict=True)
    )
    if flip:
        mirrored_B1 = torch.rand(num, 1, device=device) < 0.5
        column_BW = torch.where(mirrored_B1, width - 1 - column_BW, column_BW)
    return image_BHWC[torch.arange(num, device=device)[:, None, None], row_BH[:, :, None], column_BW[:, None, :]]


def all_images(source: ImageSource) -> Iterator[Tensor]:
    """All images in order, some at a time."""
    for first in range(0, source.num_items, 1024):
        yield source.pick(np.arange(first, min(first + 1024, source.num_items)))[0]
