"""Faults of optimizer, numbers, loop, evaluation, devices and inference that people have really made, as edits of the source."""

from contextlib import nullcontext

from patching import EXAMPLE, GPT, TOY, Fault, fault

ENGINE, LOOP, OPTIM, EMA, CHECKPOINT = (f"seedbed/train/{n}.py" for n in ("engine", "loop", "optim", "ema", "checkpoint"))
LOADING = "seedbed/train/checkpoint_loading.py"
JOB, PROGRESS, ROLLBACK, SAVING = (f"seedbed/train/{n}.py" for n in ("job", "progress", "rollback", "saving"))
SYSTEM, MODEL, TEXT = "seedbed/recipes/gpt/system.py", "seedbed/recipes/gpt/model.py", "seedbed/train/text_system.py"
SAMPLING, EXPORT = "seedbed/nn/decoding.py", "seedbed/train/exports.py"
SCHEDULE, LOSS, CACHE = "seedbed/train/optim.py", "seedbed/nn/layers.py", "seedbed/nn/decoding.py"
MINE, SUMS = "examples/my_recipe.py", "tests/toy_recipe.py"


def setting(recipe: str, place: str, id: str, expected: str, *settings: str) -> Fault:
    """A slip in a config: the code is sound."""
    return Fault(id, recipe, place, set(expected.split()), nullcontext, "", settings)


_PARAM = "        if not param.requires_grad:\n"
_ZERO = "            param.grad = None\n        self.norms[name] = true_norm"
_STEP = "            part.step(lr_factor, divisor, skip)"
_LR = "lr=lr_factor * self.group.lr,"
_RATE = "view[_LR_FACTOR] = multiplier(self.config.schedule, progress, step + 1) if lr_factor is None else lr_factor"
_STEP_SEED = "seed = mix(self.config.seed, step, *([self.ranks.rank] if self.ranks.rank else []))"
_PROGRESS = "return (self.items + self.config.batch) / self.total_items"
_CLIP = "divisor = (true_norm / clip).clamp_min(1.0) if clip else torch.ones_like(norm)"
_RNG_RESTORE = "    random.setstate(python)\n    np.random.set_state(legacy_numpy)"

