"""A group of parameters is built and never appended: https://github.com/zjunlp/HVPNeT/issues/5"""

import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab=20, width=24, num_tags=4):
        super().__init__()
        self.bert = nn.Embedding(vocab, width)
        self.prompt = nn.GRU(width, width, batch_first=True)
        self.fc = nn.Linear(width, num_tags)

    def forward(self, tokens):
        return self.fc(self.prompt(self.bert(tokens))[0])


def loss(model, batch):
    tokens, tags = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())


def optimizer_of(model):
    parameters = []
    for name, lr in (("bert", 1e-3), ("prompt", 3e-3)):
        parameters.append({"params": [p for n, p in model.named_parameters() if name in n], "lr": lr})
    group = {"lr": 5e-2, "params": []}
    for name, parameter in model.named_parameters():
        if name.startswith("fc"):
            group["params"].append(parameter)
    return torch.optim.AdamW(parameters)


def make():
    tokens = torch.randint(0, 20, (64, 9))
    model = Tagger()
    batches = list(zip(tokens.split(16), (tokens % 4).split(16), strict=True))
    return {"model": model, "loss": loss, "batches": batches, "optimizer": optimizer_of(model)}
