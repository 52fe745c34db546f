"""The thinker: latents read a sequence, one block is applied for several steps, and position queries decode the answer.

Shape suffixes: B batch, N input and M output tokens, K latents, D width, H heads, E width of a head, T steps, S output steps,
C rows of a context, W writes that the memory keeps, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.errors import UserError
from seedbed.nn import rng
from seedbed.nn.init import declare, module_list, normal_
from seedbed.nn.layers import LayerNorm, rms_norm
from seedbed.recipes.thinker.batch_settings import NOISE, PERTURB, POSITIONS, BatchSettings
from seedbed.recipes.thinker.presets import BY_ENDS, ModelConfig
from seedbed.recipes.thinker.program import LOOKUP, READ, STATIC, WRITE
from seedbed.train.stop_gradient import stop_gradient

# Added to masked attention scores; its exponential is 0 in every precision.
HIDDEN = -1e9

KeysValues = tuple[Tensor, Tensor]
LONGEST_WAVE = 10_000.0
# A random scale lies between one over this and this.
MAX_SCALE = 2.0
# For positions counted from both ends: with 16 wavelengths per end, every second is twice as long.
LONGEST_OF_ENDS = 256.0


class Sizes(NamedTuple):
    """Sizes of the task: longest input and output, number of token ids, and the ids of PAD and BOS."""

    num_in: int
    num_out: int
    vocab: int
    pad: int
    bos: int


class Attention(nn.Module):
    """Softmax attention written out: it works under vmap, and at these sizes a fused kernel gains nothing."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.pair = nn.Linear(width, 2 * width, bias=False)
        declare(self.pair.weight, "matrix", rows=(width, width))
        self.out = nn.Linear(width, width, bias=False)

    def keys_values(self, context_BCD: Tensor) -> KeysValues:
        k, v = self.pair(context_BCD).chunk(2, -1)
        return self._split(k), self._split(v)

    def forward(self, x_BQD: Tensor, pair: KeysValues, bias: Tensor | None = None) -> Tensor:
        q_BHQE = self._split(self.query(x_BQD))
        scores_BHQC = q_BHQE @ pair[0].mT * q_BHQE.shape[-1] ** -0.5
        if bias is not None:
            scores_BHQC = scores_BHQC + bias
        return self.out((scores_BHQC.softmax(-1) @ pair[1]).transpose(-3, -2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class Mlp(nn.Module):
    """Two matmuls around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Cross-attention to the context, self-attention, feed-forward."""

    def __init__(self, width: int, heads: int, sees_others: bool = True) -> None:
        super().__init__()
        self.cross_norm, self.context_norm, self.mlp_norm = LayerNorm(width), LayerNorm(width), LayerNorm(width)
        self.cross, self.mlp = Attention(width, heads), Mlp(width)
        self.self_norm, self.others = (LayerNorm(width), Attention(width, heads)) if sees_others else (None, None)

    def context(self, rows_BCD: Tensor) -> KeysValues:
        """Keys and values of a context; computed once for what is constant over the steps."""
        return self.cross.keys_values(self.context_norm(rows_BCD))

    def forward(self, x_BQD: Tensor, context: KeysValues, bias: Tensor | None, self_bias: Tensor | None) -> Tensor:
        x_BQD = x_BQD + self.cross(self.cross_norm(x_BQD), context, bias)
        if self.self_norm is not None and self.others is not None:
            normed_BQD = self.self_norm(x_BQD)
            x_BQD = x_BQD + self.others(normed_BQD, self.others.keys_values(normed_BQD), self_bias)
        return x_BQD + self.mlp(self.mlp_norm(x_BQD))


class Decoder(nn.Module):
    """Queries, one per output position, read the latents; the head gives logits. There is no feedback to the latents."""

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        shape = config.output
        num_layers = shape.layers if config.target_stream != "only" else 0
        self.layers = module_list(Block(config.width, config.heads, shape.self_attn) for _ in range(num_layers))
        self.norm = LayerNorm(config.width)
        self.head = None if shape.tied else nn.Linear(config.width, vocab, bias=False)
        if self.head is not None:
            declare(self.head.weight, "head")

    def forward(self, query_MD: Tensor, rows_BCD: Tensor, bias: Tensor | None, embed_VD: Tensor) -> Tensor:
        x_BMD = query_MD
        for layer in self.layers:
            x_BMD = layer(x_BMD, layer.context(rows_BCD), bias, None)
        return self.logits(x_BMD, embed_VD)

    def logits(self, x_BMD: Tensor, embed_VD: Tensor) -> Tensor:
        return F.linear(self.norm(x_BMD), embed_VD if self.head is None else self.head.weight)


class Start(nn.Module):
    """The initial state: learned vectors and strong noise. More latents never change the noise of the first ones."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.latent = declare(nn.Parameter(torch.empty(rows, width)), "embed")

    def forward(self, index_B: Tensor, setting: BatchSettings, num_latents: int) -> Tensor:
        rows, width = self.latent.shape
        key_B = rng.keys(setting.seed, index_B, NOISE + setting.stream)
        noise_BKD = rng.normal(key_B, num_latents * width).unflatten(-1, (num_latents, width)).to(self.latent.dtype)
        # Beyond the learned vectors they repeat: no latent starts from an untrained row.
        rows_K = torch.arange(num_latents, device=index_B.device) % rows
        return self.latent[rows_K] + setting.sigma.to(self.latent.dtype) * noise_BKD


class States(NamedTuple):
    """The states at the output steps, with memory and target stream where present; position encodings of the outputs."""

    state_SBKD: Tensor
    memory_SBWKD: Tensor | None
    stream_SBMD: Tensor | None
    position_MD: Tensor


class Thinker(nn.Module):
    """The whole model. `forward` is a pure function of tokens, counters and one batch's settings."""

    def __init__(self, config: ModelConfig, sizes: Sizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes
        width, program = config.width, config.parsed_program()
        # No memory without a row that looks it up. Weights do not depend on it, so runs with different programs can be stacked.
        self.num_memory = config.n_memory if program is None or program.uses(LOOKUP) else 0
        self.embed = nn.Embedding(sizes.vocab, width)
        # Called `places` in checkpoints.
        self.places = PositionEncoding(config, max(sizes.num_in, sizes.num_out))
        self.start = Start(config.latents.high if config.latent_init == "indexed" else 1, width)
        self.null = declare(nn.Parameter(torch.empty(1, width)), "scalar")
        # The initial value of every query; with target_stream=only there are no queries.
        self.ask = declare(nn.Parameter(torch.empty(1, width)), "scalar") if config.target_stream != "only" else None
        static = config.static_memory
        self.static = declare(nn.Parameter(torch.empty(static, width)), "embed") if static else None
        self.cell = module_list(Block(width, config.heads) for _ in range(config.blocks))
        self.decoder = Decoder(config, sizes.vocab)

    def init_weights(self, generator: torch.Generator) -> None:
        """Every matrix keeps the variance of its input; all values follow from the generator."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                normal_(module.weight, module.in_features**-0.5, generator)
            elif isinstance(module, nn.Embedding):
                normal_(module.weight, 1.0, generator)
        if self.decoder.head is not None:
            normal_(self.decoder.head.weight, 0.1 * self.config.width**-0.5, generator)
        for param in (self.start.latent, self.null, self.ask, self.static):
            if param is not None:
                normal_(param, 0.5, generator)
        self.places.init_weights(generator)

    # ---- training ----------------------------------------------------------------------------------------------------

    def forward(
        self, batch: dict[str, Tensor], setting: BatchSettings, num_latents: int, num_steps: int, output_steps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """The loss, weighted over `output_steps`, and 1 or 0 per target: right at the last step with a weight."""
        streams = self.logits(batch, setting, num_latents, num_steps, output_steps)
        weight_S, logits_SBMV = select_rows(setting.weight_T, output_steps), streams[-1]
        loss = torch.stack([self.score(one_SBMV, batch, weight_S) for one_SBMV in streams]).sum()
        # The last step with a weight, selected by arithmetic: it may differ within a pack.
        at_S = torch.arange(1, len(output_steps) + 1, device=weight_S.device) * (weight_S > 0)
        last_S = (at_S == at_S.max()).to(weight_S.dtype)
        right_SBM = (logits_SBMV.detach().argmax(-1) == batch["y"]).to(weight_S.dtype)
        return loss, torch.einsum("s,sbm->bm", last_S, right_SBM)

    def logits(
        self, batch: dict[str, Tensor], setting: BatchSettings, num_latents: int, num_steps: int, output_steps: tuple[int, ...]
    ) -> list[Tensor]:
        """(S, B, M, V) of the target stream, where there is one, and of the queries, where there are any."""
        states = self.unroll(batch, setting, num_latents, num_steps, output_steps)
        found = []
        if states.stream_SBMD is not None:
            found.append(self.decoder.logits(states.stream_SBMD, self.embed.weight))
        if self.config.target_stream != "only":
            found.append(self.decode(states, setting, output_steps))
        return found

    @staticmethod
    def score(logits_SBMV: Tensor, batch: dict[str, Tensor], weight_S: Tensor) -> Tensor:
        """Cross-entropy averaged over the targets with a loss, then over the steps by their weights."""
        y_SBM1 = batch["y"].expand(logits_SBMV.shape[:-1])[..., None]
        nats_SBM = logits_SBMV.logsumexp(-1) - logits_SBMV.gather(-1, y_SBM1)[..., 0]
        learn_BM = batch["learn"].to(nats_SBM.dtype)
        nats_S = (nats_SBM * learn_BM).sum((-2, -1)) / learn_BM.sum().clamp_min(1.0)
        return (nats_S * weight_S.to(nats_S.dtype)).sum()

    # ---- the parts ---------------------------------------------------------------------------------------------------

    def unroll(
        self, batch: dict[str, Tensor], setting: BatchSettings, num_latents: int, num_steps: int, keep: tuple[int, ...]
    ) -> States:
        """Take `num_steps` steps and keep the states after those in `keep`, counted from 0."""
        z_BKD = self.start(batch["index"], setting, num_latents)
        sizes = batch["x"].shape[-1], batch["y"].shape[-1]
        by_ends = self.config.positions.kind in BY_ENDS
        if by_ends:
            places = self.places.from_ends(batch["x"] != self.sizes.pad, batch["learn"], batch["index"], setting)
        else:
            places = self.places(*sizes, batch["index"], setting)
        position_ND, position_MD = (p.to(self.null.dtype) for p in places)
        if self.config.latent_init == "positional":
            # More latents than positions repeat from the first; their number changes no position. Counted from both ends, input
            # and output positions differ, and latents take those of the input.
            tape = position_ND if by_ends or sizes[0] >= sizes[1] else position_MD
            z_BKD = z_BKD + tape[..., torch.arange(num_latents, device=z_BKD.device) % tape.shape[-2], :]
        fixed, pad_B11C = self._read(batch["x"], position_ND, num_latents)
        source_TC = self._sources(setting, num_latents, pad_B11C.shape[-1])
        self_bias = self._live_bias(setting, num_latents)
        memory = z_BKD.new_zeros(len(z_BKD), self.num_memory, num_latents, z_BKD.shape[-1]) if self.num_memory else None
        h_BMD = self._targets(batch["y"]) + position_MD if self.config.target_stream != "off" else None
        kept: tuple[list[Tensor], ...] = ([], [], [])
        for t in range(num_steps):
            with torch.set_grad_enabled(torch.is_grad_enabled() and t >= setting.first):
                if setting.perturb is not None and self.training:
                    z_BKD = self._perturb(z_BKD, batch["index"], setting, t)
                context = fixed if memory is None else self._extended(fixed, memory.flatten(-3, -2))
                bias_B11C = pad_B11C + source_TC[t]
                z_BKD = self._step(z_BKD, context, bias_B11C, self_bias)
                memory = self.write(memory, z_BKD, setting.program_T5[t, WRITE])
                if h_BMD is not None:
                    h_BMD = self._flow(h_BMD, z_BKD, context, bias_B11C, self_bias)
                if setting.cut is not None or t + 1 == setting.first:
                    here = None if setting.cut is None else setting.cut == t + 1
                    z_BKD = _cut_gradient(z_BKD, here)
                    memory = None if memory is None else _cut_gradient(memory, here)
                    h_BMD = None if h_BMD is None else _cut_gradient(h_BMD, here)
            if t in keep:
                for history, x in zip(kept, (z_BKD, memory, h_BMD), strict=True):
                    history.extend([] if x is None else [x])
        states, memories, streams = (torch.stack(history) if history else None for history in kept)
        assert states is not None, "no step is kept"
        return States(states, memories, streams, position_MD)

    def decode(self, states: States, setting: BatchSettings, output_steps: tuple[int, ...]) -> Tensor:
        """Logits of every output position at `output_steps`, in one pass."""
        rows_SBCD, num_latents = states.state_SBKD, states.state_SBKD.shape[-2]
        bias = self._live_bias(setting, num_latents)
        if states.memory_SBWKD is not None:
            shown_TC = self._memory_bias(setting, num_latents, after_write=True)
            shown_S111C = select_rows(shown_TC, output_steps)[:, None, None, None, :]
            latent_K = rows_SBCD.new_zeros(num_latents) if bias is None else bias
            bias = torch.cat((latent_K.expand(*shown_S111C.shape[:-1], -1), shown_S111C), -1)
            rows_SBCD = torch.cat((rows_SBCD, states.memory_SBWKD.flatten(-3, -2)), -2)
        assert self.ask is not None, "a thinker with target_stream=only has no queries"
        return self.decoder(self.ask + states.position_MD, rows_SBCD, bias, self.embed.weight)

    def _tokens(self, token_BN: Tensor) -> Tensor:
        """Embeddings by a product: at these sizes as fast as a lookup, and its gradient is summed in one order everywhere."""
        hot_BNV = token_BN[..., None] == torch.arange(self.sizes.vocab, device=token_BN.device)
        return hot_BNV.to(self.embed.weight.dtype) @ self.embed.weight

    def _read(self, x_BN: Tensor, position_ND: Tensor, num_latents: int) -> tuple[list[KeysValues], Tensor]:
        """Keys and values of null token, input and static memory for every block, and the mask of the padding."""
        parts = [self.null.expand(len(x_BN), -1, -1), self._tokens(x_BN) + position_ND]
        if self.static is not None:
            parts.append(self.static.expand(len(x_BN), -1, -1))
        rows_BCD = torch.cat(parts, -2)
        after = rows_BCD.shape[-2] - 1 - x_BN.shape[-1] + self.num_memory * num_latents
        pad_BC = F.pad((HIDDEN * (x_BN == self.sizes.pad)).to(rows_BCD.dtype), (1, after))
        return [block.context(rows_BCD) for block in self.cell], pad_BC[:, None, None, :]

    def _sources(self, setting: BatchSettings, num_latents: int, num_rows: int) -> Tensor:
        """The mask, at every step, of sources that its row of the program leaves out. The null token is always visible."""
        program_T5 = setting.program_T5.to(self.null.dtype)
        num_static = 0 if self.static is None else len(self.static)
        num_in = num_rows - 1 - num_static - self.num_memory * num_latents
        hidden_T5 = (1.0 - program_T5) * HIDDEN
        columns = [torch.zeros_like(program_T5[:, :1]), hidden_T5[:, READ, None].expand(-1, num_in)]
        if num_static:
            columns.append(hidden_T5[:, STATIC, None].expand(-1, num_static))
        if self.num_memory:
            columns.append(self._memory_bias(setting, num_latents, after_write=False))
        return torch.cat(columns, -1)

    def _memory_bias(self, setting: BatchSettings, num_latents: int, after_write: bool) -> Tensor:
        """The mask of memory that is not looked up, not yet written, beyond what this run keeps, or of latents not alive."""
        program_T5, num_slots = setting.program_T5, self.num_memory
        written_T = program_T5[:, WRITE].cumsum(0) - (0.0 if after_write else program_T5[:, WRITE])
        if setting.memory is not None:
            written_T = torch.minimum(written_T, setting.memory.to(written_T.dtype))
        age_W = torch.arange(num_slots, 0, -1, device=program_T5.device)
        seen_TW = (age_W <= written_T[:, None]) & (program_T5[:, LOOKUP, None] > 0)
        bias_TWK = (HIDDEN * ~seen_TW).to(self.null.dtype)[..., None].expand(-1, -1, num_latents)
        live_K = self._live_bias(setting, num_latents)
        return (bias_TWK if live_K is None else bias_TWK + live_K).flatten(-2)

    def _live_bias(self, setting: BatchSettings, num_latents: int) -> Tensor | None:
        """The mask of latents that are computed and not alive."""
        if setting.latents is None:
            return None
        return HIDDEN * (torch.arange(num_latents, device=self.null.device) >= setting.latents).to(self.null.dtype)

    def _extended(self, pairs: list[KeysValues], rows_BCD: Tensor) -> list[KeysValues]:
        """Every block's keys and values with those of further rows."""
        further = (block.context(rows_BCD) for block in self.cell)
        return [(torch.cat((k, k2), -2), torch.cat((v, v2), -2)) for (k, v), (k2, v2) in zip(pairs, further, strict=True)]

    def _step(self, x_BQD: Tensor, contexts: list[KeysValues], bias: Tensor, self_bias: Tensor | None) -> Tensor:
        for block, context in zip(self.cell, contexts, strict=True):
            x_BQD = block(x_BQD, context, bias, self_bias)
        return rms_norm(x_BQD) if self.config.state_norm else x_BQD

    def write(self, memory_BWKD: Tensor | None, z_BKD: Tensor, on: Tensor) -> Tensor | None:
        """The memory with the state as its newest entry, in new storage; the oldest is dropped."""
        if memory_BWKD is None:
            return None
        return torch.where(on > 0, torch.cat((memory_BWKD[:, 1:], z_BKD[:, None]), 1), memory_BWKD)

    def _perturb(self, z_BKD: Tensor, index_B: Tensor, setting: BatchSettings, t: int) -> Tensor:
        """Replace some latents by normal draws with the mean and standard deviation of all live ones."""
        num, width = z_BKD.shape[-2:]
        live_K = torch.ones(num, device=z_BKD.device, dtype=z_BKD.dtype)
        if setting.latents is not None:
            live_K = (torch.arange(num, device=z_BKD.device) < setting.latents).to(z_BKD.dtype)
        share_K1 = (live_K / live_K.sum())[:, None]
        mean_B1D = (z_BKD * share_K1).sum(-2, keepdim=True)
        std_B1D = (((z_BKD - mean_B1D) ** 2) * share_K1).sum(-2, keepdim=True).clamp_min(1e-12).sqrt()
        coin_BK1 = rng.uniform(rng.keys(setting.seed, index_B, PERTURB + 2 * t), num)[..., None]
        noise_BKD = rng.normal(rng.keys(setting.seed, index_B, PERTURB + 2 * t + 1), num * width).unflatten(-1, (num, width))
        assert setting.perturb is not None
        return torch.where(coin_BK1 < setting.perturb, mean_B1D + std_B1D * noise_BKD.to(z_BKD.dtype), z_BKD)

    # ---- the stream of targets ---------------------------------------------------------------------------------------

    def _targets(self, y_BM: Tensor) -> Tensor:
        """Targets as inputs of the stream: shifted by one after BOS, so that no position sees its own answer."""
        return self._tokens(torch.cat((torch.full_like(y_BM[:, :1], self.sizes.bos), y_BM[:, :-1]), 1))

    def _flow(self, h_BMD: Tensor, z_BKD: Tensor, contexts: list[KeysValues], bias_B11C: Tensor, live_K: Tensor | None) -> Tensor:
        """One step of the stream through the same blocks: causal self-attention, with access to context and latents."""
        num = h_BMD.shape[-2]
        latent_K = z_BKD.new_zeros(z_BKD.shape[-2]) if live_K is None else live_K
        bias_B11C = torch.cat((bias_B11C, latent_K.expand(*bias_B11C.shape[:-1], -1)), -1)
        causal_MM = torch.full((num, num), HIDDEN, dtype=h_BMD.dtype, device=h_BMD.device).triu(1)
        return self._step(h_BMD, self._extended(contexts, z_BKD), bias_B11C, causal_MM)


def _cut_gradient(x: Tensor, here: Tensor | None) -> Tensor:
    """Gradients stop, or only where `here` is true, without a host sync."""
    return stop_gradient(x) if here is None else torch.where(here, stop_gradient(x), x)


def select_rows(x_T: Tensor, steps: tuple[int, ...]) -> Tensor:
    """Some rows. Not indexed by a list: that would be copied from the host, which capture forbids."""
    return x_T if len(steps) == len(x_T) else torch.stack([x_T[t] for t in steps])


def sinusoids(position_L: Tensor, width: int, longest: float = LONGEST_WAVE) -> Tensor:
    """Sines and cosines of positions at width / 2 wavelengths, from 2 pi up to `longest` times as long."""
    rate_F = torch.exp(torch.arange(width // 2, device=position_L.device) * (-2.0 * math.log(longest) / width))
    angle_LF = position_L[..., None].to(torch.float32) * rate_F
    return torch.cat((angle_LF.sin(), angle_LF.cos()), -1)


class PositionEncoding(nn.Module):
    """A vector for every position, shared by input and output sequences."""

    def __init__(self, config: ModelConfig, num_needed: int) -> None:
        super().__init__()
        shape = config.positions
        self.kind, self.width, self.max = shape.kind, config.width, shape.max
        if shape.kind in ("learned", "random_sorted") and shape.max and shape.max < num_needed:
            raise UserError(f"model.positions.max={shape.max} is below the {num_needed} positions that the task needs")
        size = shape.max or num_needed
        self.table = declare(nn.Parameter(torch.empty(size, config.width)), "embed") if shape.kind == "learned" else None

    def init_weights(self, generator: torch.Generator) -> None:
        if self.table is not None:
            normal_(self.table, 1.0, generator)

    def forward(self, num_in: int, num_out: int, index_B: Tensor, setting: BatchSettings) -> tuple[Tensor, Tensor]:
        """Vectors of input and output positions: the same for all samples (L, D), or drawn for each (B, L, D)."""
        num = max(num_in, num_out)
        if self.table is None:
            both_LD = sinusoids(self.drawn(num, index_B, setting), self.width)
        elif num > len(self.table):
            raise UserError(f"{num} positions, {len(self.table)} learned; longer inputs need model.positions.kind=sin")
        else:
            both_LD = self.table
        return both_LD[..., :num_in, :], both_LD[..., :num_out, :]

    def from_ends(self, is_in_BN: Tensor, is_out_BM: Tensor, index_B: Tensor, setting: BatchSettings) -> tuple[Tensor, Tensor]:
        """Vectors of input and output positions of each sample (B, L, D): halves count from the first and from the last token."""
        counts = self.counted(is_in_BN, is_out_BM, index_B, setting)
        found = [sinusoids(count_BL2, self.width // 2, LONGEST_OF_ENDS).flatten(-2) for count_BL2 in counts]
        return found[0], found[1]

    def counted(self, is_in_BN: Tensor, is_out_BM: Tensor, index_B: Tensor, setting: BatchSettings) -> list[Tensor]:
        """The distance of each token from the first and from the last one (B, L, 2), for inputs and outputs.

        Strides are drawn so that the longer sequence ends between its own length and `max`: training then covers the positions,
        distances and sums that longer samples need. A match of two counts holds at every length.
        """
        most_B1 = torch.maximum(is_in_BN.sum(-1), is_out_BM.sum(-1)).clamp_min(1)[:, None]
        u_B2 = rng.uniform(rng.keys(setting.seed, index_B, POSITIONS + setting.stream), 2)
        stride_B1 = (self.max / most_B1).clamp_min(1.0) ** u_B2[:, :1]
        first_B1 = (self.max - most_B1 * stride_B1).clamp_min(0.0) * u_B2[:, 1:] * (self.kind == "ends_shifted")
        found = []
        for is_used_BL in (is_in_BN, is_out_BM):
            ahead_BL = torch.arange(1, is_used_BL.shape[-1] + 1, device=index_B.device).expand(is_used_BL.shape)
            back_BL = is_used_BL.sum(-1, keepdim=True) + 1 - ahead_BL
            found.append(first_B1[..., None] + stride_B1[..., None] * torch.stack((ahead_BL, back_BL), -1))
        return found

    def drawn(self, num: int, index_B: Tensor, setting: BatchSettings) -> Tensor:
        """The positions, increasing. Random ones follow from the sample's counter, and a training batch shares them."""
        count_L = torch.arange(num, device=index_B.device)
        if self.kind == "sin":
            return count_L
        key_B = rng.keys(setting.seed, index_B // setting.group, POSITIONS + setting.stream)
        if self.kind == "random_affine":
            u_B2 = rng.uniform(key_B, 2)
            return count_L * MAX_SCALE ** (2.0 * u_B2[..., :1] - 1.0) + u_B2[..., 1:] * self.max
        if num > self.max:
            raise UserError(f"{num} positions cannot be drawn from model.positions.max={self.max}; raise it")
        # The positions with the smallest random numbers: a draw without replacement.
        return rng.bits(key_B, self.max).argsort(-1)[..., :num].sort(-1).values
