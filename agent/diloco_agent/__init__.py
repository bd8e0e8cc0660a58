"""
The agent: the first process of each container, which keeps one program running and answers probes.

    python3 -m diloco_agent learner|syncer|evaluator -- ARGV...

Begin with `policy` (when to start, restart and exit) and `probes` (what the kubelet gets), which are
pure; `supervisor` connects them to the process and to signals. `processes` and `restarts` also serve
`diloco run`. Imports the standard library, `diloco.errors` and `diloco.runtime` only: it is part of
every image and runs next to every learner.
"""
