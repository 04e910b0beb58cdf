"""Models that benchmarks train, and text to train them on."""
