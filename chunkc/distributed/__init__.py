"""Connect ranks, compare what they must have in common, and trace sharded and tensor-parallel parameters."""
