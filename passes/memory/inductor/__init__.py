"""What Inductor makes of a segment, read off its generated wrapper without compiling it."""
