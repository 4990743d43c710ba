"""The DeepSeek-V4 forward, one box of the paper per file."""
