"""
Experiments: jobs with real models, data and gradients in the virtual time of the simulator.

    study      study.yaml: a job, a grid of its fields, seeds, scenarios, methods;  cells of it
    scenarios  how fast learners are, how often they fail, who joins for a while
    tasks      what one cell runs, and its digest
    models     the model, optimizers and data of the recipe behind the simulator's interface
    world      Streaming and Decoupled DiLoCo: the simulator's syncer, learners and network
    lockstep   synchronous data-parallel training, and DiLoCo whose learners wait for each result
    pool       cells in several processes;  results, summary, page: what they gave

Imports the contract (`diloco`), `diloco_job`, `diloco_syncer`, `diloco_worker` with torch, `diloco_sim`, and
the style of the report of `diloco_local`. Begin with `study`.
"""
