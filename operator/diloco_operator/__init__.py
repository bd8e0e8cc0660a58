"""The manifest, the plan made from it, the `diloco` command and the runtime of one machine."""
