"""The worker: weights, KV pools and the DeepSeek-V4 forward. The only package that imports torch."""
