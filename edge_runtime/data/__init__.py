"""A device's own data: read in place, checked against the model, converted by batches. It never leaves the device."""

from edge_runtime.data.augment import Augmentation, parse_augmentation
from edge_runtime.data.load import load_samples
from edge_runtime.data.prng import shuffled
from edge_runtime.data.samples import Samples, TrainingSamples, check_trainable, from_arrays

__all__ = [
    "Augmentation",
    "Samples",
    "TrainingSamples",
    "check_trainable",
    "from_arrays",
    "load_samples",
    "parse_augmentation",
    "shuffled",
]
