"""
Objects of the training program whose state is kept in local checkpoints (`Learner.keep`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn, Protocol, runtime_checkable

import torch

from diloco.errors import EXIT_REFUSED, ConfigError, DilocoError
from diloco_worker.trainer.trees import TensorReader, entry_of, pack, unpack

AFTER_A_STEP = "learner.keep: call it before the first learner.step(); later, the state is no longer that of the step"

MAX_ENTRIES = 64
MAX_NAME_CHARACTERS = 64
MAX_TENSOR_BYTES = 8 << 30
"""Of all entries together."""
MAX_VALUE_BYTES = 16 << 20
"""Of all entries together without their tensors, as JSON."""


@runtime_checkable
class Stateful(Protocol):
    """Has a state that can be taken and given back."""

    def state_dict(self) -> dict[str, Any]:
        """The state: tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state."""


class Kept:
    """The objects by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}

    def __bool__(self) -> bool:
        return bool(self._objects)

    def add(self, objects: Mapping[str, Any]) -> None:
        """
        Keep these objects; after an error, none of them.

        Raises:
            TypeError: an object without the two methods.
            ValueError: a name that is taken or cannot be used, or too many objects.
        """
        for name, found in objects.items():
            if not (name.isidentifier() and len(name) <= MAX_NAME_CHARACTERS):
                raise ValueError(
                    f"learner.keep: {name[:80]!r} is not a Python name of at most {MAX_NAME_CHARACTERS} characters"
                )
            if name in self._objects:
                raise ValueError(f"learner.keep: {name} is kept already; use another name")
            missing = [
                method
                for method in ("state_dict", "load_state_dict")
                if not callable(getattr(found, method, None))
            ]
            if missing:
                raise TypeError(
                    f"learner.keep: {name} is a {type(found).__name__} without {' and '.join(missing)}; expected "
                    "an object with both methods"
                )
        if len(self._objects) + len(objects) > MAX_ENTRIES:
            raise ValueError(f"learner.keep: more than {MAX_ENTRIES} objects")
        self._objects.update(objects)

    def capture(self) -> dict[str, Any]:
        """
        The state of every object now; its tensors may be the objects' own.

        Raises:
            ConfigError: an object has no state that can be saved, or together they are too large.
        """
        states, tensor_bytes, value_bytes = {}, 0, 0
        for name, kept in self._objects.items():
            tensors: dict[str, torch.Tensor] = {}
            try:
                if (state := kept.state_dict()) is None:
                    raise ConfigError(
                        f"its state_dict() returned None, as that of a {type(kept).__name__} around what has no state"
                    )
                states[name] = state
                text = json.dumps(pack(states[name], tensors, name))
                for path, tensor in tensors.items():
                    entry_of(path, tensor)
            except Exception as error:  # of the user's class
                reason = str(error) if isinstance(error, ConfigError) else repr(error)
                raise ConfigError(
                    f"learner.keep: the state of {name} cannot be saved: {reason}"
                ) from error
            tensor_bytes += sum(tensor.nbytes for tensor in tensors.values())
            value_bytes += len(text)
            if tensor_bytes > MAX_TENSOR_BYTES or value_bytes > MAX_VALUE_BYTES:
                raise ConfigError(
                    f"learner.keep: with {name}, the states have {tensor_bytes} bytes of tensors and {value_bytes} "
                    f"of other values, expected at most {MAX_TENSOR_BYTES} and {MAX_VALUE_BYTES}; keep less"
                )
        return states

    def restore(self, name: str, state: Any) -> None:
        """
        Give an object the state that it had.

        Raises:
            ConfigError: it does not take it.
        """
        try:
            self._objects[name].load_state_dict(state)
        except Exception as error:  # of the user's class
            raise ConfigError(
                f"learner.keep: {name} does not take its state of the local checkpoint: {error!r}; to begin "
                "with a new state, keep it under another name"
            ) from error


class SavedEntries:
    """
    What `Kept.capture` returned for a checkpoint, read one entry at a time.

    Args:
        file: of the checkpoint's tensors; closed by `close`, and it may be deleted before; None: without entries.
        trees: packed states by name.
        local_step: of the checkpoint.
        absent: why it lacks an entry; "": it was not kept then.
    """

    def __init__(
        self, file: BinaryIO | None, trees: Mapping[str, Any], *, local_step: int, absent: str = ""
    ) -> None:
        self.local_step, self.absent = local_step, absent or "has no state of it"
        self._file, self._trees = file, dict(trees)

    def __contains__(self, name: object) -> bool:
        return name in self._trees

    def read(self, name: str) -> Any:
        """
        The state of one entry.

        Raises:
            DamagedError: the file is not what was verified.
        """
        if self._file is None:
            raise KeyError(name)
        return unpack(self._trees[name], TensorReader(self._file))

    def close(self) -> None:
        """No further entry is read."""
        if self._file is not None:
            self._file.close()


class KeptState:
    """
    What a program keeps, from `connect` on: its objects, and what the loaded checkpoint has of them.

    Args:
        show: a sentence to the user.
        end: ends the process with this code and sentence.
    """

    def __init__(self, show: Callable[[str], None], end: Callable[[int, str], NoReturn]) -> None:
        self.objects = Kept()
        self.saved: SavedEntries | None = None
        """Of the checkpoint that the optimizers continue with, until the first step."""
        self._show, self._end = show, end
        self._stepped = False

    def __bool__(self) -> bool:
        return bool(self.objects)

    def keep(self, objects: Mapping[str, Any], *, local_step: int) -> None:
        """See `Learner.keep`; `local_step` is that at which this process begins."""
        if self._stepped:
            raise ValueError(AFTER_A_STEP)
        self.objects.add(objects)
        for name in objects:
            if self.saved is not None:
                self._restore(name, self.saved)
            elif local_step:
                self._show(f"{name} starts over: there is no local checkpoint that can be used")

    def _restore(self, name: str, saved: SavedEntries) -> None:
        source = f"the local checkpoint of local step {saved.local_step}"
        if name not in saved:
            self._show(f"{name} starts over: {source} {saved.absent}")
            return
        try:
            state = saved.read(name)
        except (DilocoError, OSError, LookupError) as error:
            # Not a refusal: a restart verifies the file again, and skips it if it is damaged.
            text = f"{source}: the state of {name} cannot be read: {error}"
            self._end(1, f"{text}; after a restart, it is read again")
        try:
            self.objects.restore(name, state)
        except ConfigError as error:
            self._end(EXIT_REFUSED, str(error))
        self._show(f"{name} continues with the state of {source}")

    def begin_steps(self, *, saving: bool) -> None:
        """
        The first step: nothing is restored from now on, and what cannot be saved is found out early.

        Args:
            saving: whether there are local checkpoints.
        """
        if self._stepped:
            return
        self._stepped = True
        self.forget_saved()
        if saving and self.objects:
            try:
                self.objects.capture()
            except ConfigError as error:
                self._end(EXIT_REFUSED, str(error))

    def forget_saved(self) -> None:
        """Nothing is restored."""
        if self.saved is not None:
            self.saved.close()
            self.saved = None
