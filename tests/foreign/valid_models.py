"""Valid models, losses and batches of many kinds, on random data as in people's own tests: none may raise an alarm."""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ZOO = {}


def valid(make):
    ZOO[make.__name__] = make
    return make


def split(*tensors, size=16):
    return list(zip(*(tensor.split(size) for tensor in tensors), strict=True))


def mlp(*sizes, last=None):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1], *([last] if last else []))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def four_classes(num=64):
    x = torch.randn(num, 10)
    return x, x[:, :4].argmax(1)


@valid
def random_labels():
    return {"model": mlp(10, 32, 5), "loss": cross_entropy, "batches": split(torch.randn(64, 10), torch.randint(0, 5, (64,)))}


@valid
def many_random_labels():
    batches = split(torch.randn(1024, 10), torch.randint(0, 5, (1024,)), size=64)
    return {"model": mlp(10, 32, 5), "loss": cross_entropy, "batches": batches}


@valid
def linear_regression():
    model, x = nn.Linear(3, 1), torch.randn(64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = split(x, x[:, :1] * 2 + 1)
    return {"model": model, "loss": lambda m, b: F.mse_loss(m(b[0]), b[1]), "batches": batches, "optimizer": optimizer}


class CausalTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]).to(self.head.weight)
        return self.head(self.layer(self.embed(tokens), src_mask=mask, is_causal=True))


@valid
def random_tokens():
    def loss(model, tokens):
        return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    return {"model": CausalTransformer(), "loss": loss, "batches": torch.randint(0, 100, (32, 17)).split(8), "causal": True}


class LossInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(50, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 50)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, x, y=None):
        logits = self.head(self.rnn(self.embed(x))[0])
        return logits, None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


@valid
def loss_inside_the_model():
    tokens = torch.randint(0, 50, (48, 13))
    batches = split(tokens[:, :-1], tokens[:, 1:])
    return {"model": LossInside(), "loss": lambda m, b: m(*b)[1], "batches": batches, "causal": True}


@valid
def contrastive():
    def loss(model, batch):
        a, b = (F.normalize(model(view), dim=-1) for view in batch)
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))

    x = torch.randn(128, 12)
    return {"model": mlp(12, 32, 16), "loss": loss, "batches": split(x, x + 0.1 * torch.randn(128, 12))}


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(12, 16), nn.Linear(8, 16), nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1) @ F.normalize(self.text(text), dim=-1).T * self.scale.exp()


@valid
def images_and_texts():
    def loss(model, batch):
        logits = model(batch["image"], batch["text"])
        order = torch.arange(len(logits))
        return (F.cross_entropy(logits, order) + F.cross_entropy(logits.T, order)) / 2

    x = torch.randn(64, 12)
    return {"model": Pairs(), "loss": loss, "batches": [{"image": i, "text": t} for i, t in split(x, x[:, :8])]}


@valid
def triplets():
    x = torch.randn(96, 6)
    batches = split(x, x + 0.1 * torch.randn(96, 6), torch.randn(96, 6))
    return {"model": mlp(6, 16, 8), "loss": lambda m, b: F.triplet_margin_loss(*map(m, b)), "batches": batches}


@valid
def autoencoder():
    model = nn.Sequential(nn.Flatten(), mlp(64, 16, 64))
    return {"model": model, "loss": lambda m, b: F.mse_loss(m(b), b.flatten(1)), "batches": torch.rand(64, 8, 8).split(16)}


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.codes, self.decode = nn.Linear(16, 8), nn.Embedding(32, 8), nn.Linear(8, 16)

    def forward(self, x):
        z = torch.tanh(self.encode(x))
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        return self.decode(z + (code - z).detach()), z, code


@valid
def straight_through():
    def loss(model, x):
        out, z, code = model(x)
        return F.mse_loss(out, x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())

    return {"model": Quantised(), "loss": loss, "batches": torch.randn(64, 16).split(16)}


@valid
def several_labels():
    x = torch.randn(64, 10)
    loss = lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1])  # noqa: E731
    return {"model": mlp(10, 32, 6), "loss": loss, "batches": split(x, (x[:, :6] > 0).float())}


@valid
def sigmoid_and_binary_cross_entropy():
    x = torch.randn(64, 10)
    loss = lambda m, b: F.binary_cross_entropy(m(b[0]), b[1])  # noqa: E731
    return {"model": mlp(10, 32, 1, last=nn.Sigmoid()), "loss": loss, "batches": split(x, (x[:, :1] > 0).float())}


