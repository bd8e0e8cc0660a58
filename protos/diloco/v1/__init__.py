"""Generated stubs of version 1 of the wire; see scripts/generate.py."""
