"""Config of image data: source, size, augmentation. No numpy or torch import, so that presets are fast to list."""

from dataclasses import dataclass
from typing import Literal

from seedbed.config import Units, number
from seedbed.config.keys import function_name
from seedbed.errors import UserError

HELP = "name a folder with one sub-folder per class, an .npy, .npz or .safetensors file, hf:NAME, shapes, or random:NUM:CLASSES"


@dataclass(frozen=True)
class ImageConfig:
    """RGB images of `size` x `size` pixels, or with `width` of `size` x `width` (height x width), with their classes.

    `crop=random` stores an eighth more than `size` and takes a random window of it; `flip` mirrors half of the training
    images. `valid` is the share of every class that is held out where the source has no split of its own. `encode` names a
    function `package.module:name` from images in [-1, 1] to latents, run once when the store is made.
    """

    images: str = "shapes"
    size: int = number(32, low=4, high=4096)
    width: int = number(0, low=0, high=4096)
    crop: Literal["center", "random"] = "center"
    flip: bool = False
    valid: float = number(0.1, low=0.0001, high=0.9)
    encode: str = function_name()
    cache: str = ""

    def check(self) -> None:
        if 0 < self.width < 4:
            raise UserError(f"data.width={self.width} is out of range: at least 4 pixels, or 0 for square images")
        if not self.images.strip():
            raise UserError(f"data.images is empty; {HELP}")
        if self.images.startswith("random:"):
            random_images(self.images)
        if self.encode and (self.flip or self.crop == "random"):
            raise UserError(
                "latents can be neither flipped nor cropped; set data.flip=false data.crop=center, or drop data.encode"
            )
        if self.images == "shapes" and self.crop == "random":
            raise UserError("shapes cannot be cropped, since a partial shape has no class; set data.crop=center")
        if self.encode and self.encode.count(":") != 1:
            raise UserError(f"data.encode={self.encode} is not package.module:function")

    def units(self, loss: str) -> Units:
        size = f"{self.shape[1]}x{self.shape[0]}"
        return Units("images", 1.0, loss, f"{{name}}: {{num_images:,}} images of {size} pixels, {{num_valid_images:,}} held out")

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.width or self.size

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Height and width in the store: what a random crop needs, or just `shape`."""
        height, width = (side + max(1, side // 8) if self.crop == "random" else side for side in self.shape)
        return height, width

    def check_settings(self, patch: int) -> dict[str, object]:
        """A small copy for the checks: four patches along a side, five along a longer one. Latents keep their shape."""
        height, width = self.shape
        rows, columns = (patch * min(side // patch, 4 + (side > other)) for side, other in ((height, width), (width, height)))
        wanted = {"data.size": (height, rows), "data.width": (self.width, columns if self.width else 0)}
        return {} if self.encode else {key: small for key, (full, small) in wanted.items() if 0 < small < full}


def random_images(name: str) -> tuple[int, int]:
    """The number of images and of classes of `random:NUM:CLASSES`."""
    parts = [part.replace("_", "") for part in name.split(":")[1:]]
    sizes = [int(part) for part in parts if part.isascii() and part.isdigit()]
    if len(parts) != 2 or len(sizes) != 2 or sizes[0] < 2 or not 1 <= sizes[1] <= 1 << 16:
        raise UserError(f"data.images={name} is not random:NUM:CLASSES; for example random:64:1000")
    return sizes[0], sizes[1]
