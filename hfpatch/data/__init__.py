"""Documents, tokenising, token blocks and the batch plan."""
