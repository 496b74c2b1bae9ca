"""What packing does to a corpus, in numbers and pictures: reports of datasets, views of single sequences."""

from .report import Report, make_report, megatron_order
from .view import SequenceView, view_sequence

__all__ = ["Report", "SequenceView", "make_report", "megatron_order", "view_sequence"]
