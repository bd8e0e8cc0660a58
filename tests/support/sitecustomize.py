"""
Imported by each Python process that tests start with this folder on PYTHONPATH.

torch imports its compiler when an optimizer is first used, only to state where it must not compile. That takes 1.3 s
of processor time, in each of hundreds of programs that compile nothing. Here nothing is stated until the compiler is
imported for another reason.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class Late(importlib.abc.Loader):
    """Loads a module, and replaces the decorator of it that imports the compiler."""

    def __init__(self, loader: importlib.abc.Loader, decorator: str) -> None:
        self._loader, self._decorator = loader, decorator

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """See `importlib.abc.Loader`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        self._loader.exec_module(module)
        replace = DECORATORS[module.__name__, self._decorator]
        setattr(module, self._decorator, replace(getattr(module, self._decorator)))


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules with such decorators."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        for module, decorator in DECORATORS:
            if module == fullname:
                spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = Late(spec.loader, decorator)
                return spec
        return None


def _not_compiled(disable: Callable[..., Any]) -> Callable[..., Any]:
    """Of functions that the compiler must leave alone."""

    def decorate(function: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(decorate, recursive=recursive)
        disabled = disable(function, recursive)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (disabled if COMPILER in sys.modules else function)(*args, **kwargs)

        return call

    return decorate


def _without_gradients(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """Of an optimizer's `step`, before and after which compiled code ends."""

    def decorate(step: Callable[..., Any]) -> Callable[..., Any]:
        breaking = decorator(step)

        @functools.wraps(step)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if COMPILER in sys.modules:
                return breaking(self, *args, **kwargs)
            with sys.modules["torch"].set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return call

    return decorate


DECORATORS = {
    ("torch._compile", "_disable_dynamo"): _not_compiled,
    ("torch.optim.optimizer", "_use_grad_for_differentiable"): _without_gradients,
}

sys.meta_path.insert(0, Finder())
