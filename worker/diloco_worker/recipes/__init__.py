"""
Built-in training programs: each is a module, run as `python -m diloco_worker.recipes.<name>`.

A recipe also has a class `Scorer`, which the evaluator calls. Begin with `gpt`, the only one;
`config`, `data` and `optim` are its parts. Imports torch, `diloco.errors` and `diloco.runtime`, and of
this package only the public `Learner` and `settings`: a user's own loop can do the same.
"""

RECIPES = ("gpt",)
"""Values of `learner.recipe.name` in a manifest."""
