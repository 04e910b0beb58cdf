"""Read the bytes of a graph off its fake tensors or its generated code: nothing runs."""
