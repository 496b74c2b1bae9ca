"""``--json``: one JSON object on standard output and nothing else there. Progress and errors go to standard error.

Keys are stable: new ones may come, those that exist keep their names and meanings.
"""

import json
from typing import Any

from ..console import say
from ..indexed_dataset.reader import IndexedDataset
from ..sequence_index.reader import SequenceIndex

KEYS_OF_DATASET = """\
  datasets: an object for each PREFIX, in the order given
    prefix, documents, tokens, dtype
    indexes: an object for each index
      path, name, seq_length, max_documents_per_sequence (null: no limit),
      even_sequences, targets_only (true or false),
      first_document, end_document (exclusive),
      documents, empty_documents, tokens, sequences, padding (positions),
      one_token_documents (with targets only; they are in no sequence),
      fim_rate, fim_seed (null without fill-in-the-middle), with it also
      fim_documents (rearranged), fim_too_long_documents (no room for it)"""
"""For the help of verbs whose objects are made of ``dataset_entry`` and ``index_entry``."""


def say_json(content: dict[str, Any]) -> None:
    """Print the object.

    Raises:
        BFPError: it cannot be written, as where the disk is full.
    """
    say(json.dumps(content, indent=2))


def dataset_entry(dataset: IndexedDataset) -> dict[str, Any]:
    """A dataset's size."""
    return {
        "prefix": dataset.prefix,
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "dtype": str(dataset.dtype),
    }


def index_entry(index: SequenceIndex) -> dict[str, Any]:
    """What an index is for, and its counts."""
    key, names = index.key, ["documents", "empty_documents", "tokens", "sequences", "padding"]
    names += ["one_token_documents"] if key.targets_only else []
    names += ["fim_documents", "fim_too_long_documents"] if key.fim else []
    return {
        "path": index.path,
        "name": key.name,
        "seq_length": key.seq_length,
        "max_documents_per_sequence": key.max_documents_per_sequence,
        "even_sequences": key.even_sequences,
        "targets_only": key.targets_only,
        "fim_rate": key.fim.rate if key.fim else None,
        "fim_seed": key.fim.seed if key.fim else None,
        "first_document": key.first_document,
        "end_document": key.end_document,
        **{name: index.counts[name] for name in names},
    }
