"""A dataset just written, checked from what is on disk: its tokens, and where its documents end."""

from ..errors import IndexedDatasetError
from ..indexed_dataset.format import bin_path
from ..indexed_dataset.reader import IndexedDataset
from ..indexed_dataset.verify import verify_tokens
from ..progress import Progress, without_progress
from ..tokenizers.special_tokens import DocumentTemplate


def verify_documents(
    prefix: str,
    vocab_size: int,
    eod: int | None = None,
    progress: Progress = without_progress,
    template: DocumentTemplate | None = None,
) -> IndexedDataset:
    """Check every token of a dataset, in constant memory.

    Args:
        eod: the token that must end every document and stand nowhere else; None for none.
        template: what stands around each document, with ``eod`` at its end: documents must begin as it says, and the
            EOD may stand there, too. None for the EOD alone.

    Returns:
        The dataset, opened.

    Raises:
        IndexedDatasetError: a token is outside the vocabulary, a document does not begin in BOS or does not end in EOD,
            holds an EOD elsewhere, or the files cannot be read.
    """
    dataset = IndexedDataset(prefix)
    template = template or DocumentTemplate(after=() if eod is None else (eod,))
    num_eods = verify_tokens(dataset, vocab_size, eod, progress, template.before)
    if eod is not None and num_eods != dataset.num_documents * template.count(eod):
        raise IndexedDatasetError(
            f"{bin_path(prefix)}: holds {num_eods} EOD tokens ({eod}) in {dataset.num_documents} documents; the "
            "tokenizer makes one of a text: please report this tokenizer"
        )
    return dataset
