"""Arguments of a subject's process: which system trains which model, where, and under which limit."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from measuring.subject_process import Spec
from models.families import AnyModel, ModelChoice
from models.gpt import GPTConfig

PLAIN = "plain"
CHUNKC = "chunkc"
CHECKPOINTING = "checkpointing"
FSDP2 = "FSDP2 offload"
TORCHAO = "torchao CPUOffloadOptimizer"
DEEPSPEED = "DeepSpeed ZeRO-3 offload"
DDP, FSDP2_RANKS, CHUNKC_RANKS = "DDP", "FSDP2", "chunkc on ranks"
"""On several ranks, without offloading."""

PACKAGES = {TORCHAO: "torchao", DEEPSPEED: "deepspeed"}
"""Of systems that are not part of torch."""


@dataclass(frozen=True)
class SubjectSpec(Spec):
    """System, model and limits of a subject.

    Attributes:
        system: one of those above.
        options: chunkc's, for "chunkc".
        device: where the model computes.
        is_metered: on a CPU: the byte-exact allocator is in place before the model exists.
        is_placed: chunkc: the model goes to `options["home"]` before it is compiled.
        limit_nbytes: no byte of the compute tier above it (on a CPU, if metered); None: no limit.
        is_checkpointed: systems that offload run each block again in the backward.
        codegen: of the peers: "inductor" or "eager", as chunkc's option of that name.
        save_every: so many steps, a checkpoint is saved, of which the latest is kept; 0: none is.
        overlap: of chunkc's optimizer on several ranks.
        num_ranks, rank, store: of systems on several ranks: how many, which this is, and the file by which they meet.
    """

    SCRIPT = "peers/subject.py"

    model: AnyModel
    batch_size: int
    system: str = PLAIN
    options: dict[str, Any] | None = None
    device: str = "cpu"
    is_metered: bool = False
    is_placed: bool = False
    limit_nbytes: int | None = None
    is_checkpointed: bool = False
    codegen: str = "inductor"
    seed: int = 0
    save_every: int = 0
    overlap: str = "none"
    num_ranks: int = 1
    rank: int = 0
    store: str = ""

    @staticmethod
    def from_json(text: str) -> SubjectSpec:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        kind = ModelChoice if "name" in fields["model"] else GPTConfig
        return SubjectSpec(**{**fields, "model": kind(**fields["model"])})


def unavailable(system: str) -> str:
    """Why a system cannot run here, as far as can be told without a process; "" if nothing speaks against it."""
    package = PACKAGES.get(system)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return ""