OPTIMIZER = [
    fault(GPT, "model", "frozen blocks", "O2", SYSTEM, "config.data.block, config.seed)",
          "config.data.block, config.seed)\n        self.model.blocks.requires_grad_(False)"),
    fault(EXAMPLE, "model", "frozen layer", "O2", MINE, "*middle, nn.Linear(model.width, 2))",
          "*middle, nn.Linear(model.width, 2))\n        self.net[2].requires_grad_(False)"),
    fault(GPT, "optimizer", "block in no group", "O1 O2", OPTIM, _PARAM,
          '        if not param.requires_grad or "blocks.1." in name:\n'),
    fault(TOY, "optimizer", "layer in no group", "O1 O2", OPTIM, _PARAM,
          '        if not param.requires_grad or "net.3." in name:\n'),
    fault(GPT, "optimizer", "embeddings in Muon", "O1", OPTIM, 'kind == "matrix" and param.ndim == 2', "param.ndim == 2"),
    fault(TOY, "optimizer", "vectors decay", "O1", OPTIM, 'kind != "scalar" and param.ndim >= 2 if decay is None else decay',
          "True"),
    fault(GPT, "optimizer", "gradients not zeroed", "O3", ENGINE, _ZERO,
          "            pass\n        self.norms[name] = true_norm"),
    fault(TOY, "optimizer", "gradients halved, not zeroed", "O3", ENGINE, _ZERO,
          "            param.grad.mul_(0.5)\n        self.norms[name] = true_norm"),
    fault(GPT, "optimizer", "no step", "O2 E1", OPTIM, _STEP, "            pass"),
    fault(GPT, "optimizer", "only the first group steps", "O2", OPTIM, _STEP, _STEP + "\n            break"),
    fault(EXAMPLE, "optimizer", "two steps for one", "O5", OPTIM, _STEP, _STEP + "\n" + _STEP),
    fault(GPT, "optimizer", "mean of means", "O4 L1", ENGINE, "return list((counts_K / total.clamp_min(1.0)).unbind())",
          "return list(torch.full_like(counts_K, 1.0 / len(counts_K)).unbind())"),
    fault(TOY, "optimizer", "masked targets counted", "O4 L1", SUMS, 'return batch["keep"].sum()', 'return len(batch["keep"])'),
    fault(EXAMPLE, "optimizer", "parts added up", "O4", ENGINE, "loss = loss * self._share", "pass"),
    fault(GPT, "optimizer", "clip ignored", "O4", ENGINE, _CLIP, "divisor = torch.ones_like(norm)"),
    fault(TOY, "optimizer", "clip by the square", "O4", ENGINE, _CLIP, "divisor = (true_norm.square() / clip).clamp_min(1.0)"),
    fault(GPT, "optimizer", "schedule by epochs", "O5", JOB, _PROGRESS,
          "return (self.items // 9600 * 9600 + 1) / self.total_items"),
    fault(EXAMPLE, "optimizer", "schedule runs backwards", "O5", JOB, _PROGRESS, "return 1 - self.items / self.total_items"),
    fault(GPT, "optimizer", "one floor for all groups", "O5", OPTIM, _LR, "lr=(lr_factor * self.group.lr).clamp_min(1e-3),"),
    fault(GPT, "optimizer", "no warm-up", "O5", SCHEDULE, "return progress / schedule.warmup", "return 1.0"),
    fault(TOY, "optimizer", "schedule never moves", "O5", ENGINE, _RATE, "view[_LR_FACTOR] = 1.0"),
    fault(TOY, "optimizer", "floor forgotten", "O5", SCHEDULE, "return schedule.floor + (1.0 - schedule.floor) * ", "return "),
    fault(EXAMPLE, "optimizer", "huge eps", "O5 H2", OPTIM, "eps=self.optim.eps,", "eps=1.0,"),
    fault(GPT, "optimizer", "rates of the groups exchanged", "O5", OPTIM, "OPTIMIZERS[algo].base(optim)",
          'OPTIMIZERS["adamw" if algo == "muon" else "muon"].base(optim)'),
    fault(GPT, "optimizer", "Muon three times as fast", "O5", OPTIM, "scale = 0.2 * math.sqrt(max(shape))",
          "scale = 0.6 * math.sqrt(max(shape))"),
    fault(TOY, "optimizer", "decay lost", "O5", OPTIM, "weight_decay=self.group.weight_decay,", "weight_decay=0.0,"),
    fault(GPT, "optimizer", "decay twice", "O5", OPTIM, "shrink = 1.0 - lr * self.group.weight_decay * keep",
          "shrink = 1.0 - 2.0 * lr * self.group.weight_decay * keep"),
    setting(GPT, "optimizer", "huge eps in the preset", "O5 H2", "optim.eps=1.0"),
    fault(GPT, "optimizer", "bf16 weights", "O6", SYSTEM, "return GPT(config, data)", "return GPT(config, data).bfloat16()"),
    fault(EXAMPLE, "optimizer", "bf16 weights, small net", "O6", MINE, "return Seedling(config.model)",
          "return Seedling(config.model).bfloat16()"),
    fault(GPT, "optimizer", "average not swapped in", "O7", EMA, "self._fill(self.shadow)", "pass", "ema=0.9"),
    fault(TOY, "optimizer", "average of the wrong weight", "O7", EMA, "torch._foreach_mul_(change, weight)",
          "torch._foreach_mul_(change, 1.0 - weight)", "ema=0.9", "steps=100"),
    fault(EXAMPLE, "optimizer", "live weights left averaged", "T4 V1", EMA, "self._fill(kept)", "pass", "ema=0.9"),
    setting(EXAMPLE, "optimizer", "average longer than the run", "O7", "ema=0.9999"),
]  # fmt: skip

_FED = 'x_BT, y_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]'

