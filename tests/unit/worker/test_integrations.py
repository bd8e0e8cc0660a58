"""Where a library is missing, importing its callback states what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "libraries", "advice"),
    [
        ("huggingface", ["transformers"], r"pip install 'transformers\[torch\]'"),
        ("lightning", ["lightning", "pytorch_lightning"], "pip install lightning"),
    ],
)
def test_a_callback_without_its_library_states_what_to_install(
    monkeypatch, module, libraries, advice
):
    for name in [*sys.modules]:
        if name.partition(".")[0] in libraries or name.startswith("diloco_worker.integrations"):
            monkeypatch.delitem(sys.modules, name)
    for library in libraries:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=advice):
        importlib.import_module(f"diloco_worker.integrations.{module}")


def test_the_public_names_need_no_library():
    import diloco_worker

    assert {name: getattr(diloco_worker, name) for name in diloco_worker.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'trainer_of_nothing'"):
        _ = diloco_worker.trainer_of_nothing