@valid
def log_softmax_and_nll():
    loss = lambda m, b: F.nll_loss(m(b[0]), b[1])  # noqa: E731
    return {"model": mlp(10, 32, 4, last=nn.LogSoftmax(-1)), "loss": loss, "batches": split(*four_classes())}


@valid
def label_smoothing_and_class_weights():
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def loss(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1], label_smoothing=0.1, weight=weights.to(logits.dtype))

    return {"model": mlp(10, 32, 4), "loss": loss, "batches": split(*four_classes())}


@valid
def frozen_backbone():
    model = nn.Sequential(mlp(10, 32, 32), nn.ReLU(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters(), 1e-3)
    return {"model": model, "loss": cross_entropy, "batches": split(*four_classes()), "optimizer": optimizer}


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.ReLU())
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(11, 3, 1)

    def forward(self, x):
        return self.out(torch.cat([x, self.up(self.middle(self.down(x)))], 1))


@valid
def segmentation():
    x = torch.rand(48, 3, 12, 12)
    return {"model": UNet(), "loss": cross_entropy, "batches": split(x, x.argmax(1), size=8)}


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 32, padding_idx=0), nn.Linear(32, 3)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)

    def forward(self, ids, mask):
        x = self.layer(self.embed(ids), src_key_padding_mask=mask == 0)
        weight = mask[..., None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))


def padded():
    mask = (torch.arange(10) < torch.randint(3, 10, (64, 1))).long()
    return torch.randint(1, 30, (64, 10)) * mask, mask


@valid
def padded_transformer():
    ids, mask = padded()
    batches = [{"ids": i, "mask": m, "label": y} for i, m, y in split(ids, mask, ids[:, 0] % 3)]
    return {"model": Masked(), "loss": lambda m, b: F.cross_entropy(m(b["ids"], b["mask"]), b["label"]), "batches": batches}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(32, 5)
        self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


@valid
def tags_with_a_padding_id():
    ids, mask = padded()
    loss = lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), ignore_index=0)  # noqa: E731
    return {"model": Tagger(), "loss": loss, "batches": split(ids, (1 + ids % 4) * mask)}


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 32), nn.Linear(32, 20)
        self.encoder, self.decoder = nn.GRU(32, 32, batch_first=True), nn.GRU(32, 32, batch_first=True)

    def forward(self, source, target):
        return self.head(self.decoder(self.embed(target), self.encoder(self.embed(source))[1])[0])


@valid
def teacher_forcing():
    source = torch.randint(2, 20, (64, 7))
    target = torch.cat([torch.ones(64, 1).long(), source.flip(1)], 1)

    def loss(model, batch):
        return F.cross_entropy(model(batch["source"], batch["target"][:, :-1]).transpose(1, 2), batch["target"][:, 1:])

    return {"model": Translator(), "loss": loss, "batches": [{"source": s, "target": t} for s, t in split(source, target)]}


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = mlp(4, 32, 2), mlp(4, 32, 2).requires_grad_(False)
        self.target.load_state_dict(self.online.state_dict())


@valid
def q_learning():
    def loss(model, batch):
        state, action, reward, following, done = batch
        with torch.no_grad():
            wanted = reward + 0.9 * (1 - done) * model.target(following).amax(1)
        return F.smooth_l1_loss(model.online(state).gather(1, action[:, None])[:, 0], wanted)

    done = (torch.rand(96) < 0.1).float()
    batches = split(torch.randn(96, 4), torch.randint(0, 2, (96,)), torch.randn(96), torch.randn(96, 4), done)
    return {"model": Agent(), "loss": loss, "batches": batches}


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic, self.maker = mlp(6, 32, 1), nn.Linear(3, 6).requires_grad_(False)


@valid
def discriminator_step():
    def loss(model, real):
        fake = model.maker(torch.randn(len(real), 3, dtype=real.dtype))
        return F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake)).mean()

    return {"model": Adversaries(), "loss": loss, "batches": (2 + torch.randn(64, 6)).split(16)}