LEARNING = [
    setting(GPT, "optimizer", "lr x30", "H1", "optim.lr=0.09", "optim.muon_lr=0.3"),
    setting(EXAMPLE, "optimizer", "lr x100", "H1 E1", "optim.lr=0.5"),
    setting(GPT, "optimizer", "lr x1e-4", "H2 E3", "optim.lr=3e-7", "optim.muon_lr=1e-6"),
    setting(EXAMPLE, "optimizer", "lr x1e-4, small net", "H2 E3", "optim.lr=5e-7"),
    setting(GPT, "optimizer", "decay 50", "H3 E1 E3", "optim.weight_decay=50", "optim.muon_weight_decay=50"),
    fault(TOY, "optimizer", "decay 50 in the optimizer", "O5 E1", OPTIM, "weight_decay=self.group.weight_decay,",
          "weight_decay=50.0,"),
    setting(EXAMPLE, "optimizer", "warm-up for most of the run", "H3", "schedule.warmup=0.8"),
    setting(TOY, "data", "batch larger than the data", "H3", "batch=400"),
    fault(GPT, "objective", "targets of other rows", "E2 C2", SYSTEM, _FED, f"{_FED}.roll(1, 0)"),
    fault(GPT, "model", "inputs ignored", "E2 C1 C3 M7", MODEL, "x_BTC = self.embed(tokens_BT)",
          "x_BTC = self.embed(tokens_BT * 0)"),
    fault(GPT, "objective", "row numbers for inputs", "E2 D4", SYSTEM, _FED,
          f"{_FED}; x_BT = x_BT * 0 + torch.arange(len(x_BT))[:, None] % 64"),
    fault(GPT, "objective", "answer in the stream", "V4 C2", MODEL, "self.hidden(tokens_BT, tables), self.head_weight",
          "self.hidden(tokens_BT, tables) + 40 * self.embed(targets_BT), self.head_weight"),
    fault(TOY, "objective", "loss cut off from the net", "O2 E1 M7", SUMS, 'self.net(batch["x"]).float()[:, 0]',
          'self.net(batch["x"]).float()[:, 0].detach().requires_grad_()'),
]  # fmt: skip

_RESTORE = 'checkpoint_loading.restore(job.engine.tensors(), saved.tensors, f"checkpoint {saved.path.name}")'
_COUNTERS = "job.step, job.items, job.skipped_items = saved.step, progress.items, progress.skipped_items"
_EVAL = "        finally:\n            self.system.train(was_training)"
_FORK = "with fork_rng(self.device), threads, averaged, gathered, torch.no_grad(), self.autocast():"

