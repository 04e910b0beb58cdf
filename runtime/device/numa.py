"""Place host memory on the NUMA node of the processor that a GPU is attached to.

From another node, copies also cross the link between the processors.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")

_DEFAULT, _PREFERRED = 0, 1  # MPOL_DEFAULT, MPOL_PREFERRED
_SYSTEM_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of mbind and get_mempolicy, which the C library does not have."""
_MASK_BITS = 1024
_syscall = ctypes.CDLL(None).syscall


def node_of(pci_address: str) -> int | None:
    """Return the node of a PCI device such as "0000:65:00.0"; None where the system does not say."""
    try:
        node = int((PCI_DEVICES / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MASK_BITS else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Prefer a node for the pages of a map, while the node has free ones; return whether the system does so.

    A policy that the process already has, as set by `numactl`, is left alone.

    Args:
        address: page-aligned; none of the pages may have been touched.
    """
    if platform.machine() not in _SYSTEM_CALLS or _has_policy():
        return False
    mbind, _ = _SYSTEM_CALLS[platform.machine()]
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    size, bits = ctypes.c_size_t(nbytes), ctypes.c_ulong(_MASK_BITS + 1)  # the kernel takes one bit less
    return _syscall(mbind, ctypes.c_void_p(address), size, _PREFERRED, mask, bits, 0) == 0


@functools.cache
def _has_policy() -> bool:
    """Whether the process already has a memory policy."""
    _, get_mempolicy = _SYSTEM_CALLS[platform.machine()]
    mode = ctypes.c_int(_DEFAULT)
    nothing = ctypes.c_void_p(0)
    failed = _syscall(get_mempolicy, ctypes.byref(mode), nothing, ctypes.c_ulong(0), nothing, ctypes.c_ulong(0))
    return not failed and mode.value != _DEFAULT
