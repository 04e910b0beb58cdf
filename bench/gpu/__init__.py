"""Calls of `on_gpu.sh` on a GPU that is lent for half an hour, and facts about hardware."""
