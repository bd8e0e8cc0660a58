"""
Leader election: of the replicas of an operator, one reconciles and the others stand by.

`election` decides (pure), `candidate` is the thread around it. Imports `cluster.client`,
and nothing else of the operator. Begin with `election`.
"""
