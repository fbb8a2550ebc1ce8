"""Benchmarks, one command a table: `python -m benchmarks --help`, and README.md."""