LOOPS = [
    fault(GPT, "loop", "resume without optimizer", "T2", PROGRESS, _RESTORE,
          'checkpoint_loading.restore({"model": job.engine.tensors()["model"]}, saved.tensors, "")'),
    fault(EXAMPLE, "loop", "resume without average", "T2", PROGRESS, _RESTORE,
          'checkpoint_loading.restore({k: v for k, v in job.engine.tensors().items() if k != "ema"}, saved.tensors, "")',
          "ema=0.9"),
    fault(GPT, "loop", "resume without position", "T2", PROGRESS, _COUNTERS,
          "job.step, job.items, job.skipped_items = saved.step, 0, 0"),
    fault(TOY, "loop", "resume without position, small net", "T2", PROGRESS, _COUNTERS,
          'job.step, job.items, job.skipped_items = 0, progress.items, progress.skipped_items'),
    fault(EXAMPLE, "loop", "resume stretches the schedule", "T2", PROGRESS, "job.total_items = progress.total_items",
          "job.total_items = 2 * progress.total_items"),
    fault(TOY, "loop", "buffers not saved", "T2", ENGINE, "(optim if name in working else weights)[name] = buffer",
          "continue"),
    fault(TOY, "loop", "roll-back meets the same data", "T2", ROLLBACK, "job.skipped_items = counter - job.items",
          "job.skipped_items = 0"),
    fault(GPT, "loop", "roll-back to the newest, not the best", "T2", ROLLBACK, "best = checkpoint.best(folder)",
          "best = checkpoint.steps_in(folder)[-1]"),
    fault(EXAMPLE, "loop", "random state carried from step to step", "T2 T4", ENGINE, _STEP_SEED,
          "if step:\n            return\n        seed = mix(self.config.seed, step)"),
    fault(EXAMPLE, "loop", "every step the same noise", "T3", ENGINE, _STEP_SEED, "seed = mix(self.config.seed, 0)"),
    fault(EXAMPLE, "objective", "one time for all rows", "T3", MINE, "torch.rand_like(x_B2[:, :1])",
          "torch.rand_like(x_B2[:1, :1]).expand(len(x_B2), 1)"),
    fault(EXAMPLE, "loop", "noise from numpy", "T3", MINE, "torch.randn_like(x_B2), torch.rand_like",
          "torch.from_numpy(np.random.standard_normal(x_B2.shape)).to(x_B2), torch.rand_like"),
    fault(GPT, "loop", "evaluation leaves eval mode behind", "T4 I6", ENGINE, _EVAL, "        finally:\n            pass"),
    fault(TOY, "evaluation", "evaluation changes weights", "T4 V1", SUMS, "torch.rand(3)\n", "self.net[0].weight.mul_(0.999)\n"),
    fault(TOY, "evaluation", "evaluation counts into a buffer", "T4 V1", SUMS, "torch.rand(3)\n", "self.num_calls += 1\n"),
    fault(EXAMPLE, "inference", "sampling fine-tunes", "T4 I6", MINE, "panels = [panel(x_B2)]\n",
          "panels = [panel(x_B2)]\n        self.net[0].bias.mul_(0.99)\n"),
    fault(GPT, "loop", "checksums not compared", "T6", LOADING, "if hashlib.sha256(data).hexdigest() != wanted:", "if False:"),
    fault(TOY, "loop", "save without aside", "T6", CHECKPOINT, 'folder / f".aside-{folder_name(step)}"',
          "folder / folder_name(step)"),
    fault(EXAMPLE, "loop", "save removes the one before", "T6 T2", CHECKPOINT, "    folder.mkdir(exist_ok=True)\n",
          "    shutil.rmtree(folder, ignore_errors=True)\n    folder.mkdir(exist_ok=True)\n"),
    fault(EXAMPLE, "loop", "a full disk ends the run", "T6", SAVING,
          "    except OSError as error:\n        job.run.event(job.step, \"save_failed\"",
          "    except KeyError as error:\n        job.run.event(job.step, \"save_failed\""),
    fault(TOY, "loop", "stopped without saving", "T2", LOOP,
          '            job.status = "interrupted"\n            saving.save_last(job)',
          '            job.status = "interrupted"'),
]  # fmt: skip

_NATS = "nats += nats_BT.sum(-1).cpu().double().sum().item()"

EVALUATION = [
    fault(GPT, "evaluation", "dropout in evaluation", "V1", MODEL, "y_BTC = F.dropout(y_BTC, self.dropout, self.training)",
          "y_BTC = F.dropout(y_BTC, 0.2, True)"),
    fault(TOY, "evaluation", "dropout in evaluation, small net", "V1", SUMS, "nn.Dropout(model.dropout)",
          "type('Always', (nn.Dropout,), {'train': lambda self, mode: super(nn.Dropout, self).train(True)})(0.3)"),
    fault(GPT, "evaluation", "evaluation on a random part", "V1", SYSTEM, _NATS,
          "nats += nats_BT.sum(-1).cpu().double().mul(__import__('random').random()).sum().item()"),
    fault(GPT, "evaluation", "short last window counts in full", "V3 V2", SYSTEM, _NATS,
          "nats = (nats + nats_BT.mean().item() * source.num_targets) / (2 if nats else 1)"),
    fault(GPT, "evaluation", "evaluation per row", "V2 V3", "seedbed/data/text.py", "per_token = nats / source.num_targets",
          "per_token = nats / source.num_items"),
    fault(EXAMPLE, "evaluation", "evaluation with another loss", "V2", MINE, 'return {"loss": loss.item()}',
          'return {"loss": 2 * loss.item()}'),
    fault(EXAMPLE, "evaluation", "evaluation by batches of means", "V3", MINE,
          'loss, _ = self.loss(source.batch({"points": points}), engine)',
          "size = engine.config.batch\n"
          "        parts = [self.loss(source.batch({'points': p}), engine)[0] for p in points[: size + 1].split(size)]\n"
          "        loss = torch.stack(parts).mean()"),
]  # fmt: skip

