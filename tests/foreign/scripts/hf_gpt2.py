"""GPT-2 of transformers from a config, with its collator for language modelling."""

import torch
from hf_common import sentences, tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel


def make(seed=0):
    torch.manual_seed(seed)
    words = tokenizer()
    config = GPT2Config(
        vocab_size=len(words), n_positions=16, n_embd=32, n_layer=2, n_head=4,
        bos_token_id=words.eos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    items = [words(text, padding="max_length", max_length=12) for text in sentences(128, seed)]
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "model": model,
        "batches": DataLoader(items, batch_size=16, collate_fn=collate),
        "optimizer": optimizer,
        "sample": lambda model: generate(model, words),
    }


def generate(model, words):
    model.eval()
    prompt = torch.tensor([words.encode("the cat")])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=True)
    model.train()
    return made
