"""The report of a comparison, or of several."""
