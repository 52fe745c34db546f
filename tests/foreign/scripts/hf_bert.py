"""BERT of transformers for classification, with the collator that pads."""

import torch
from hf_common import sentences, tokenizer
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding


def make(seed=0):
    torch.manual_seed(seed)
    words = tokenizer()
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, num_labels=2, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    items = []
    for text in sentences(160, seed):
        item = words(f"<cls> {text}", return_token_type_ids=False)
        items.append({**item, "label": int("sleeps" in text)})
    collate = DataCollatorWithPadding(words, padding="max_length", max_length=13)

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            outputs = [model(**batch) for batch in DataLoader(items[:32], batch_size=8, collate_fn=collate)]
        model.train()
        return {"loss": sum(output.loss.item() for output in outputs) / len(outputs)}

    return {
        "model": model,
        "batches": DataLoader(items, batch_size=16, shuffle=True, collate_fn=collate),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "evaluate": evaluate,
    }
