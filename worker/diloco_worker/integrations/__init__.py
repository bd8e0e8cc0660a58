"""
Callbacks for the trainers of other libraries; each module needs its library, which this package does not install.

Begin with `huggingface` (Trainer, TRL) or `lightning`; `rates` follows their learning-rate schedulers.
Accelerate needs no module: `attach` takes its optimizers. Imports the library, `diloco.errors`, and of this package
`attachment`, `identities`, `settings` and trainer/.
"""
