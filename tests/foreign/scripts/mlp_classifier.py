"""A plain loop's parts: an MLP classifier on standardised features."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, num_features=10, width=48, num_classes=4):
        super().__init__()
        self.hidden = nn.Linear(num_features, width)
        self.drop = nn.Dropout(0.1)
        self.more = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        x = F.relu(self.hidden(x))
        x = self.drop(F.relu(self.more(x)))
        return self.head(x)


def loss(model, batch):
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        rights = [float((model(x).argmax(1) == y).float().mean()) for x, y in loader]
    model.train()
    return {"accuracy": sum(rights) / len(rights)}


def make(seed=0):
    torch.manual_seed(seed)
    features = torch.randn(320, 10)
    labels = features[:, :4].argmax(1)
    train = TensorDataset(features[:256], labels[:256])
    held_out = DataLoader(TensorDataset(features[256:], labels[256:]), batch_size=16)
    model = Classifier()
    return {
        "model": model,
        "loss": loss,
        "batches": DataLoader(train, batch_size=32, shuffle=True),
        "optimizer": torch.optim.Adam(model.parameters(), lr=2e-3),
        "evaluate": lambda model: evaluate(model, held_out),
    }
