"""The classes that run the scripts of a repository, and the file that has them."""

from __future__ import annotations

import keyword
import pprint
import re
from collections.abc import Collection, Iterable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict

from headwater_server.cli.conversion.converted import ScriptClass
from headwater_server.repository.model_config import SCRIPT, RepositoryModel

__all__ = ["class_name", "classes_text", "config_json"]

_HEAD = '''"""The models of {repository} that are scripts of Triton's Python backend.

Written by `headwater import`. Each class runs its script as it is; `config` is what the script's `initialize` gets.
"""

from headwater.triton.triton_script import TritonScript
'''


def class_name(model: str, version: str, is_only: bool) -> str:
    """The name of a class for a version of a model: the model's name, with the codes of characters that no identifier
    has."""
    name = re.sub(r"\W", lambda character: f"_{ord(character[0]):x}_", model)
    if not name.isidentifier() or keyword.iskeyword(name) or name == "TritonScript":
        name = f"model_{name}"
    return name if is_only else f"{name}__v{version}"


def classes_text(repository: str, classes: Iterable[ScriptClass]) -> str:
    """The source of the module that has the classes."""
    texts = [_HEAD.format(repository=repository)]
    for one in classes:
        fields = "".join(f"    {name} = {_literal(value, len(name) + 7)}\n" for name, value in one.fields.items())
        texts.append(f"class {one.name}(TritonScript):\n{fields}")
    return "\n\n".join(texts)


def _literal(value: Any, column: int) -> str:
    text = pprint.pformat(value, width=120 - column, compact=True, sort_dicts=False)
    return text.replace("\n", "\n" + " " * column)


def config_json(model: RepositoryModel) -> dict[str, Any]:
    """A model's configuration as Triton passes it to ``initialize``: completed, and with all defaults."""
    config = type(model.config)()
    config.CopyFrom(model.config)
    config.name, config.backend = model.name, "python"
    config.default_model_filename = config.default_model_filename or SCRIPT
    config.ClearField("platform")
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if not config.instance_group:
        config.instance_group.add(name=f"{model.name}_0", kind="KIND_CPU", count=1)
    content: dict[str, Any] = MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _number(content, config.DESCRIPTOR)
    return content


_LONG: Collection[int] = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def _number(content: dict[str, Any], descriptor: Descriptor) -> None:
    """Turn the texts that stand for integers of 64 bits in protobuf's JSON into numbers, as Triton does."""
    for field in descriptor.fields:
        value = content.get(field.name)
        if value is None:
            continue
        if field.cpp_type in _LONG:
            content[field.name] = [int(item) for item in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"].message_type
            for item in value.values() if inner is not None else ():
                _number(item, inner)
        elif field.message_type is not None:
            for item in value if isinstance(value, list) else [value]:
                _number(item, field.message_type)
