"""Results of a benchmark: sections of rows of metrics, each with all its samples; and JSON of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Unit = Literal["s", "nbytes", "ratio", "per_s", "nbytes_per_s", "flops_per_s", "number"]


@dataclass(frozen=True)
class Metric:
    """Samples of one quantity, in the order they were taken; times in seconds, sizes in bytes."""

    unit: Unit
    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.samples, "a metric without samples"

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third, between samples where they fall between; of one sample, itself."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "median": self.median,
            "quartiles": list(self.quartiles),
            "samples": list(self.samples),
        }


@dataclass(frozen=True)
class Row:
    """Result of one case: labels, metrics and a note.

    `is_failure`: chunkc itself did not do what it should have; a peer's trouble is a note.
    """

    labels: Mapping[str, str]
    metrics: Mapping[str, Metric]
    note: str = ""
    is_failure: bool = False

    def to_json(self) -> dict[str, Any]:
        metrics = {name: metric.to_json() for name, metric in self.metrics.items()}
        fields = {"labels": dict(self.labels), "metrics": metrics, "note": self.note}
        return fields | {"is_failure": True} if self.is_failure else fields


@dataclass(frozen=True)
class Section:
    """A table; `setting` is what holds for all its rows, in JSON's types."""

    title: str
    setting: Mapping[str, Any]
    rows: Sequence[Row] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "setting": dict(self.setting),
            "rows": [row.to_json() for row in self.rows],
        }


def one(unit: Unit, value: float) -> Metric:
    """A quantity that was read once."""
    return Metric(unit, (value,))


def flat(unit: Unit, samples: Sequence[Sequence[float]]) -> Metric:
    """Samples of all rounds as one metric."""
    return Metric(unit, tuple(sample for samples_of_round in samples for sample in samples_of_round))


def paired_ratios(samples: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Metric:
    """Round by round, the median of a subject's samples over the median of the base's in the same round."""
    pairs = zip(samples, base, strict=True)
    return Metric("ratio", tuple(statistics.median(a) / statistics.median(b) for a, b in pairs))


def largest_difference(samples: Sequence[float], others: Sequence[float]) -> float:
    """Find the largest difference between two samples in the same place; NaN where one is."""
    differences = [abs(a - b) for a, b in zip(samples, others, strict=False)]
    return float("nan") if any(d != d for d in differences) else max(differences)


def setting_of(model: Any, batch_size: int, **more: Any) -> dict[str, Any]:
    """The model's sizes and the step's tokens, and whatever else."""
    tokens = batch_size * model.length
    return {**asdict(model), "batch_size": batch_size, "tokens_per_step": tokens, **more}
