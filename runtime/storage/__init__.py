"""Home memory: pinned RAM, files on disk, and copies from and to them."""
