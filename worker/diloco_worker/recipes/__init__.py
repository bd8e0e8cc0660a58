"""
Built-in training programs; each is one module, run as `python -m diloco_worker.recipes.<name>`.

A recipe module also offers `Scorer`, which the evaluator calls.
"""

RECIPES = ("gpt",)
"""Names a manifest may give in `learner.recipe.name`."""
