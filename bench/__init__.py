"""Measurements: what a step costs, what it needs, and the pictures of both."""
