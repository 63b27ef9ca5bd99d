"""Guards and former defects: whether a run notices that one is missing, or back."""
