"""Flower under the same load as embrace: a comparison for development, part of a clone and not of the wheel."""
