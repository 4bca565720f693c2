"""Many devices on one machine: the same loop and the same algorithms as on devices, PyTorch behind them, no HTTP."""
