"""
Built-in training programs: each is a module, run as `python -m diloco_worker.recipes.<name>`.

A recipe also has a class `Scorer`, which the evaluator calls. Recipes use only the public `Learner`
and `settings`. Begin with `gpt`, the only one; `config`, `data` and `optim` are its parts.
"""

RECIPES = ("gpt",)
"""Values of `learner.recipe.name` in a manifest."""
