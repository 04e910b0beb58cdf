"""Answer questions about an ATen graph: storages, shapes, symbols, costs, collectives, the user's names."""
