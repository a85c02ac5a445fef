"""Makes protobuf messages from the text of their definitions, without generated code."""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ["int32", "int64", "uint32", "uint64", "float", "double", "bool", "string", "bytes"]
}
# messages, whose enums stand inside; enums; fields
_MESSAGE = re.compile(r"message (\w+) {((?:[^{}]|{[^{}]*})*)}")
_ENUM = re.compile(r"enum (\w+) {([^}]*)}")
_FIELD = re.compile(r"(repeated |)(map<\w+, \w+>|[\w.]+) (\w+) = (\d+);")


class Messages:
    """The classes of a package's messages, by name. `text` has them as a `.proto` file does, but
    for enums, whose values have no numbers; a field names the message of its enum, too."""

    def __init__(self, name: str, text: str) -> None:
        # not the vendor's package: a process may also hold the real definitions
        self._package = f"neuron_cpu.{name}"
        file = descriptor_pb2.FileDescriptorProto(
            name=f"neuron_cpu/{name}.proto", package=self._package, syntax="proto3"
        )
        for message_name, body in _MESSAGE.findall(text):
            message = file.message_type.add(name=message_name)
            for enum, values in _ENUM.findall(body):
                made = message.enum_type.add(name=enum)
                for number, value in enumerate(values.split()):
                    made.value.add(name=value, number=number)
            for field in _FIELD.findall(body):
                self._add(message, *field)
        self._pool = descriptor_pool.DescriptorPool()
        self._pool.Add(file)
        made = getattr(message_factory, "GetMessageClass", None)
        # in protobuf before 4.22, which the SDK had until 2025 (optimum-neuron, issue 1013)
        self._class = made or message_factory.MessageFactory(self._pool).GetPrototype

    def _add(self, message: Any, repeated: str, kind: str, name: str, number: str) -> None:
        of_map = kind.startswith("map<")
        label = _Field.LABEL_REPEATED if repeated or of_map else _Field.LABEL_OPTIONAL
        field = message.field.add(name=name, number=int(number), label=label)
        if kind in _KINDS:
            field.type = _KINDS[kind]
            return
        field.type = _Field.TYPE_ENUM if "." in kind else _Field.TYPE_MESSAGE
        if of_map:
            entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
            entry = message.nested_type.add(name=entry_name)
            entry.options.map_entry = True
            own = re.findall(r"\w+", kind)[1:]
            for place, (part, of) in enumerate(zip(("key", "value"), own), start=1):
                kept = _Field.LABEL_OPTIONAL
                entry.field.add(name=part, number=place, label=kept, type=_KINDS[of])
            kind = f"{message.name}.{entry_name}"
        field.type_name = f".{self._package}.{kind}"

    def __getitem__(self, name: str) -> type:
        return self._class(self._pool.FindMessageTypeByName(f"{self._package}.{name}"))
