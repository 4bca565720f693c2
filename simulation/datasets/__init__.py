"""Read the data sets of the papers where they lie, and divide them among devices."""

from simulation.datasets.dataset import Dataset
from simulation.datasets.load import DATASETS, load_dataset
from simulation.partitioners import PARTITIONERS, Partitioner, label_counts, make_partitioner

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "Dataset",
    "Partitioner",
    "label_counts",
    "load_dataset",
    "make_partitioner",
]
