"""Measurements behind every claim about speed, memory and accuracy. Each file is one command: ``python -m benchmarks.NAME``."""
