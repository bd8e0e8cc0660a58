"""
Callbacks for the trainers of other libraries; each module needs its library, which this package does not install.

Begin with `huggingface` (Trainer, TRL) or `lightning`; `rates` follows their learning-rate schedulers.
Accelerate needs no module: `attach` takes its optimizers. Imports the library, and of this package `attachment` and
`settings`.
"""
