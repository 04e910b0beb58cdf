"""Count the bytes of CUB's workspaces, one allocation each, where ATen sorts or scans on CUDA devices.

As `cub/device/dispatch/dispatch_radix_sort.cuh`, `dispatch_unique_by_key.cuh`, `dispatch_scan.cuh` and the files of
`tuning/` have it in CCCL 3.0, which PyTorch 2.13 for CUDA 13 is built with; measured on the GPU made of RAM.

    tile:     what a block of threads takes at once. It follows from the compute capability; where that is unknown, it
              is the smallest, which needs the most room
    scratch:  its parts, each a multiple of 256 bytes, and 255 bytes more
"""

from __future__ import annotations

from chunkc.passes.graphs.attention_cuda import Capability
from chunkc.passes.memory.scratch.cuda_reduction import MULTIPROCESSORS

_PART = 256
_DIGITS = 256
_DIGIT_BITS = 8
_OFFSET_NBYTES = 8
_COUNTER_NBYTES = 4
_MOST_AT_ONCE = (1 << 28) - 1
_PADDING_TILES = 32
_OLD, _AMPERE, _HOPPER = 7, 8, 9
_SMALL_KEYS = {1: 3456, 2: 5632}  # tiles on Hopper, with values of 8 bytes
_UNIQUE = {4: {(8, 0): 2816, (9, 0): 7168}, 8: {(8, 0): 1344, (9, 0): 4928}}
_UNIQUE_ELSEWHERE = {4: 704, 8: 320}


def radix_sort(num: int, key: int, value: int, num_bits: int, capability: Capability | None) -> int:
    """Count `DeviceRadixSort::SortPairs` of `num` keys with values, by the lowest `num_bits` of the keys.

    Keys and values have `key` and `value` bytes each. As many as fit into one block of threads are sorted in it.
    """
    if num <= _tile(256, 19, max(key, value)):
        return 1
    num_passes, tiles = -(-num_bits // _DIGIT_BITS), _sorted_tiles(key, value, capability)
    copies = [key * num, value * num] if num_passes > 1 or not tiles else []
    if not tiles:
        return scratch([_spine(key), *copies])
    tile = min(tiles)
    at_once = _MOST_AT_ONCE // tile * tile
    num_portions = -(-num // at_once)
    bins = num_portions * num_passes * _DIGITS * _OFFSET_NBYTES
    look_back = -(-(num if num_portions == 1 else at_once) // tile) * _DIGITS * _COUNTER_NBYTES
    return scratch([bins, look_back, *copies, num_portions * num_passes * _COUNTER_NBYTES])


def _sorted_tiles(key: int, value: int, capability: Capability | None) -> list[int]:
    """Return the tiles of the algorithms that may run; none if a device may sort such keys by the older algorithm."""
    major = capability[0] if capability is not None else None
    if key < 4:
        return [_SMALL_KEYS[key]] if major == _HOPPER else []
    size = max(key, value)
    tiles = {
        _OLD: _tile(256, 46 if key == value == 4 else 23, size),
        _AMPERE: _tile(384, 17 if key == 4 else 21, size),
        _HOPPER: _tile(384, (17 if value < 8 else 29) if key == 4 else 30 if value < 8 else 24, size),
    }
    return [tiles[major]] if major in tiles else list(tiles.values())


def _tile(num_threads: int, num_items: int, itemsize: int) -> int:
    """Return the items of a tile (`RegBoundScaling`): `num_items` of 4 bytes a thread, or others of that size."""
    return num_threads * max(1, min(num_items * 4 // itemsize, 2 * num_items))


def _spine(key: int) -> int:
    """Bound the bytes of the counts that blocks pass on when the older algorithm sorts keys of 1 or 2 bytes.

    These are 5 counts for each digit and each block that a device has room for.
    """
    num_digits, num_blocks = (32, 16) if key == 1 else (128, 8)
    return (5 * num_blocks * MULTIPROCESSORS * num_digits + 5632) * _OFFSET_NBYTES


def segmented_radix_sort(num: int, key: int, value: int) -> int:
    """Count `DeviceSegmentedRadixSort::SortPairs`."""
    return scratch([key * num, value * num])


def unique_by_key(num: int, key: int, capability: Capability | None) -> int:
    """Count `DeviceSelect::UniqueByKey` of `num` sorted keys of 4 or 8 bytes."""
    elsewhere = _UNIQUE_ELSEWHERE[key]
    tile = elsewhere if capability is None else _UNIQUE[key].get(capability, elsewhere)
    return scratch([scratch([2 * _OFFSET_NBYTES * (-(-num // tile) + _PADDING_TILES)])])


def scan(num: int, itemsize: int, *, halves: bool = False) -> int:
    """Count `DeviceScan` of `num` numbers, with accumulators of `itemsize` bytes; `halves`: they are 16-bit floats."""
    num_states = -(-num // (128 * max(1, min(15 * 4 // itemsize, 30)))) + _PADDING_TILES
    states = [4 * num_states, *(2 * [itemsize * num_states])] if halves else [2 * itemsize * num_states]
    return scratch([scratch(states)])


def scratch(parts: list[int]) -> int:
    """Add up the parts of one workspace (`util_temporary_storage.cuh`, `alias_temporaries`)."""
    return sum(-(-part // _PART) * _PART for part in parts) + _PART - 1
