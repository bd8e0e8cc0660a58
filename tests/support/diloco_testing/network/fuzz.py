"""Messages that no honest peer sends: random bytes, damaged bytes, and protobufs with random fields."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_INTS = {
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 2**31 - 1),
}
_TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "eu", "eu/0", "eu/1", "us/9", "j", "float32", "restarts", "../..", "\x1b[2J", "{}"]),
    st.builds(lambda text: text * 700, st.text(min_size=1, max_size=3)),
)  # fmt: skip


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """Values of one field, not of all its repetitions."""
    kind = field.cpp_type
    if kind in _INTS:
        low, high = _INTS[kind]
        return st.one_of(st.integers(0, 5), st.integers(low, high), st.just(high))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return st.binary(max_size=20) if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(field.message_type._concrete_class(), depth=depth - 1)
    return st.floats(width=32 if kind == FieldDescriptor.CPPTYPE_FLOAT else 64)


@st.composite
def messages(draw: st.DrawFn, honest: Message, depth: int = 3) -> Message:
    """The honest message with random values in some of its fields."""
    message: Message = type(honest)()
    message.CopyFrom(honest)
    fields = list(message.DESCRIPTOR.fields)
    if depth == 0 or not fields:
        return message
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=id)):
        message.ClearField(field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = st.dictionaries(_TEXTS, _TEXTS, max_size=70)
            getattr(message, field.name).update(draw(entries))
        elif field.is_repeated:
            found = draw(st.lists(values(field, depth), max_size=5))
            getattr(message, field.name).extend(found)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(draw(values(field, depth)))
        else:
            setattr(message, field.name, draw(values(field, depth)))
    return message


@st.composite
def wire_bytes(draw: st.DrawFn, honest: Message) -> bytes:
    """The message as bytes: as it is, with random fields, with damaged bytes, or bytes of nothing."""
    data: bytes = draw(messages(honest)).SerializeToString()
    how = draw(st.sampled_from(["fields", "damage", "cut", "noise"]))
    if how == "noise":
        return draw(st.binary(max_size=200))
    if how == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if how == "damage" and data:
        at = draw(st.integers(0, len(data) - 1))
        return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at + 1 :]
    return data
