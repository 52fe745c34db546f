"""A word-level tokenizer made on the spot, for models of transformers."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["the", "a", "cat", "dog", "bird", "sees", "likes", "finds", "red", "small", "fish", "and", "sleeps", "runs"]


def tokenizer():
    table = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", "<cls>", *WORDS])}
    made = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", cls_token="<cls>"
    )


def sentences(num, seed):
    rng = random.Random(seed)
    made = []
    for _ in range(num):
        start = f"{rng.choice(['the', 'a'])} {rng.choice(['red', 'small', ''])} {rng.choice(['cat', 'dog', 'bird'])}"
        end = rng.choice(
            [
                "sleeps",
                "runs",
                f"sees the {rng.choice(['fish', 'dog'])}",
                f"likes a red fish and {rng.choice(['runs', 'sleeps'])}",
            ]
        )
        made.append(f"{start} {end} <eos>")
    return made
