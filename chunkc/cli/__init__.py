"""The command: `chunkc explain`, `chunkc calibrate` and `chunkc diff`."""
