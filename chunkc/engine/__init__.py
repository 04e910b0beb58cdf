"""Run training loops written for PatrickStar and DeepSpeed: an engine made from their configuration files."""

from chunkc.engine.engine import Engine
from chunkc.engine.initialize import initialize_engine
from chunkc.engine.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "Engine", "LossScaler", "initialize_engine"]
