"""Built-in models by name: shapes to plan for, in plain PyTorch.

with torch.device("meta"):
    spec = find_model("gpt-18b")
    model = spec.build(activation_checkpointing=True)
    args, kwargs = spec.example(batch_size=4)
"""

from chunkc.models.common import num_parameters
from chunkc.models.registry import MODELS, ModelSpec, find_model

__all__ = ["MODELS", "ModelSpec", "find_model", "num_parameters"]
