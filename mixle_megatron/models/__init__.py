"""Building GPTModel-style modules, one pipeline stage at a time."""
