"""Faults of data, model and objective that people have really made, as edits of the recipes and of what they stand on."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from patching import EXAMPLE, GPT, TOY, Fault, fault

SYSTEM, MODEL = "seedbed/recipes/gpt/system.py", "seedbed/recipes/gpt/model.py"
TEXT, FEED, ORDER = "seedbed/data/text.py", "seedbed/data/feed.py", "seedbed/data/order.py"
TOKENISE = "seedbed/data/tokenise.py"
ATTENTION, MLP, INIT, LOSS, NORMS = (f"seedbed/nn/{name}.py" for name in ("layers", "layers", "init", "layers", "layers"))


def apart(found: Fault) -> Fault:
    """The same fault with a cache of its own: what it stores must not be met by anybody else."""

    @contextlib.contextmanager
    def apply() -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, SEEDBED_CACHE=folder), found.apply():
            yield

    return replace(found, apply=apply)


# ---- gpt: data -------------------------------------------------------------------------------------------------------

_fault = partial(fault, GPT, "data")
_RAW = 'tokens = raw["tokens"]'
_TORN = "torch.cat([tokens[:, :5], tokens[:, 5:].roll(1, 0)], 1)"
_FLOOD = "torch.where(tokens > 40, torch.zeros_like(tokens), tokens)"
_TRAIN = 'train = TextSource(store.split("train", "tokens")'
_STALE = 'train = TextSource((store.split("train", "tokens") + 7) % 90'
_ROWS = "start_B = self.locator.rows(counter)\n            for name"
_COUNT = "self.num_items = (len(tokens) - block) // block"
_TABLE = "items = table(self.num_items, key_of(self.seed, epoch))"
_STORED = 'writer.append("tokens", tokens)'
_SHIFTED = 'writer.append("tokens", (tokens + 1) % tokenizer.vocab_size)'
_NARROW = 'writer.append("tokens", tokens & 0xFF)'
_BPE = ("data.tokenizer=bpe", "data.vocab=1024")

GPT_DATA = [
    _fault("stale vocabulary", "D4 D6", TEXT, _TRAIN, _STALE),
    _fault("ids cut to 8 bits", "D4 D6", TEXT, _RAW, f"{_RAW}.to(torch.uint8)", *_BPE),
    apart(_fault("store of another vocabulary", "D6", TOKENISE, _STORED, _SHIFTED)),
    apart(_fault("ids stored in 8 bits", "D6", TOKENISE, _STORED, _NARROW, *_BPE)),
    _fault("text read backwards", "D4", TEXT, _RAW, f"{_RAW}.flip(1)"),
    _fault("torn rows", "D4 D7", TEXT, _RAW, f"{_RAW}; tokens = {_TORN}"),
    _fault("unknown characters flood the text", "D3 D4", TEXT, _RAW, f"{_RAW}; tokens = {_FLOOD}"),
    _fault("one batch for ever", "D2 D7 D8", FEED, _ROWS, _ROWS.replace("counter", "0")),
    _fault("modulo left in the lookup", "D2 D8", TEXT, "starts = index * self.block", "starts = index % 3 * self.block"),
    _fault("validation is training", "D2", TEXT, 'store.split("valid", "tokens")', 'store.split("train", "tokens")'),
    _fault("last block lost", "D8", TEXT, _COUNT, f"{_COUNT} - 1"),
    _fault("every epoch in the same order", "D8", ORDER, _TABLE, _TABLE.replace(", epoch", "")),
    _fault("seed ignored by the order", "D8", ORDER, _TABLE, _TABLE.replace("self.seed", "1")),
    _fault("items drawn with replacement", "D8", ORDER, _TABLE, f"{_TABLE} // 2 * 2"),
]

# ---- gpt: model ------------------------------------------------------------------------------------------------------

_fault = partial(fault, GPT, "model")
_BLOCK = "x_BTC = block(x_BTC, tables.rope, x0_BTC, skip, caches[i] if caches else None)"
_SWAPPED = "x_BTC = block(x_BTC.transpose(0, 1), tables.rope, x0_BTC, skip).transpose(0, 1)"
_MASKED = (
    "attn_mask=mask,\n            dropout_p=self.dropout if self.training else 0.0,\n"
    "            is_causal=self.causal and mask is None,"
)
_WIDE = "attn_mask=torch.ones(q_BHTD.shape[2], k_BKTD.shape[2], dtype=torch.bool).tril(1),"
_DRAWN = "drawn = torch.empty(param.shape).normal_(0.0, std, generator=generator)"
_TRUNK = "x_BTC = x_BTC + self._drop(self.attention("
_QKV = "return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)"
_HALF_TURNED = "qk = torch.cat([apply_rope(qk[:, :, : self.heads], rope), qk[:, :, self.heads :]], 2)"
_PLACES = "positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)"
_MEAN = "wide.square().mean(-1, keepdim=True)"
_OUT = "return x_BTC + self._drop(self.mlp(self.norm2(x_BTC)))"

GPT_MODEL = [
    _fault("no causal mask", "C1", ATTENTION, "is_causal=self.causal and mask is None", "is_causal=False"),
    _fault("mask one too wide", "C1", ATTENTION, _MASKED, _WIDE),
    _fault("batch and time swapped", "M4", MODEL, _BLOCK, _SWAPPED, "model.positions=learned"),
    _fault("norm over the batch", "M4", NORMS, _MEAN, _MEAN.replace("-1", "0")),
    _fault("no activation", "M6", MLP, "return self.down(F.silu(gate) * value)", "return self.down(gate + value)"),
    _fault("constant init", "M2", INIT, _DRAWN, "drawn = torch.full(param.shape, std)"),
    _fault("unit init", "M1 M2", INIT, _DRAWN, _DRAWN.replace("std", "1.0")),
    _fault("uninitialised scalar", "M2", MODEL, "fill_(block.skip_weight, 1.0)", "pass", "model.skips=true"),
    _fault("unused module", "M7", ATTENTION, "v = v + self.values_x0(x0_BTC)", "v = v if 1 else (v)", "model.values_x0=true"),
    _fault("detached trunk", "C6 O2", MODEL, _TRUNK, _TRUNK.replace("x_BTC +", "x_BTC.detach() +")),
    _fault("values without gradient", "C6", ATTENTION, _QKV, f"{_QKV}.detach()"),
    _fault("positions missing", "M8", ATTENTION, "if rope is not None:", "if rope is not None and False:"),
    _fault("only queries are turned", "M8", ATTENTION, "qk = apply_rope(qk, rope)", _HALF_TURNED),
    _fault("every position is zero", "M8", MODEL, _PLACES, f"{_PLACES} * 0"),
    _fault("residual lost", "M2", MODEL, _OUT, _OUT.replace("x_BTC + ", "")),
    _fault("setting that nobody obeys", "A2", MODEL, "vocab, config.softcap", "vocab, 0.0", "model.softcap=15"),
]

# ---- gpt: objective --------------------------------------------------------------------------------------------------

_fault = partial(fault, GPT, "objective")
_SHIFT = 'batch["tokens"][:, :-1], batch["tokens"][:, 1:]'
_HIDDEN = "self.head(self.hidden(tokens_BT, tables)"
_ENTROPY = "return F.cross_entropy(logits_NV.to(torch.promote_types(x_NC.dtype, torch.float32)), targets_N)"
_LOGITS = "_NV = mask_padding(F.linear(x_NC, weight_VC), vocab)"
_HALF = "return F.cross_entropy(logits_NV[: len(targets_N) // 2], targets_N[: len(targets_N) // 2])"

GPT_OBJECTIVE = [
    _fault("targets unshifted", "C2", SYSTEM, _SHIFT, _SHIFT.replace("1:]", ":-1]")),
    _fault("targets shifted by two", "C2", SYSTEM, _SHIFT, _SHIFT.replace(":-1]", ":-2]").replace("1:]", "2:]")),
    _fault("targets shuffled", "C2", SYSTEM, _SHIFT, f"{_SHIFT}.flip(0)"),
    _fault("target as input", "C2", MODEL, _HIDDEN, _HIDDEN.replace("tokens", "targets")),
    _fault("flipped sign", "L2 M1", LOSS, _ENTROPY, _ENTROPY.replace("return ", "return -")),
    _fault("softmax before cross-entropy", "L2", LOSS, _LOGITS, f"{_LOGITS}.softmax(-1)"),
    _fault("sum reduction", "L1 M1", LOSS, _ENTROPY, _ENTROPY.replace("_N)", '_N, reduction="sum")')),
    _fault("sum over time", "M1", LOSS, _ENTROPY, f"{_ENTROPY} * 11"),
    _fault("divided by the vocabulary", "M1", LOSS, _ENTROPY, f"{_ENTROPY} / vocab"),
    _fault("an id that is never a target", "C2", LOSS, _ENTROPY, _ENTROPY.replace("_N)", "_N, ignore_index=0)")),
    _fault("only the first targets count", "C2 L1", LOSS, _ENTROPY, _HALF),
    _fault("padding takes part in the softmax", "L0 M1", LOSS, _LOGITS, "_NV = F.linear(x_NC, weight_VC)"),
    _fault("temperature left in the loss", "L0 M1", LOSS, _LOGITS, _LOGITS.replace("weight_VC)", "weight_VC * 0.1)")),
]

# ---- a small recipe without a probe ----------------------------------------------------------------------------------

_ERROR = '(self.net(batch["x"]).float()[:, 0] - batch["y"]) ** 2 * batch["keep"]'
_REDUCED = 'error.sum() / batch["keep"].sum().clamp_min(1)'
_NET = "self.net = nn.Sequential("
_SCALED = "scale = torch.rand(()); self.net[0].register_forward_hook(lambda module, given, out: out * scale)"
_COUNTER = 'self.register_buffer("num_calls", torch.zeros(()))'
_FLOATS = "x = x.astype(np.float32)"
_TURN = "self.turn = 1 - self.turn\n        slot"

TOYS = [
    fault(TOY, "objective", "rows against rows", "M3", TOY, _ERROR, _ERROR.replace("[:, 0]", "")),
    fault(TOY, "objective", "mean over rows, weighted by targets", "L1", TOY, _REDUCED, "error.mean()"),
    fault(TOY, "objective", "sum over rows", "L1", TOY, _REDUCED, "error.sum()"),
    fault(TOY, "objective", "part without targets", "L1", TOY, _REDUCED, _REDUCED.replace(".clamp_min(1)", "")),
    fault(TOY, "model", "rows centred on the batch", "M4", TOY, 'net(batch["x"])', 'net(batch["x"] - batch["x"].mean(0))'),
    fault(TOY, "model", "no activation in the net", "M6", TOY, "nn.Tanh()", "nn.Identity()"),
    fault(TOY, "model", "a layer nobody calls", "M7", TOY, _NET, f"self.spare = nn.Linear(4, 4); {_NET}"),
    fault(TOY, "model", "state that is not saved", "M9", TOY, _COUNTER, f"{_COUNTER}; {_SCALED}"),
    fault(TOY, "model", "layer beyond the gradient", "C6 O2", TOY, 'net(batch["x"]).float()', 'net(batch["x"]).detach().float()'),
    fault(TOY, "model", "saturated from the start", "M5", TOY, _COUNTER, f"{_COUNTER}; self.net[0].weight.data *= 300"),
    fault(TOY, "data", "numbers that are not finite", "D5", TOY, _FLOATS, f"{_FLOATS}; x[40, 2] = np.inf"),
    fault(TOY, "data", "inputs never normalised", "D5", TOY, _FLOATS, "x = (300 * x).astype(np.float32)"),
    fault(TOY, "data", "validation inside training", "D2", TOY, "Sums(x[:16] * 0.5)", "Sums(x[:16])"),
    fault(TOY, "data", "one item for a whole batch", "D2", TOY, 'x = raw["x"]', 'x = raw["x"][:1].expand_as(raw["x"])'),
    fault(TOY, "data", "memory of a batch used again too early", "D7", FEED, _TURN, "slot"),
]

# ---- flow matching, in a file of one's own ---------------------------------------------------------------------------

_MIDDLE = "nn.Linear(3, model.width), nn.SiLU(), *middle"
_STRAIGHT = "nn.Linear(3, model.width), *(m for m in middle if isinstance(m, nn.Linear))"
_INPUT = "torch.cat([x_B2, t_B1], dim=1)"
_MIXED = "(1 - t_B1) * noise_B2 + t_B1 * x_B2"
_TARGET = '(drawn["x"] - drawn["noise"])'
_NAMED = '{"x": raw["points"]}'

_fault = partial(fault, EXAMPLE)

EXAMPLES = [
    _fault("objective", "velocity summed", "L1", EXAMPLE, ".square().mean()", ".square().sum()"),
    _fault("objective", "velocity reversed", "L2", EXAMPLE, _TARGET, f"-{_TARGET}"),
    _fault("objective", "time told in tenths", "L6", EXAMPLE, '"t": t_B1', '"t": t_B1.round(decimals=1)'),
    _fault("objective", "clean and noise exchanged", "L6", EXAMPLE, _MIXED, "(1 - t_B1) * x_B2 + t_B1 * noise_B2"),
    _fault("objective", "root at zero", "C4", EXAMPLE, _TARGET, _TARGET + ' / drawn["t"].sqrt()'),
    _fault("objective", "answer as input", "C2", EXAMPLE, 'velocity(drawn["mixed"]', 'velocity(drawn["x"]'),
    _fault("model", "time does not reach the field", "C3", EXAMPLE, _INPUT, _INPUT.replace("t_B1]", "0 * t_B1]")),
    _fault("model", "no activation in the field", "M6", EXAMPLE, _MIDDLE, _STRAIGHT),
    _fault("model", "points centred on the batch", "M4", EXAMPLE, _INPUT, _INPUT.replace("x_B2,", "x_B2 - x_B2.mean(0),")),
    _fault("data", "points scaled twice", "D5", EXAMPLE, _NAMED, _NAMED.replace("]}", "] / 255}")),
    _fault("data", "points folded", "D2 D8", EXAMPLE, "        return index_B\n", "        return index_B // 1000\n"),
]

FAULTS: list[Fault] = [*GPT_DATA, *GPT_MODEL, *GPT_OBJECTIVE, *TOYS, *EXAMPLES]
