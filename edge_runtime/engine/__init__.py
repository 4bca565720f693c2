"""Engines compute layer outputs, losses and gradients."""
