"""An encoder that expects time first gets the batch first: https://github.com/IBM/TabFormer/pull/14"""

import torch
import torch.nn.functional as F
from torch import nn


class FieldEncoder(nn.Module):
    def __init__(self, vocab=30, width=16, num_classes=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, fields):
        return self.head(self.encoder(self.embed(fields)).mean(1))


def loss(model, batch):
    fields, label = batch
    return F.cross_entropy(model(fields), label)


def make():
    fields = torch.randint(0, 30, (96, 7))
    label = (fields[:, 0] > fields[:, 1]).long()
    model = FieldEncoder()
    return {
        "model": model,
        "loss": loss,
        "batches": list(zip(fields.split(16), label.split(16), strict=True)),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }
