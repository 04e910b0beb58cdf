"""Cut graphs into segments and match equal ones."""
