"""The contract between server and device, and its mathematics: no I/O, no clocks, no globals."""

__version__ = "0.1.0"
