"""With the end token as padding, no end is ever a label: https://github.com/huggingface/transformers/issues/23530"""

import torch
import torch.nn.functional as F
from torch import nn

END = PAD = 0


class Model(nn.Module):
    def __init__(self, vocab=16, width=32):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids):
        return self.head(self.rnn(self.embed(input_ids))[0])


def loss(model, batch):
    logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def collate(texts, length=10):
    ids = torch.tensor([text + [PAD] * (length - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(ids == PAD, -100, ids)}


def make():
    lengths, starts = torch.randint(3, 9, (96,)).tolist(), torch.randint(1, 8, (96,)).tolist()
    texts = [[*range(start, start + length), END] for start, length in zip(starts, lengths, strict=True)]
    return {
        "model": Model(),
        "loss": loss,
        "batches": lambda: (collate(texts[i : i + 16]) for i in range(0, 96, 16)),
        "causal": True,
    }
