"""What a training step will need and how long it will take, said before anything runs or is allocated."""
