"""Speed and memory against a baseline of the same run: ``python benchmarks/NAME.py --help``."""
