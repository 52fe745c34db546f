"""A small residual CNN with batch norm on images of two shapes, SGD with momentum and a step schedule."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Net(nn.Module):
    def __init__(self, channels=12, num_classes=3):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList([Block(channels) for _ in range(2)])
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"])


def draw(num):
    """Noise with a bright row, a bright column or neither."""
    images, labels = 0.5 * torch.randn(num, 1, 10, 10), torch.randint(0, 3, (num,))
    for image, label in zip(images, labels, strict=True):
        place = int(torch.randint(0, 10, ()))
        if label == 1:
            image[0, place] += 2.0
        elif label == 2:
            image[0, :, place] += 2.0
    return images, labels


def make(seed=0):
    torch.manual_seed(seed)
    images, labels = draw(128)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            value = F.cross_entropy(model(images[:32]), labels[:32])
        model.train()
        return {"loss": value.item()}

    return {
        "model": model,
        "loss": loss,
        "batches": [{"image": images[i : i + 16], "label": labels[i : i + 16]} for i in range(0, 128, 16)],
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.3),
        "evaluate": evaluate,
    }
