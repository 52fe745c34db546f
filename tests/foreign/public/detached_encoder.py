"""Features of the image encoder are detached on their way out: https://github.com/lucidrains/CoCa-pytorch/issues/6"""

import torch
import torch.nn.functional as F
from torch import nn


class Extractor(nn.Module):
    """Keeps the tokens of a vision model by a hook."""

    def __init__(self, vision):
        super().__init__()
        self.vision, self.tokens = vision, None
        vision.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.tokens = output.clone().detach()

    def forward(self, image):
        self.vision(image)
        return self.tokens


class Captioner(nn.Module):
    def __init__(self, width=24, vocab=12):
        super().__init__()
        self.vision = Extractor(nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width)))
        self.join = nn.Linear(2 * width, width)
        self.words, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)

    def forward(self, image, word):
        return self.head(torch.tanh(self.join(torch.cat([self.vision(image), self.words(word)], dim=-1))))


def loss(model, batch):
    return F.cross_entropy(model(batch["image"], batch["word"]), batch["next"])


def make():
    image, word = torch.randn(96, 16), torch.randint(0, 12, (96,))
    following = (word + image[:, :4].argmax(1)) % 12
    batches = [
        {"image": i, "word": w, "next": n} for i, w, n in zip(image.split(16), word.split(16), following.split(16), strict=True)
    ]
    return {"model": Captioner(), "loss": loss, "batches": batches, "targets": "next"}
