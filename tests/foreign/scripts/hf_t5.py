"""T5 of transformers learns to reverse sentences, with the collator for pairs of sequences."""

import torch
from hf_common import sentences, tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration


def make(seed=0):
    torch.manual_seed(seed)
    words = tokenizer()
    config = T5Config(
        vocab_size=len(words), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id, decoder_start_token_id=words.pad_token_id,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    items = []
    for text in sentences(128, seed):
        ids = words(text)["input_ids"]
        items.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [*reversed(ids[:-1]), ids[-1]]})
    collate = DataCollatorForSeq2Seq(words, padding="max_length", max_length=12)
    return {
        "model": model,
        "batches": DataLoader(items, batch_size=16, collate_fn=collate),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }
