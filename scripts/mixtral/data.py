"""Text as bytes, cut into windows whose order depends on nothing but the seed.

A batch is a function of (seed, number of samples consumed so far, data-parallel rank): that number
is all a checkpoint has to hold for a resumed run to read on exactly where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_STDLIB_LIMIT = 16 * 2**20
_DATA_LIMIT = 2**30
_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# One document in so many is kept for validation; with fewer documents, the end of the text is.
_VALIDATION_SHARE = 20
_SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """A text split in two. ``fingerprint`` tells whether two runs read the same text."""

    train: torch.Tensor  # [N] uint8
    validation: torch.Tensor  # [M] uint8
    fingerprint: str
    description: str


def load_corpus(path: Path | None) -> Corpus:
    """Reads a file or a folder, or by default the Python standard library's own sources.

    Files are taken in the order of their relative paths, so that all ranks and all machines with
    the same files see the same text. In ``.jsonl`` files each line is one document (key "text").

    Raises:
        ValueError: there is no text, or a line of a .jsonl file is not what it should be.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        documents = _take(_stdlib_documents(root), _STDLIB_LIMIT)
        description = "the Python standard library's sources"
    else:
        documents = _take(_documents(path), _DATA_LIMIT)
        description = str(path)
    train, validation = _split(documents)
    digest = hashlib.sha256(train + _SEPARATOR + validation).hexdigest()[:16]
    return Corpus(_as_tensor(train), _as_tensor(validation), digest, description)


def _stdlib_documents(root: Path) -> Iterator[bytes]:
    for file in _sorted_files(root, leave_out=_NOT_PROSE):
        if file.suffix == ".py":
            yield file.read_bytes()


def _documents(path: Path) -> Iterator[bytes]:
    for file in [path] if path.is_file() else _sorted_files(path):
        if file.suffix == ".jsonl":
            yield from _json_lines(file)
            continue
        content = file.read_bytes()
        if _SEPARATOR not in content[:8192]:  # else it is no text
            yield content


def _sorted_files(root: Path, leave_out: Collection[str] = ()) -> list[Path]:
    """The visible files under ``root``; files and folders named in ``leave_out`` are not."""
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        # Not entered at all: an interpreter's packages are many times its library.
        folders[:] = (n for n in folders if not n.startswith(".") and n not in leave_out)
        shown = (n for n in names if not n.startswith(".") and n not in leave_out)
        files += (path for path in (Path(folder, n) for n in shown) if path.is_file())
    return sorted(files, key=Path.as_posix)


def _json_lines(file: Path) -> Iterator[bytes]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)["text"].encode()
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f'{file}:{number}: expected a JSON object with a string under "text", '
                    f"got {line[:60]!r}"
                ) from error


def _take(documents: Iterable[bytes], limit: int) -> list[bytes]:
    """Whole documents until ``limit`` bytes are passed; empty ones are left out."""
    taken, total = [], 0
    for document in documents:
        if document:
            taken.append(document)
            total += len(document)
        if total >= limit:
            break
    if not taken:
        raise ValueError("no text found: no readable, non-empty file there")
    return taken


def _split(documents: list[bytes]) -> tuple[bytes, bytes]:
    if len(documents) >= _VALIDATION_SHARE:
        # Spread over the whole text, so that both halves are of one kind.
        held_out = documents[_VALIDATION_SHARE - 1 :: _VALIDATION_SHARE]
        kept = [d for i, d in enumerate(documents, 1) if i % _VALIDATION_SHARE]
        return _SEPARATOR.join(kept), _SEPARATOR.join(held_out)
    text = _SEPARATOR.join(documents)
    cut = len(text) - len(text) // _VALIDATION_SHARE
    return text[:cut], text[cut:]


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()


class Windows:
    """The windows of ``seq_len + 1`` bytes of one text, shuffled anew for each epoch.

    Args:
        text: [N] uint8.
        seq_len: tokens per sample; a sample has one byte more, for the labels.
        seed: of the shuffling; None keeps the windows in place.

    Raises:
        ValueError: the text is shorter than one window.
    """

    def __init__(self, text: torch.Tensor, seq_len: int, seed: int | None) -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self.num_windows = (len(text) - 1) // seq_len
        if self.num_windows < 1:
            raise ValueError(
                f"a part of the text has {len(text)} bytes, and --seq-len {seq_len} needs at least "
                f"{seq_len + 1}: give more text (validation gets 1/{_VALIDATION_SHARE} of it) or "
                "a smaller --seq-len"
            )
        self._epoch = -1
        self._order = torch.arange(self.num_windows)

    def samples(self, indices: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, [B, seq_len] int64 each, of the samples with these running numbers."""
        rows = torch.stack([self._row(i) for i in indices]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _row(self, index: int) -> torch.Tensor:
        epoch, place = divmod(index, self.num_windows)
        if self.seed is not None and epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = torch.randperm(self.num_windows, generator=generator)
            self._epoch = epoch
        start = int(self._order[place]) * self.seq_len
        return self.text[start : start + self.seq_len + 1]


def micro_batches(
    windows: Windows, consumed: int, micro_batch: int, num_micro_batches: int, dp: int, dp_rank: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches of one step that starts at sample ``consumed``.

    Every sample of the step goes to exactly one data-parallel rank.
    """
    for number in range(num_micro_batches):
        first = consumed + (number * dp + dp_rank) * micro_batch
        yield windows.samples(range(first, first + micro_batch))
