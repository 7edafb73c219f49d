"""A model of a repository, which is no ensemble, as a deployment."""

from __future__ import annotations

from typing import Any

from headwater.signature import Signature
from headwater_server.cli.conversion.converted import Converted, Unfit
from headwater_server.cli.conversion.model_file import THREADS, datatype_of, model_file, versions_of
from headwater_server.cli.conversion.model_settings import settings_of
from headwater_server.repository.model_config import RepositoryModel

__all__ = ["check_signature", "converted_model"]


def converted_model(model: RepositoryModel) -> Converted:
    """The deployment of a model; with versions, if Triton serves others than version 1.

    Raises:
        Unfit: it can't be a deployment.
    """
    section, remarks = settings_of(model)
    if model.backend == "onnxruntime" and THREADS in model.config.parameters:
        count = model.config.parameters[THREADS].string_value
        section |= {"threads": int(count)} if count.isdigit() and int(count) else {}
    files = {path.name: model_file(model, path) for path in versions_of(model)}
    remarks += next(reversed(files.values())).remarks
    sections: dict[str, dict[str, Any]] = {
        version: {"model": file.reference, **({"options": file.options} if file.options else {})}
        for version, file in files.items()
    }
    latest = next(reversed(sections))
    own = sections["1"] if [*sections] == ["1"] else {"versions": sections, "traffic": {latest: 1.0}}
    classes = tuple(file.script_class for file in files.values() if file.script_class is not None)
    return Converted({**own, **section}, tuple(remarks), classes)


def check_signature(model: RepositoryModel, signature: Signature) -> list[str]:
    """Remarks on what clients see otherwise than with ``config.pbtxt``.

    Raises:
        Unfit: inputs or outputs have other names or types.
    """
    for side, configured, specs in (
        ("input", model.config.input, signature.inputs),
        ("output", model.config.output, signature.outputs),
    ):
        wanted = {(tensor.name, datatype_of(tensor)) for tensor in configured}
        found = {(spec.name, spec.datatype) for spec in specs}
        if not wanted:
            continue
        if not wanted <= found or (side == "input" and wanted != found):
            shown = [", ".join(f"{name} {datatype}" for name, datatype in sorted(some)) for some in (wanted, found)]
            raise Unfit(f"{side}s: config.pbtxt has {shown[0]}, and Headwater would have {shown[1]}")
        optional = {spec.name for spec in specs if spec.optional}
        for tensor in configured:
            if side == "input" and tensor.optional != (tensor.name in optional):
                raise Unfit(f"input {tensor.name!r} is optional in config.pbtxt alone, or in the file alone")
    more = {spec.name for spec in signature.outputs} - {tensor.name for tensor in model.config.output}
    if model.config.output and more:
        return [f"outputs: it also answers {', '.join(sorted(more))}, which config.pbtxt leaves out"]
    if not model.config.output or not model.config.input:
        return ["tensors: those of the file; in their names, characters besides letters, digits and _ . - become _"]
    return []
