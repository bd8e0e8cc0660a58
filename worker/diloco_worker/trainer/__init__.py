"""
The parts of a joined trainer (joined.py): what touches torch, the model and the learner's disk.

Begin with `replica`, the model and its shared copies; `layout` copies tensors, `checkpoint`
writes to the learner's state directory. Imports the contract, core/ and ipc/, and never the network.
"""
