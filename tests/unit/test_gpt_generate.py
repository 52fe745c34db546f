"""Generation: cached equals uncached everywhere, draws follow their settings, text streams whole characters."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from _uncached import UncachedDecoder

from seedbed.data.bpe import train_bpe
from seedbed.data.tokenizers import CharTokenizer, TextStream, encode_prompt
from seedbed.errors import UserError
from seedbed.nn.decoding import Sampling, pick, window_start
from seedbed.recipes.gpt.model import CachedDecoder, build_model
from seedbed.recipes.gpt.presets import ModelConfig
from seedbed.recipes.gpt.system import GPT
from seedbed.train.text_system import TextOptions, TextSystem

VOCAB, CONTEXT = 70, 16
# Untied: a tied model that has learned nothing repeats its last token for ever.
BASE = ModelConfig(depth=4, heads=2, width=32, out_init=1.0, tied=False)
VARIANTS = {
    "base": BASE,
    "grouped": dataclasses.replace(BASE, kv_heads=1, softcap=5.0),
    "extras": dataclasses.replace(BASE, skips=True, gate=True, values_x0=True, dropout=0.3, drop_path=0.3),
    "classic": dataclasses.replace(BASE, norm="layer", positions="learned", mlp="gelu", qk_norm=False),
}
GREEDY = Sampling(temperature=0.0)


def make(name="base", context=CONTEXT):
    model = build_model(VARIANTS[name], VOCAB, context, seed=4).eval()
    with torch.no_grad():  # a fresh model's logits are nearly flat; make its choices clear, so that greedy means something
        model.head_weight.mul_(20.0)
    return model


def prompt_ids(*lengths):
    rng = torch.Generator().manual_seed(9)
    return [torch.randint(VOCAB, (n,), generator=rng).tolist() for n in lengths]


def record_logits(decoder):
    """All logits a decoder draws from, as they come."""
    seen, append = [], decoder._append
    decoder._append = lambda logits_BV: (seen.append(logits_BV.clone()), append(logits_BV))
    return seen


@torch.no_grad()
def run_both(model, prompts, num_tokens):
    outcomes = []
    for kind in (CachedDecoder, UncachedDecoder):
        decoder = kind(model, prompts, num_tokens, GREEDY, seed=1)
        logits = record_logits(decoder)
        for _ in range(num_tokens):
            decoder.advance()
        outcomes.append((torch.stack(logits), decoder.history_BN))
    return outcomes


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("lengths", [(1,), (5,), (CONTEXT,), (CONTEXT - 1, 1, 7), (3 * CONTEXT, 2, CONTEXT + 1)], ids=str)
def test_generation_cached_equals_uncached_across_refills_and_ragged_rows(name, lengths):
    (cached, tokens), (uncached, expected) = run_both(make(name), prompt_ids(*lengths), 3 * CONTEXT)
    assert (cached - uncached).abs().max() <= 1e-4
    assert torch.equal(tokens, expected)
    # The test would be empty if every token were the same.
    assert len(set(tokens[0, lengths[0] :].tolist())) > 3


def test_generation_cached_equals_uncached_over_a_long_context():
    context = 256
    (cached, tokens), (uncached, expected) = run_both(make("base", context), prompt_ids(1), context + 40)
    assert (cached - uncached).abs().max() <= 1e-4 and torch.equal(tokens, expected)


@torch.no_grad()
def test_generation_uncached_equals_forward_passes():
    model, (prompt,) = make(), prompt_ids(6)
    decoder = UncachedDecoder(model, [prompt], 5, GREEDY, seed=1)
    for _ in range(5):
        before = decoder.history_BN[:, : decoder.lengths[0]]
        decoder.advance()
        assert decoder.history_BN[0, decoder.lengths[0] - 1] == model.logits(before)[0, -1].argmax()


@torch.no_grad()
def test_generation_rows_are_independent():
    model, prompts = make("extras"), prompt_ids(9, 2, 20)
    (_, together), _ = run_both(model, prompts, 30)
    for row, prompt in enumerate(prompts):
        (_, alone), _ = run_both(model, [prompt], 30)
        assert torch.equal(together[row, : len(prompt) + 30], alone[0])


@torch.no_grad()
def test_generation_cache_holds_every_past_token_and_no_other():
    """Change a token of the prompt: what is drawn next must move, unless the token fell out of the window."""
    model, (prompt,) = make(), prompt_ids(CONTEXT)

    def next_logits(ids):
        decoder = CachedDecoder(model, [ids], 1, GREEDY, seed=1)
        seen = record_logits(decoder)
        decoder.advance()
        return seen[0]

    before = next_logits(prompt)
    for t in range(CONTEXT):
        changed = [*prompt[:t], (prompt[t] + 1) % VOCAB, *prompt[t + 1 :]]
        assert (next_logits(changed) - before).abs().max() > 1e-4, t
    long = prompt + prompt_ids(CONTEXT // 2)[0]
    assert torch.equal(next_logits(long), next_logits([(prompt[0] + 1) % VOCAB, *long[1:]]))


@torch.no_grad()
def test_generation_cache_ignores_padding_and_stale_slots():
    model, (short, long) = make(), prompt_ids(3, 12)
    decoder = CachedDecoder(model, [short, long], 4, GREEDY, seed=1)
    decoder.cache.kv_LPBHTD[:, :, 0, :, len(short) - 1 :] = 1e4  # beyond the row's length
    poisoned = record_logits(decoder)
    clean = CachedDecoder(model, [short, long], 4, GREEDY, seed=1)
    expected = record_logits(clean)
    for _ in range(4):
        decoder.advance()
        clean.advance()
    assert torch.equal(torch.stack(poisoned), torch.stack(expected))


def test_generation_window_keeps_the_last_half():
    for context in (1, 2, 3, 16, 17):
        start = 0
        for num_tokens in range(1, 5 * context):
            new = window_start(start, num_tokens, context)
            assert 1 <= num_tokens - new <= context
            assert new == start or num_tokens - new == max(1, context // 2)
            start = new
        assert window_start(0, 100 * context, context) == 100 * context - max(1, context // 2)


# ---- drawing --------------------------------------------------------------------------------------------------------


def draws(logits, sampling, num=4000, seed=0):
    tokens = pick(logits.expand(num, -1), sampling, torch.Generator().manual_seed(seed))
    return torch.bincount(tokens, minlength=len(logits)) / num


def test_sampling_follows_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(-1)
        assert (draws(logits, Sampling(temperature), 40_000) - expected).abs().max() < 0.01


def test_top_k_and_top_p_keep_the_likeliest_in_their_proportions():
    logits = torch.tensor([0.05, 0.4, 0.3, 0.05, 0.2]).log()
    for sampling, kept in [
        (Sampling(1.0, top_k=1), [1]),
        (Sampling(1.0, top_k=2), [1, 2]),
        (Sampling(1.0, top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_p=0.01), [1]),
        (Sampling(1.0, top_p=0.39), [1]),
        (Sampling(1.0, top_p=0.41), [1, 2]),
        (Sampling(1.0, top_p=0.75), [1, 2, 4]),
        (Sampling(1.0, top_p=1.0), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_k=3, top_p=0.5), [1, 2]),
    ]:
        seen = draws(logits, sampling, 20_000)
        probs = torch.zeros(5)
        probs[kept] = logits.exp()[kept]
        assert (seen - probs / probs.sum()).abs().max() < 0.02, sampling
        assert set(seen.nonzero().flatten().tolist()) == set(kept)


def test_temperature_zero_takes_the_likeliest_and_cold_draws_agree():
    logits = torch.randn(8, 50)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(pick(logits, GREEDY, generator), logits.argmax(-1))
    assert torch.equal(pick(logits, Sampling(1e-4), generator), logits.argmax(-1))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match="out of range"):
        Sampling(**wrong)


# ---- text -----------------------------------------------------------------------------------------------------------

CHARS = CharTokenizer(sorted(set("abcdefghij klmnop\n")))
BPE = train_bpe(["größe über alles: naïve café, 日本語 and 🌱🌱 seeds " * 5], 300)


class SmallSystem(GPT):
    """Of a given model; its decoder may be another one."""

    def __init__(self, model, tokenizer, decoder_type):
        TextSystem.__init__(self, None, SimpleNamespace(tokenizer=tokenizer))
        self.model, self.decoder_type = model, decoder_type

    def decoder(self, *args):
        if self.decoder_type is CachedDecoder:
            return super().decoder(*args)
        *rest, capture = args
        return self.decoder_type(self.model, *rest, capture=capture)


def generate(model, tokenizer, prompts, *, on_text=None, capture=False, decoder_type=CachedDecoder, **options):
    system, more = SmallSystem(model, tokenizer, decoder_type), {"on_text": on_text} if on_text else {}
    if not more and not capture:
        return system.complete(prompts, **options)
    given = dataclasses.asdict(dataclasses.replace(TextOptions(), **options))
    return system.generate(prompts, given, capture=capture, **more)[0]


def text_model(tokenizer):
    return build_model(dataclasses.replace(BASE, tied=True, dropout=0.5), tokenizer.vocab_size, CONTEXT, seed=2)


@pytest.mark.parametrize("tokenizer", [CHARS, BPE], ids=["char", "bpe"])
def test_streaming_pieces_join_to_the_text(tokenizer):
    model, pieces = text_model(tokenizer).train(), {0: [], 1: []}
    options = {"tokens": 60, "temperature": 2.0, "seed": 5}
    texts = generate(model, tokenizer, ["a", "ab nap"], on_text=lambda row, piece: pieces[row].append(piece), **options)
    assert ["".join(pieces[row]) for row in (0, 1)] == texts
    assert model.training, "the mode must be put back"
    assert generate(model, tokenizer, ["a", "ab nap"], **options) == texts
    assert generate(model, tokenizer, ["a", "ab nap"], **{**options, "seed": 6}) != texts
    assert generate(model, tokenizer, ["a", "ab nap"], decoder_type=UncachedDecoder, **options) == texts


def test_streaming_never_splits_characters():
    text = "größe 日本語 🌱 café"
    ids = BPE.encode(text).tolist()
    single_bytes = train_bpe(["x"], 258)
    for tokenizer in (BPE, single_bytes):
        stream, ids = TextStream(tokenizer), tokenizer.encode(text).tolist()
        shown = [stream.push([i], last=k == len(ids) - 1) for k, i in enumerate(ids)]
        assert "".join(shown) == stream.text == text
        assert "\ufffd" not in "".join(shown)


def test_streaming_agrees_with_decoding_for_any_ids():
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(BPE.vocab_size, (20,), generator=rng).tolist()
        stream = TextStream(BPE)
        for k, i in enumerate(ids):
            stream.push([i], last=k == len(ids) - 1)
        assert stream.text == BPE.decode(ids)


def test_prompt_that_is_empty_starts_a_document():
    assert encode_prompt(CHARS, "") == CHARS.encode("\n\n").tolist()
    assert encode_prompt(BPE, "") == BPE.separator.tolist()
    assert encode_prompt(CharTokenizer(["b", "a"]), "") == [0]
    assert len(generate(text_model(CHARS), CHARS, [""], tokens=3)[0]) == 3


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["a"], {"tokens": 0}, "tokens=0"),
        ([], {}, "no prompt"),
        (["a€"], {}, "not in the tokenizer's table"),
        (["a"], {"temperature": -1.0}, "temperature"),
        (["a"], {"top_p": 0.0}, "top_p"),
        (["a"], {"top_k": -3}, "top_k"),
    ],
)
def test_generation_options_out_of_range_are_refused(prompts, options, message):
    model = text_model(CHARS).train()
    with pytest.raises(UserError, match=message):
        generate(model, CHARS, prompts, **options)
    assert model.training


def test_generation_ignores_compiled_blocks():
    model, calls = text_model(CHARS), []

    def backend(graph, inputs):
        calls.append(len(inputs))
        return graph

    expected = generate(model, CHARS, ["ab"], tokens=5)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    assert generate(model, CHARS, ["ab"], tokens=5) == expected and calls == []


def test_capture_is_not_attempted_without_cuda():
    model = text_model(CHARS)
    assert "no graphs on cpu" in CachedDecoder(model, [[1]], 1, GREEDY, 1, capture=True).why_not_captured
    assert generate(model, CHARS, ["ab"], tokens=5, capture=True) == generate(model, CHARS, ["ab"], tokens=5)


@torch.no_grad()
def test_generation_in_half_precision_stays_close():
    model, (prompt,) = make(), prompt_ids(8)
    (exact, _), _ = run_both(model, [prompt], 1)
    with torch.autocast("cpu", torch.bfloat16):
        (half, _), _ = run_both(model, [prompt], 1)
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, top_k=20, top_p=0.9)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_generation_captured_equals_eager(name, sampling):
    """Across refills and ragged rows, with a generator that moves on inside the graph."""
    model, outcomes = make(name).cuda(), []
    for capture in (False, True):
        decoder = CachedDecoder(model, prompt_ids(CONTEXT - 1, 1, 7), 3 * CONTEXT, sampling, seed=3, capture=capture)
        for _ in range(3 * CONTEXT):
            decoder.advance()
        assert decoder.why_not_captured == ("" if capture else "not asked for")
        assert (decoder.graph is not None) == capture
        outcomes.append(decoder.history_BN)
    assert torch.equal(*outcomes)
