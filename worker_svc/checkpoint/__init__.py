"""DeepSeek's original checkpoint format: read, check, write."""
