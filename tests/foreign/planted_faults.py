"""Faults planted in the scripts of this folder: an edit, and the checks that name it (the right one first, then related ones)."""

from dataclasses import dataclass

MLP, CNN, RNN, VAE, DIFFUSION, GAN = "mlp_classifier", "cnn_batchnorm", "rnn_language_model", "vae", "diffusion", "gan_generator"
REGRESSION, GPT2, BERT, T5, LIGHTNING = "regression", "hf_gpt2", "hf_bert", "hf_t5", "lightning_module"


@dataclass(frozen=True)
class Fault:
    """`old`, which stands in the script exactly once, becomes `new`."""

    script: str
    name: str
    expected: str
    old: str
    new: str


FAULTS = [
    Fault(MLP, "softmax before cross-entropy", "L2", "return self.head(x)", "return self.head(x).softmax(-1)"),
    Fault(MLP, "nll_loss of logits", "L2", "F.cross_entropy", "F.nll_loss"),
    Fault(MLP, "optimizer holds the head only", "O1 O2", "(model.parameters(), lr=2e-3)", "(model.head.parameters(), lr=2e-3)"),
    Fault(MLP, "learning rate 0", "O2 H2", "lr=2e-3", "lr=0.0"),
    Fault(MLP, "evaluation with dropout", "I6 V1", "    model.eval()\n", ""),
    Fault(MLP, "detached trunk", "O2 C6", "self.more(x)))", "self.more(x.detach())))"),
    Fault(MLP, "layer that is not called", "M7 O2", "self.drop(F.relu(self.more(x)))", "self.drop(x)"),
    Fault(MLP, "one class", "D5", "features[:, :4].argmax(1)", "torch.zeros(320, dtype=torch.long)"),
    Fault(
        MLP,
        "no activation",
        "M6",
        "        x = F.relu(self.hidden(x))\n        x = self.drop(F.relu(self.more(x)))",
        "        x = self.drop(self.more(self.hidden(x)))",
    ),
    Fault(CNN, "mean over the batch", "M4", "x.mean(dim=(2, 3))", "x.mean(dim=(0, 2, 3)).expand(len(x), -1)"),
    Fault(
        CNN, "layers in a list", "M9", "nn.ModuleList([Block(channels) for _ in range(2)])", "[Block(channels) for _ in range(2)]"
    ),
    Fault(CNN, "summed loss", "L1", 'batch["label"])', 'batch["label"], reduction="sum")'),
    Fault(CNN, "evaluation changes batch norm", "T4 I6", "        model.eval()\n", ""),
    Fault(
        CNN,
        "schedule of another optimizer",
        "O5",
        "StepLR(optimizer,",
        "StepLR(torch.optim.SGD(model.parameters(), lr=0.02),",
    ),
    Fault(RNN, "batch and time swapped", "M4 C1", "batch_first=True", "batch_first=False"),
    Fault(RNN, "reads backwards too", "C1", "nn.GRU(width, width,", "nn.GRU(width, width // 2, bidirectional=True,"),
    Fault(RNN, "samples with dropout", "I6", "    model.eval()\n", ""),
    Fault(RNN, "targets not shifted", "C2", "tokens[:, 1:].flatten()", "tokens[:, :-1].flatten()"),
    Fault(
        RNN,
        "head copied from the embedding",
        "M9",
        "self.head = nn.Linear(width, vocab)",
        "self.head = nn.Linear(width, vocab); self.head.weight = nn.Parameter(self.embed.weight.detach().clone())",
    ),
    Fault(VAE, "encoder cut off", "O2 C6", "h = self.encoder(x)", "h = self.encoder(x).detach()"),
    Fault(VAE, "batch written in place", "G3", "x = pictures.flatten(1)", "x = pictures.flatten(1).mul_(0.9)"),
    Fault(VAE, "sum over rows", "L1", 'reduction="sum") / len(x)', 'reduction="sum")'),
    Fault(DIFFUSION, "time is ignored", "M7 O2 C3", " + self.time(t[:, None].float() / 100)", ""),
    Fault(DIFFUSION, "the same noise in every step", "T3", "    (x,) = batch\n", "    (x,) = batch\n    torch.manual_seed(0)\n"),
    Fault(
        DIFFUSION,
        "sampling changes weights",
        "T4",
        "    x = torch.randn(8, 2)\n",
        "    x = torch.randn(8, 2)\n    model.leave.bias.add_(0.1)\n",
    ),
    Fault(
        DIFFUSION,
        "wrong broadcast",
        "M3",
        "t.double() / 100 * torch.pi / 2).square()[:, None]",
        "t.double() / 100 * torch.pi / 2).square()",
    ),
    Fault(GAN, "fake is detached", "M3 O2", "model.discriminator(fake)", "model.discriminator(fake.detach())"),
    Fault(
        GAN,
        "optimizer of the discriminator",
        "O1 O2",
        "Adam(model.generator.parameters()",
        "Adam(model.discriminator.parameters()",
    ),
    Fault(REGRESSION, "prediction (N, 1) against target (N)", "M3", ".squeeze(-1)", ""),
    Fault(
        REGRESSION,
        "schedule returns a learning rate",
        "O5",
        "LambdaLR(optimizer, factor)",
        "LambdaLR(optimizer, lambda step: 3e-3 * factor(step))",
    ),
    Fault(
        REGRESSION,
        "target among the inputs",
        "C2",
        'model(batch["x"])',
        'model(torch.cat([batch["x"][:, 1:], batch["y"][:, None]], 1))',
    ),
    Fault(REGRESSION, "sign of the loss", "L2", "return F.mse_loss", "return -F.mse_loss"),
    Fault(REGRESSION, "optimizer of another model", "O1", "    decay = [p for p in model", "    decay = [p for p in Regressor()"),
    Fault(
        REGRESSION,
        "a value that is not finite",
        "D5",
        "    model = Regressor()\n",
        "    x[3, 2] = float('inf')\n    model = Regressor()\n",
    ),
    Fault(REGRESSION, "loss without a graph", "M3 O2", 'F.mse_loss(model(batch["x"])', 'F.mse_loss(model(batch["x"]).detach()'),
    Fault(REGRESSION, "learning rate far too high", "H1 H2", "lr=3e-3)", "lr=3.0)"),
    Fault(REGRESSION, "learning rate a hundred times too high", "H1 H2", "lr=3e-3)", "lr=0.3)"),
    Fault(REGRESSION, "learning rate far too low", "H2 O6", "lr=3e-3)", "lr=3e-9)"),
    Fault(
        REGRESSION,
        "the same batch again and again",
        "D2",
        '{"x": x[i : i + 32], "y": y[i : i + 32]}',
        '{"x": x[:32], "y": y[:32]}',
    ),
    Fault(
        REGRESSION, "evaluation draws its rows", "V1", "model(x[:64]), y[:64]", "model(x[(i := torch.randperm(256)[:64])]), y[i]"
    ),
    Fault(
        GPT2,
        "labels in the padding",
        "L3",
        "collate = DataCollatorForLanguageModeling(words, mlm=False)",
        "collate = lambda items: {**(b := words.pad(items, return_tensors='pt')), 'labels': b['input_ids'].clone()}",
    ),
    Fault(
        GPT2,
        "padding by the end token",
        "L3",
        "    words = tokenizer()\n",
        "    words = tokenizer()\n    words.pad_token = words.eos_token\n",
    ),
    Fault(GPT2, "samples with dropout", "I6", "    model.eval()\n", ""),
    Fault(
        GPT2,
        "mean of all tokens added",
        "C1",
        "def make(seed=0):\n",
        "class MeanLMHeadModel(GPT2LMHeadModel):\n"
        "    def forward(self, input_ids=None, **options):\n"
        "        embedded = self.transformer.wte(input_ids)\n"
        "        return super().forward(inputs_embeds=embedded + embedded.mean(1, keepdim=True), **options)\n\n\n"
        "def make(seed=0):\n    global GPT2LMHeadModel\n    GPT2LMHeadModel = MeanLMHeadModel\n",
    ),
    Fault(
        BERT,
        "attention mask not used",
        "L3",
        '        "model": model,\n',
        '        "model": model,\n'
        '        "loss": lambda model, batch: model(input_ids=batch["input_ids"], labels=batch["labels"]),\n',
    ),
    Fault(BERT, "evaluation with dropout", "I6 V1", "        model.eval()\n", ""),
    Fault(
        T5,
        "decoder sees its targets",
        "C2",
        '        "model": model,\n',
        '        "model": model,\n'
        '        "loss": lambda model, batch: model(**{k: batch[k] for k in ("input_ids", "attention_mask", "labels")}, '
        'decoder_input_ids=batch["labels"].clamp_min(0)),\n',
    ),
    Fault(
        LIGHTNING,
        "validation on training data",
        "D2",
        "TensorDataset(self.points[192:], self.labels[192:])",
        "TensorDataset(self.points[:48], self.labels[:48])",
    ),
    Fault(LIGHTNING, "detached loss", "M3 O2", "        return loss\n", "        return loss.detach()\n"),
    Fault(LIGHTNING, "optimizer of one layer", "O1 O2", "Adam(self.parameters()", "Adam(self.net[0].parameters()"),
    Fault(LIGHTNING, "dropout in evaluation mode", "V1", "return self.net(x)", "return F.dropout(self.net(x), 0.2)"),
    Fault(
        LIGHTNING,
        "schedule that never moves",
        "O5",
        "CosineAnnealingLR(optimizer, T_max=100)",
        "LambdaLR(optimizer, lambda epoch: 1.0)",
    ),
]
