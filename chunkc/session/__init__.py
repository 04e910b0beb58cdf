"""One model's state between and during calls: its store, its graphs, and what the user changed."""
