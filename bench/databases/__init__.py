"""PyTorch's own databases of operators, modules and optimizers, trained under chunkc: the parts of `conformance.py`."""
