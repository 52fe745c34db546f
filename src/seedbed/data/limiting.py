"""Data limited to its first items (`limit.train`, `limit.valid`, `limit.test`)."""

import copy
from typing import Any

import numpy as np

from seedbed.config import Limit
from seedbed.data.feed import Data, Source
from seedbed.errors import UserError


def limited(data: Data, limit: Limit) -> Data:
    if limit == Limit():
        return data
    if limit.test and data.test is None:
        raise UserError(f"limit.test={limit.test}: this recipe's data has no test split; evaluations use limit.valid")
    part = copy.copy(data)
    part.train = data.train.first(limit.train) if limit.train else data.train
    part.valid = data.valid.first(limit.valid) if limit.valid else data.valid
    part.test = data.test.first(limit.test) if data.test and limit.test else data.test
    part.facts = {**data.facts, "limit": {"train": limit.train, "valid": limit.valid, "test": limit.test}}
    return part


def first_items(source: Source, num: int) -> Source:
    part: Any = copy.copy(source)
    if not source.arrays:
        part.batch = lambda raw: source.batch({**raw, "index": raw["index"] % num})
        return part
    part.num_items = min(num, source.num_items)
    index_N = np.arange(part.num_items)
    rows = [source.locate(np.full_like(index_N, epoch), index_N) for epoch in range(2)]
    if np.array_equal(rows[0], rows[1]):  # else later epochs need other rows
        end = int(rows[0].max())
        part.arrays = {name: array[: end + max(1, source.spans[name])] for name, array in source.arrays.items()}
    return part
