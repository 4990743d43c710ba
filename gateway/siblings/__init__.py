"""Several gateway processes behind one port: a parent that keeps them running, and what they must ask each other."""
