"""What preprocessing jobs write: datasets in a test's folder, and the names in a folder."""

NUM_DOCUMENTS = 3000
"""Of the fixture ``corpus``."""


def dataset_bytes(tmp_path, output="out"):
    return [(tmp_path / f"{output}_text_document.{kind}").read_bytes() for kind in ("bin", "idx")]


def names(folder):
    return sorted(path.name for path in folder.iterdir())
