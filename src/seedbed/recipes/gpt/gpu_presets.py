"""Presets of the gpt recipe for one GPU: small data, early models, GPT-2 and GPT-3 sizes. No torch import."""

from dataclasses import replace

from seedbed.config import Config, Every, Optim, Schedule
from seedbed.data.corpus import TextConfig
from seedbed.recipes.gpt.presets import ModelConfig


def shakespeare() -> Config:
    """tiny-shakespeare in half a minute of one GPU: small data, many epochs, strong regularisation."""
    return Config(
        model=ModelConfig(
            depth=6, heads=6, width=384, dropout=0.35, out_init=0.3, skips=True, gate=True, values_x0=True, drop_path=0.1
        ),
        data=TextConfig(text="tinyshakespeare.txt", tokenizer="char", block=256),
        optim=Optim(kind="muon", lr=4e-3, muon_lr=1e-2, weight_decay=0.1, muon_weight_decay=0.5, clip=0.0),
        schedule=Schedule(kind="linear", warmup=0.02, decay=0.7, floor=0.0),
        every=Every(log=50, eval=500, sample=0, save=0),
        steps=5000,
        budget=30.0,
        batch=64,
        ema=0.995,
        precision="bf16",
        compile="whole",
    )


def shakespeare_long() -> Config:
    """tiny-shakespeare with twice the time, regularised harder."""
    base = shakespeare()
    return replace(base, model=replace(base.model, dropout=0.4), steps=10_000, budget=60.0, ema=0.998)


def nanogpt_shakespeare() -> Config:
    """nanoGPT's shakespeare_char, architecture and settings, on this loop: for like-for-like comparison.

    10.7 M parameters. The whole validation part is scored, where nanoGPT estimates by random batches.
    """
    model = _gpt2(ModelConfig(depth=6, heads=6, width=384, dropout=0.2))
    data = TextConfig(text="tinyshakespeare.txt", tokenizer="char", block=256, mode="random")
    optim = Optim(lr=1e-3, beta2=0.99, weight_decay=0.1, clip=1.0)
    return replace(_on_gpu(model, data, optim), every=Every(log=50, eval=250, sample=0, save=1000), steps=5000)


def mini_v0() -> Config:
    """gpt_mini_v0, an early model of this project, unchanged: 10 layers, 75 characters, batch 128, constant lr 0.001.

    31.5 M parameters. Characters outside the fixed table of 75 become one unknown id. The original ran one epoch:
    steps = blocks / 128, both printed by `train -v`.
    """
    model = ModelConfig(depth=10, heads=8, width=512, mlp="gelu", dropout=0.2)
    data = TextConfig(text="stdlib", tokenizer="char75", block=256, valid=0.1, unknown="unk")
    base = _on_gpu(model, data, Optim(lr=1e-3))
    return replace(base, schedule=Schedule(kind="constant", warmup=0.0), steps=1000, batch=128)


def mini_v1() -> Config:
    """mini-v0 with a batch that fills the memory of the card."""
    return replace(mini_v0(), batch=512)


def baby() -> Config:
    """A 10.7 M character model, a common first size.

    The original's rate was ignored for a misspelt key; here it is 1e-3, with warm-up and a cosine to a tenth.
    """
    model = ModelConfig(depth=6, heads=6, width=384, dropout=0.2)
    return _on_gpu(model, TextConfig(text="reference", tokenizer="char", block=256), Optim(lr=1e-3, beta2=0.99))


def gpt3_small() -> Config:
    """GPT-3's smallest size on byte-level BPE, with its schedule: 12 layers, 768 wide, 2048 tokens of context.

    124 M parameters with a vocabulary of 50,257 and a tied head, for a card with 80 GB or more.
    """
    data = TextConfig(text="stdlib", tokenizer="bpe", vocab=50_257, block=2048, valid=0.05)
    optim = Optim(lr=6e-4, beta2=0.95, weight_decay=0.1, clip=1.0)
    return replace(_on_gpu(ModelConfig(depth=12, heads=12, width=768), data, optim, log=10), accum=16)


def gpt3_small_char() -> Config:
    """gpt3-small on 75 characters: 85 M parameters; the difference is the vocabulary."""
    base = gpt3_small()
    return replace(base, data=replace(base.data, tokenizer="char75", unknown="unk", vocab=TextConfig.vocab))


def gpt2_124m() -> Config:
    """GPT-2's 124 M size for speed: 64 blocks of 1024 tokens a step, on random tokens unless data.text names a file.

    Positions as GPT-2 has them; `model.positions=rope model.qk_norm=true` is what the other presets do.
    """
    model = ModelConfig(depth=12, heads=12, width=768, mlp="relu2", positions="learned", qk_norm=False)
    data = TextConfig(text="random:20_000_000:50304", block=1024, valid=0.01)
    base = _on_gpu(model, data, Optim(lr=6e-4, beta2=0.95, weight_decay=0.1, clip=1.0))
    return replace(base, every=Every(log=10, eval=0, sample=0, save=0), steps=200, compile="whole")


def nanogpt_124m() -> Config:
    """gpt2-124m in GPT-2's own architecture, as nanoGPT trains it: the like-for-like row of the speed table."""
    base = gpt2_124m()
    return replace(base, model=_gpt2(base.model))


def code() -> Config:
    """Python source: byte-level BPE trained on the standard library, a real BPE corpus on every machine.

    27 M parameters.
    """
    model = ModelConfig(depth=8, heads=8, width=512, dropout=0.1)
    data = TextConfig(text="stdlib", tokenizer="bpe", vocab=4096, block=512, valid=0.05)
    base = _on_gpu(model, data, Optim(kind="muon", lr=2e-3, muon_lr=5e-3))
    return replace(base, schedule=Schedule(kind="linear", warmup=0.02, decay=0.7, floor=0.0))


def llama() -> Config:
    """Llama's architecture on Python source, for `seedbed export RUN --to hf` and `--to gguf`.

    29 M parameters. Size and rates are those of gpt/code.
    """
    base = code()
    return replace(base, model=replace(base.model, qk_norm=False, tied=False, dropout=0.0))


def _gpt2(shape: ModelConfig) -> ModelConfig:
    """The same size in GPT-2's own architecture: layer norms, learned positions, GELU."""
    return replace(shape, norm="layer", positions="learned", mlp="gelu", qk_norm=False, out_init=(2 * shape.depth) ** -0.5)


def _on_gpu(model: ModelConfig, data: TextConfig, optim: Optim, log: int = 20) -> Config:
    """GPT-3's schedule, 2,000 steps of 64 blocks."""
    return Config(
        model=model,
        data=data,
        optim=optim,
        schedule=Schedule(kind="cosine", warmup=0.02, floor=0.1),
        every=Every(log=log, eval=250, sample=250, save=250),
        steps=2000,
        batch=64,
        precision="bf16",
        compile="blocks",
    )
