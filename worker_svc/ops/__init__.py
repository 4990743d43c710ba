"""One door per operation; ref.py is the plain torch truth and the CPU path."""
