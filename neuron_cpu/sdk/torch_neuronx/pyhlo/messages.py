"""Makes protobuf messages from tables of their fields, without generated code."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ["int32", "int64", "uint32", "uint64", "float", "double", "bool", "string", "bytes"]
}
# message -> (field, number, kind)
Table = dict[str, list[tuple[str, int, str]]]


class Messages:
    """The classes of a table's messages, by name. A kind is one of `_KINDS`, another message or
    "Message.Enum", behind "repeated" where a field has several; or "map KEY VALUE"."""

    def __init__(
        self, name: str, table: Table, enums: dict[str, dict[str, tuple[str, ...]]] | None = None
    ) -> None:
        # not the vendor's package: a process may also hold the real definitions
        self._package = f"neuron_cpu.{name}"
        file = descriptor_pb2.FileDescriptorProto(
            name=f"neuron_cpu/{name}.proto", package=self._package, syntax="proto3"
        )
        for message_name, fields in table.items():
            message = file.message_type.add(name=message_name)
            for enum, values in (enums or {}).get(message_name, {}).items():
                made = message.enum_type.add(name=enum)
                for number, value in enumerate(values):
                    made.value.add(name=value, number=number)
            for field in fields:
                self._add(message, *field)
        self._pool = descriptor_pool.DescriptorPool()
        self._pool.Add(file)
        made = getattr(message_factory, "GetMessageClass", None)
        # in protobuf before 4.22, which the SDK had until 2025 (optimum-neuron, issue 1013)
        self._class = made or message_factory.MessageFactory(self._pool).GetPrototype

    def _add(self, message: Any, name: str, number: int, kind: str) -> None:
        several = kind.startswith(("repeated ", "map "))
        label = _Field.LABEL_REPEATED if several else _Field.LABEL_OPTIONAL
        kind = kind.removeprefix("repeated ")
        field = message.field.add(name=name, number=number, label=label)
        if kind in _KINDS:
            field.type = _KINDS[kind]
            return
        if kind.startswith("map "):
            entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
            entry = message.nested_type.add(name=entry_name)
            entry.options.map_entry = True
            for place, part in enumerate(("key", "value"), start=1):
                own = _KINDS[kind.split()[place]]
                entry.field.add(name=part, number=place, label=_Field.LABEL_OPTIONAL, type=own)
            kind = f"{message.name}.{entry_name}"
            field.type = _Field.TYPE_MESSAGE
        else:
            field.type = _Field.TYPE_ENUM if "." in kind else _Field.TYPE_MESSAGE
        field.type_name = f".{self._package}.{kind}"

    def __getitem__(self, name: str) -> type:
        found = self._pool.FindMessageTypeByName(f"{self._package}.{name}")
        return self._class(found)