_POSITION = "tables = self.model.position_tables(token_B1, self.cache.length_B[:, None])"

INFERENCE = [
    fault(GPT, "model", "logits rounded in bf16", "G2", LOSS, "F.linear(x_NC, weight_VC), vocab)",
          "F.linear(x_NC, weight_VC) + 4096 - 4096, vocab)", "precision=bf16"),
    fault(EXAMPLE, "objective", "loss writes into its input", "G3", MINE, 'self.draw(batch["x"])\n        return',
          'self.draw(batch["x"].mul_(0.5))\n        return'),
    fault(GPT, "objective", "raw strides", "G3", SYSTEM, _FED,
          f"{_FED}; x_BT = batch['tokens'].as_strided(x_BT.shape, (x_BT.shape[1] + 1, 1))"),
    fault(TOY, "objective", "view of a stride", "G3", SUMS, 'error = (self.net(batch["x"])',
          'error = (self.net(batch["x"].view(-1).view(-1, 4))'),
    fault(GPT, "model", "weights renormed in forward", "G3", MODEL, "x_BTC = self.embed(tokens_BT)",
          "self.blocks[0].attention.out.weight.detach().mul_(1.0)\n        x_BTC = self.embed(tokens_BT)"),
    fault(GPT, "inference", "cache begins one slot late", "I1", CACHE, "self.length_B = torch.zeros(batch,",
          "self.length_B = torch.ones(batch,"),
    fault(GPT, "inference", "key in the slot before", "I1 I2", CACHE, "self.kv[0, self.rows, :, self.length] =",
          "self.kv[0, self.rows, :, (self.length - 1).clamp_min(0)] ="),
    fault(GPT, "inference", "decode position off by one", "I2", MODEL, _POSITION, _POSITION.replace("None]", "None] + 1")),
    fault(GPT, "inference", "prompt cut short", "I2", TEXT, "self.generate([prompt] * num,",
          "self.generate([prompt[:-1]] * num,"),
    fault(GPT, "inference", "temperature ignored", "I2", SAMPLING, "if sampling.temperature == 0.0:",
          "if sampling.temperature < 0.0:"),
    fault(GPT, "inference", "seed of a sample ignored", "I6", SAMPLING, ".exponential_(generator=generator)", ".exponential_()"),
    fault(EXAMPLE, "inference", "sampling in training mode", "I6", ENGINE, "        self.system.eval()\n        averaged",
          "        averaged"),
    fault(EXAMPLE, "inference", "sampling builds a graph", "I6", ENGINE, _FORK, _FORK.replace("torch.no_grad()",
          "torch.enable_grad()")),
    fault(EXAMPLE, "inference", "unseeded samples", "I6", MINE, "torch.Generator().manual_seed(request.read(SampleOptions).seed)",
          "torch.Generator().manual_seed(request.read(SampleOptions).seed + np.random.randint(99999))"),
    fault(GPT, "inference", "export in half precision", "I7", EXPORT, "tensor.detach().cpu().contiguous()",
          "tensor.detach().cpu().half()"),
    fault(GPT, "inference", "export without a block", "I7", EXPORT, "for name, tensor in tensors.items()}",
          'for name, tensor in tensors.items() if "blocks.1." not in name}'),
]  # fmt: skip

FAULTS = [*OPTIMIZER, *LEARNING, *LOOPS, *EVALUATION, *INFERENCE]
