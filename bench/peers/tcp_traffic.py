"""Count bytes that this process has sent over TCP, as the kernel does."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

_ACKNOWLEDGED_AT, _INFO_NBYTES = 120, 232
"""Where `struct tcp_info` of linux/tcp.h has `tcpi_bytes_acked`, and how much of it is asked for."""


def acknowledged_nbytes() -> int:
    """Bytes that others have acknowledged, on all connections that are open now."""
    return sum(_acknowledged(int(name)) for name in os.listdir("/proc/self/fd"))


def _acknowledged(descriptor: int) -> int:
    with suppress(OSError, struct.error), socket.socket(fileno=os.dup(descriptor)) as found:
        if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_NBYTES)
            (nbytes,) = struct.unpack_from("=Q", info, _ACKNOWLEDGED_AT)
            return int(nbytes)
    return 0
