"""Ground floor: fused optimizer updates, and a plain PyTorch reference of each."""
