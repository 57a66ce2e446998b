"""Reads Arrow batches as rows: Parquet files, saved datasets and in-memory tables.

A narrow float becomes its printed decimal, 0.1 instead of 0.10000000149. A class index becomes the class name, which
`datasets` stores with the schema. Values inside lists and objects are converted too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from brorl.prompts.row import Row

if TYPE_CHECKING:
    import pyarrow as pa

_NARROW = {"float32": np.float32, "float": np.float32, "float16": np.float16, "halffloat": np.float16}
Convert = Callable[[Any], Any]


def arrow_rows(
    batches: Iterable[Any], name: str, columns: Sequence[str] | None, wanted: Collection[str] | None
) -> Iterator[Row]:
    """Yield the rows of Arrow batches, with locations that begin with `name`.

    `columns` names all columns (None: those of the batches), and `wanted` the columns to read (None: all).
    """
    number = 0
    for batch in batches:
        columns = columns or list(batch.schema.names)
        chosen = batch.select([column for column in batch.schema.names if wanted is None or column in wanted])
        if not chosen.schema.names and batch.num_rows:  # lets an error message list the columns
            yield Row(f"{name} row 1", 1, "", columns, {})
            return
        features = _features(batch.schema.metadata)
        convert = {field.name: _conversion(field.type, features.get(field.name)) for field in chosen.schema}
        for values in chosen.to_pylist():
            number += 1
            for column, function in convert.items():
                if function is not None and values[column] is not None:
                    values[column] = function(values[column])
            yield Row(f"{name} row {number}", number, "", columns, values)


def printed(value: Any, kind: str) -> Any:
    """Return a narrow float (such as `float32`), or lists of them, as printed decimals; other values unchanged."""
    narrow = _NARROW.get(kind.rpartition(".")[2].partition("[")[0].lower())  # torch.float32, float[pyarrow]
    if isinstance(value, list):
        return [printed(item, kind) for item in value]
    return value if narrow is None or not isinstance(value, float) else float(str(narrow(value)))


def _features(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """Return the features that `datasets` stored, by column; empty for other tables."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _conversion(kind: pa.DataType, feature: Any) -> Convert | None:
    """Return a function that converts values of an Arrow type, or None if they need no conversion."""
    import pyarrow as pa

    feature = feature if isinstance(feature, dict) else {}
    if feature.get("_type") == "ClassLabel" and feature.get("names"):
        names = list(feature["names"])
        return lambda value: names[value] if isinstance(value, int) and 0 <= value < len(names) else None
    if str(kind) in _NARROW:
        return lambda value: printed(value, str(kind))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _conversion(kind.value_type, feature.get("feature"))
        return inner and (lambda values: [None if value is None else inner(value) for value in values])
    if pa.types.is_struct(kind):
        lists = feature.get("feature") if feature.get("_type") == "Sequence" else None  # an object of lists
        features = {key: {"feature": item} for key, item in lists.items()} if isinstance(lists, dict) else feature
        convert_field = {field.name: _conversion(field.type, features.get(field.name)) for field in kind}
        if any(convert_field.values()):
            return lambda values: {
                key: convert(value) if (convert := convert_field.get(key)) and value is not None else value
                for key, value in values.items()
            }
    return None
