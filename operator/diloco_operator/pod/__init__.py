"""
The first process of each of our containers: keeps one program running and says how it is.

    python3 -m diloco_operator.pod learner|syncer|evaluator -- ARGV...

`policy` and `probes` are pure: when to start, restart and give up; what a probe is told. `server`
answers probes, `settings` reads the environment, `supervisor` puts them together. The standard
library and the contract's plainest modules only: this runs in every image and beside every learner.
"""
