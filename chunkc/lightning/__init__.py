"""Train with Lightning: strategies for its Trainer and for Fabric, and a callback that logs the report."""

from chunkc.lightning.strategy import ChunkcFabricStrategy, ChunkcStrategy, ReportCallback

__all__ = ["ChunkcFabricStrategy", "ChunkcStrategy", "ReportCallback"]
