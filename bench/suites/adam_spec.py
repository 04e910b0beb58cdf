"""Arguments of a process of the suite `adam`, and the candidates."""

from __future__ import annotations

from dataclasses import dataclass

from measuring.subject_process import Spec

FP32, BF16 = "fp32", "bf16 with fp32 master"
NBYTES_PER_ELEMENT = 28
"""Both: fp32 reads param, grad and two moments, and writes all but the gradient (16 + 12); bf16 reads a 2-byte
gradient, fp32 master and moments, and writes these and a 2-byte parameter (14 + 14)."""
SPLIT_NBYTES_PER_ELEMENT = 26
"""With a split master: reads a 2-byte gradient, a 2-byte parameter, the master's other 2 bytes and two moments, and
writes all but the gradient (14 + 12)."""

CHUNKC, CHUNKC_SPLIT = "chunkc", "chunkc (split master)"
COPY, ADD, LOOP = "bound: torch copy", "bound: torch a += b", "bound: compiled loop, the same reads and writes"
BOUNDS = (COPY, ADD, LOOP)
FUSED, FUSED_CASTS, FOREACH = "torch AdamW(fused)", "torch AdamW(fused), with casts", "torch AdamW(foreach)"
DEEPSPEED, DEEPSPEED_CASTS = "DeepSpeed CPUAdam", "DeepSpeed CPUAdam, with casts"
TORCHAO_8BIT, BNB_8BIT, BNB_32BIT = "torchao AdamW8bit", "bitsandbytes AdamW8bit", "bitsandbytes AdamW"

CANDIDATES = {
    FP32: (CHUNKC, *BOUNDS, FUSED, FOREACH, DEEPSPEED, BNB_32BIT, TORCHAO_8BIT, BNB_8BIT),
    BF16: (CHUNKC, CHUNKC_SPLIT, *BOUNDS, FUSED, FUSED_CASTS, DEEPSPEED, DEEPSPEED_CASTS, TORCHAO_8BIT, BNB_8BIT),
}
"""By precision. "With casts": bf16 gradient to fp32, update, fp32 parameter to bf16, as training in bf16 needs;
without them, the fp32 update alone. The 8-bit ones keep other states and move fewer bytes."""

PACKAGES = {
    DEEPSPEED: "deepspeed",
    DEEPSPEED_CASTS: "deepspeed",
    TORCHAO_8BIT: "torchao",
    BNB_8BIT: "bitsandbytes",
    BNB_32BIT: "bitsandbytes",
}

NOTES = {
    CHUNKC_SPLIT: f"moves {SPLIT_NBYTES_PER_ELEMENT} bytes a parameter, and throughput counts those",
    TORCHAO_8BIT: "8-bit moments; throughput counts the bytes of fp32 ones",
    BNB_8BIT: "8-bit moments; throughput counts the bytes of fp32 ones",
    FUSED: "the fp32 update alone",
    DEEPSPEED: "the fp32 update alone",
}
"""What a row's figures are not comparable in, in bf16; 8-bit ones have no master there."""


@dataclass(frozen=True)
class AdamSpec(Spec):
    """A candidate over `num_elements` parameters."""

    SCRIPT = "suites/adam_subject.py"

    candidate: str
    precision: str
    num_elements: int
    device: str = "cpu"
