"""Private parts of PyTorch that chunkc uses, one module per subject.

Each was checked on the versions in `versions.CHECKED`; a comment marks names that only some versions have. Names that
are the same in all versions are re-exported. Differences are detected by feature (`hasattr`, a signature) and not by
version number, so that a newer PyTorch takes the right branch unless it has changed again.

Raises:
    ImportError: this PyTorch lacks one of the names, so nothing of chunkc can be trusted; says which one to install.
"""

from __future__ import annotations

from chunkc.torch_private.versions import lacks

try:
    from chunkc.torch_private import aot, cuda_allocator, dynamo, engine, fake, grad_scaler, inductor, sizes, wrappers
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

__all__ = ["aot", "cuda_allocator", "dynamo", "engine", "fake", "grad_scaler", "inductor", "sizes", "wrappers"]
