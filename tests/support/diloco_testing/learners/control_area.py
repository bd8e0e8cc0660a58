"""The memory in which the ranks of a learner agree, as a bytearray of one process."""

from __future__ import annotations

from diloco_worker.core.agreement import Board, board_bytes


class ControlArea:
    """`agreement.Area` without shared memory."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)

    def read_control(self, offset: int, size: int) -> bytes:
        assert 0 <= offset <= len(self.data) - size
        return bytes(self.data[offset : offset + size])

    def write_control(self, offset: int, data: bytes) -> None:
        assert 0 <= offset <= len(self.data) - len(data)
        self.data[offset : offset + len(data)] = data


def board(*, ranks: int, fragments: int) -> Board:
    """The board of a learner, in memory of its own."""
    return Board(
        ControlArea(board_bytes(ranks=ranks, fragments=fragments)), ranks=ranks, fragments=fragments
    )
