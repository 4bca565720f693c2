"""Data sets of the papers, read where they lie, and how they are dealt to devices."""

from bench.data.dataset import Dataset
from bench.data.load import DATASETS, load_dataset

__all__ = ["DATASETS", "Dataset", "load_dataset"]
