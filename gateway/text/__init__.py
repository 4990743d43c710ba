"""Everything the gateway knows about text: tokenizer, chat encoding, detokenizer and output parser.

Workers and schedulers see token ids only. The modules here turn requests into ids and ids back into text. They are
plain functions and small state machines: no sockets, no event loop, no clock, no torch.
"""
