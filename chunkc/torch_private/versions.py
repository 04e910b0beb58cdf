"""Versions of PyTorch that chunkc was checked on, and the messages for others."""

from __future__ import annotations

import functools
import logging

import torch

logger = logging.getLogger(__name__)

CHECKED = ("2.11", "2.12", "2.13", "2.14")
"""Versions that `make test-versions` tests, each in its own environment; its script reads this line."""

WHOLE = "2.13"
"""Version on which all tests run; `docs/limits.md` has what is known of the others."""


def is_newer(version: str) -> bool:
    """Whether a version such as "2.15.0+cpu" is newer than all that were checked."""
    return _numbers(version) > max(map(_numbers, CHECKED))


def newer_than_checked(version: str = torch.__version__) -> str | None:
    """Return the warning for a PyTorch newer than all that were checked; None for others."""
    if not is_newer(version):
        return None
    return (
        f"chunkc was checked on PyTorch {CHECKED[0]} to {CHECKED[-1]}, and this is {version}: what it cannot read off "
        f"Inductor's code it reckons from the graph. {how_to_install()} is safe"
    )


@functools.cache
def warn_if_newer() -> None:
    """Warn, once in a process, if PyTorch is newer than all versions that were checked."""
    text = newer_than_checked()
    if text is not None:
        logger.warning(text)


def lacks(error: Exception, version: str = torch.__version__) -> ImportError:
    """Return the error to raise if PyTorch lacks a name that chunkc imports."""
    return ImportError(
        f"PyTorch {version} lacks what chunkc needs ({error}); chunkc was checked on {CHECKED[0]} to {CHECKED[-1]}: "
        + how_to_install()
    )


def how_to_install() -> str:
    """Return the command that installs the PyTorch on which all tests run."""
    return f'pip install "torch=={WHOLE}.*"'


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
