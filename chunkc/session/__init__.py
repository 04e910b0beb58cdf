"""Keep one model's state during and between calls: its store, its graphs, and the changes its user makes."""
