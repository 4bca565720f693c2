"""Data sets of the papers, read where they lie, and how they are dealt to devices."""

from bench.data.dataset import Dataset
from bench.data.load import DATASETS, load_dataset
from bench.data.partition import PARTITIONERS, Partitioner, label_counts, make_partitioner

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "Dataset",
    "Partitioner",
    "label_counts",
    "load_dataset",
    "make_partitioner",
]
