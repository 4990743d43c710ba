"""How v4-nano is made: text, tokenizer, training with the published rounding, export and evaluation.

Run in this order: `natural_text` (public-domain prose out of Debian packages), `tokenizer_training`, `train` (one GPU)
and `weights_io`. Nothing here is imported by a service. What runs beside the GPU needs torch, numpy, regex and the
project itself.
"""
