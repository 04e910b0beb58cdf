"""PyTorch's private parts that chunkc uses, by subject: `fake` and `sizes` (values without data), `dynamo`,
`aot` (AOTAutograd), `inductor` and `wrappers` (what it generates), `engine` (autograd's engine and other functions of
torch._C), `cuda_allocator`, `grad_scaler`, and `versions`.

Every line was checked on the versions that `versions.CHECKED` lists; what only some of them have says so. Names that
are the same in all of them are handed on as they are. What differs is told apart by what is there (`hasattr`, a
signature), so that a newer PyTorch that did not change it again goes the right way too.

A newer PyTorch may lack one of these names. Then nothing of chunkc can be trusted, and importing it is the error:

Raises:
    ImportError: this PyTorch lacks something that chunkc needs; it says which PyTorch to install.
"""

from __future__ import annotations

from chunkc.torch_private.versions import lacks

try:
    from chunkc.torch_private import aot, cuda_allocator, dynamo, engine, fake, grad_scaler, inductor, sizes, wrappers
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

__all__ = ["aot", "cuda_allocator", "dynamo", "engine", "fake", "grad_scaler", "inductor", "sizes", "wrappers"]