@valid
def raw_prices():
    x = torch.rand(64, 4) * torch.tensor([1000.0, 5.0, 30.0, 1.0])
    model = nn.Sequential(nn.BatchNorm1d(4), mlp(4, 32, 1), nn.Flatten(0))
    return {"model": model, "loss": lambda m, b: F.l1_loss(m(b[0]), b[1]) / 1e4, "batches": split(x, x[:, 0] * 300 + 5e4)}


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(5, 24, 2, batch_first=True, dropout=0.2), nn.Linear(24, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@valid
def lstm_with_sgd():
    x, model = torch.randn(64, 9, 5), LastState()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return {"model": model, "loss": cross_entropy, "batches": split(x, (x[:, -1, 0] > 0).long()), "optimizer": optimizer}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.classes, self.value = mlp(8, 32, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        h = F.gelu(self.body(x))
        return {"logits": self.classes(h), "value": self.value(h)[:, 0]}


@valid
def two_tasks():
    def loss(model, batch):
        out = model(batch["x"])
        return F.cross_entropy(out["logits"], batch["label"]) + 0.1 * F.mse_loss(out["value"], batch["value"])

    x = torch.randn(64, 8)
    batches = [{"x": a, "label": c, "value": v} for a, c, v in split(x, x[:, :3].argmax(1), x[:, 3])]
    return {"model": TwoHeads(), "loss": loss, "batches": batches}


@valid
def mixup_by_numpy():
    def loss(model, batch):
        (x, y), share = batch, np.random.beta(1, 1)
        order = torch.randperm(len(x))
        logits = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])

    return {"model": mlp(10, 32, 4), "loss": loss, "batches": split(*four_classes())}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(mlp(8, 16, 3) for _ in range(4))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        self.balance = (share.mean(0) ** 2).sum() * 4
        return sum(share[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@valid
def experts_with_a_balance_term():
    x = torch.randn(64, 8)
    loss = lambda m, b: cross_entropy(m, b) + 0.01 * m.balance  # noqa: E731
    return {"model": Experts(), "loss": loss, "batches": split(x, x[:, :3].argmax(1))}


@valid
def weight_and_spectral_norm():
    norms = nn.utils.parametrizations
    model = nn.Sequential(norms.weight_norm(nn.Linear(10, 16)), nn.ReLU(), norms.spectral_norm(nn.Linear(16, 4)))
    return {"model": model, "loss": cross_entropy, "batches": split(*four_classes())}


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, 1, 1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.other(self.two(F.relu(self.norm(self.one(x))))))


@valid
def residual_network_with_sgd():
    blocks = [Residual(16) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batches = split(torch.rand(64, 3, 8, 8), torch.randint(0, 10, (64,)))
    return {"model": model, "loss": cross_entropy, "batches": batches, "optimizer": optimizer}


class ClassDenoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.label = nn.Embedding(50, 16), nn.Embedding(3, 16)
        self.enter, self.middle, self.leave = nn.Conv2d(1, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 1, 3, 1, 1)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, x, t, y):
        h = F.silu(self.enter(x) + (self.time(t) + self.label(y))[:, :, None, None])
        return self.leave(F.silu(self.middle(h)))


@valid
def diffusion_of_classes():
    def loss(model, batch):
        x, y = batch
        t, noise = torch.randint(0, 50, (len(x),)), torch.randn_like(x)
        a = (1 - t.to(x.dtype) / 50)[:, None, None, None]
        return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t, y), noise)

    return {
        "model": ClassDenoiser(),
        "loss": loss,
        "batches": split(torch.randn(48, 1, 8, 8), torch.randint(0, 3, (48,)), size=8),
    }


@valid
def policy_gradient():
    def loss(model, batch):
        log_prob = torch.distributions.Categorical(logits=model(batch["state"])).log_prob(batch["action"])
        return -(log_prob * batch["advantage"]).mean()

    drawn = split(torch.randn(64, 4), torch.randint(0, 3, (64,)), torch.randn(64))
    batches = [{"state": s, "action": a, "advantage": v} for s, a, v in drawn]
    return {"model": mlp(4, 32, 3), "loss": loss, "batches": batches}


class MeanAndVariance(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.variance = mlp(4, 32, 32), nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.mean(h), F.softplus(self.variance(h)) + 1e-3


@valid
def gaussian_likelihood():
    def loss(model, batch):
        mean, variance = model(batch[0])
        return F.gaussian_nll_loss(mean, batch[1], variance)

    x = torch.randn(64, 4)
    return {"model": MeanAndVariance(), "loss": loss, "batches": split(x, x[:, :1])}
