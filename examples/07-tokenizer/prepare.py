"""
Trains a tokenizer on a folder of text, and writes what the learners read: `python prepare.py [FOLDER]`.

    data/tokenizer.json      of the library tokenizers: byte-level BPE
    data/train.npy, data/validation.npy    the tokens; every 20th file is for validation

Without FOLDER, the text is the source of Python's standard library. All files below FOLDER that are UTF-8 count.
"""

import os
import sys
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer

DATA = Path(__file__).with_name("data")
VOCABULARY = 2048
MOST_BYTES = 200_000_000


def texts(folder: Path) -> list[str]:
    """The text of each file, in the order of their names; hidden files and those that are not UTF-8 do not count."""
    found, size = [], 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(
            part.startswith(".") for part in path.relative_to(folder).parts
        ):
            try:
                found.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
            size += len(found[-1])
            if size > MOST_BYTES:
                raise SystemExit(f"{folder}: more than {MOST_BYTES} characters; give less text")
    if len(found) < 2:
        raise SystemExit(f"{folder}: {len(found)} files of text, expected two or more")
    return found


def main() -> None:
    """Train the tokenizer, and encode the text with it."""
    standard = [path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    found = texts(Path(sys.argv[1])) if len(sys.argv) > 1 else standard
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(found, vocab_size=VOCABULARY, min_frequency=2, show_progress=False)  # fmt: skip
    DATA.mkdir(exist_ok=True)
    tokenizer.save(str(DATA / "tokenizer.json"))
    for name, part in (("validation", found[::20]), ("train", [t for i, t in enumerate(found) if i % 20])):  # fmt: skip
        tokens = np.concatenate([np.array(t.ids, np.uint16) for t in tokenizer.encode_batch(part)])
        np.save(DATA / f"{name}.npy", tokens)
        characters = sum(map(len, part))
        print(f"{name}: {len(tokens)} tokens, {characters / len(tokens):.2f} characters each")


if __name__ == "__main__":
    main()
