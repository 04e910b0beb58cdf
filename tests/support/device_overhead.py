"""Bytes that plans set aside on the device, and that a step did not take."""

from __future__ import annotations

import os

import chunkc
from chunkc.machines.devices import TABLES_NBYTES
from chunkc.passes.graphs.cuda_memory import cublaslt_workspace_nbytes, shares_workspaces

_NUM_HANDLES = 2  # of cuBLASLt's: the calling thread's and autograd's

_config = os.environ.get("CUBLASLT_WORKSPACE_SIZE")
_LT_NBYTES = 0 if shares_workspaces(os.environ) else cublaslt_workspace_nbytes(_config)

MOST_LEFT_NBYTES = TABLES_NBYTES + _NUM_HANDLES * _LT_NBYTES
"""The optimizer's tables; up to PyTorch 2.12 cuBLASLt's workspaces too. A thread takes its own at its first product
with a bias: none does in a model without biases."""


def unused_nbytes(report: chunkc.Report) -> dict[str, int]:
    """Return by moment the bytes that were predicted and not taken."""
    found = {label: predicted - measured for label, predicted, measured in report.moments if measured is not None}
    assert len(found) == len(report.moments) > 0
    return found
