"""
Leader election: of the replicas of an operator, one reconciles and the others stand by.

`election` decides (pure), `candidate` is the thread around it.
"""
