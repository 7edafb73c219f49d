"""The reader of the configuration: a YAML file. Environment variables override the file, and flags override both."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from headwater.hub_cache import hub_model
from headwater.reference import kind_and_path
from headwater_server.config.cluster import Cluster
from headwater_server.config.deployment_kinds import kind_of
from headwater_server.config.schema import Config
from headwater_server.config.sections import NodePlacement
from headwater_server.config.validation import Faults, describe
from headwater_server.errors import ConfigError

__all__ = [
    "PLACEHOLDER",
    "InvalidConfig",
    "Unparsed",
    "is_model_reference",
    "load_config",
    "load_what",
    "read_config",
    "read_yaml",
]

ENVIRONMENT_PREFIX = "HEADWATER_"
PLACEHOLDER: Final = "none:None"
"""The model of a placeholder deployment. A `Config` must have a deployment, so `InvalidConfig.rest` has the placeholder
if no deployment is valid."""
EXPANDED_CHARACTERS: Final = 256 * 1024
"""The most characters of a YAML document with its aliases expanded, unless its text is already longer."""
_FLAG = re.compile(r'(?:"[^"]+"|[^".]+)(?:\.(?:"[^"]+"|[^".]+))*\Z')
_FLAG_PART = re.compile(r'"[^"]+"|[^".]+')


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys; PyYAML would silently use the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """See `yaml.SafeLoader`. Merge keys (``<<``) are not resolved yet, so a mapping may override merged keys."""
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.composer.ComposerError(None, None, f"duplicate key `{key.value}`", key.start_mark)
                keys.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """See `yaml.SafeLoader`. If a mapping merges a key several times, the last pair is kept."""
        super().flatten_mapping(node)
        last = {key.value if isinstance(key, yaml.ScalarNode) else id(key): (key, value) for key, value in node.value}
        node.value = list(last.values())


def load_config(path: Path, *, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any]) -> Config:
    """Read a YAML file, overridden by the environment and the flags; see `read_config` for both.

    Raises:
        ConfigError: the file can't be read, or is not valid YAML, or a field is invalid (`InvalidConfig`).
    """
    return read_config(read_yaml(path), source=str(path), environment=environment, flags=flags)


def load_what(argument: str, *, flags: Mapping[str, Any]) -> tuple[Config, tuple[str, ...]]:
    """Read the configuration that a command's argument names: a YAML file, or a model such as ``my.models:Scale``.

    Returns the configuration, and the folders of the user's modules: the working folder, and for a file its folder.
    Raises the errors of `load_config`.
    """
    here = os.getcwd()
    if is_model_reference(argument):
        content = {"deployments": {_name(argument): {"model": argument}}}
        return read_config(content, source=argument, flags=flags), (here,)
    path = Path(argument)
    if hint := _instead(path):
        raise ConfigError(f"{argument}: expected a YAML file, or a model such as my.models:Scale; {hint}")
    return load_config(path, flags=flags), tuple(dict.fromkeys((here, str(path.resolve().parent))))


def _instead(path: Path) -> str:
    """A hint on how to name a model, if its file or folder was given in place of a configuration; empty if the path
    doesn't look like a model."""
    if path.is_dir():
        return f"write hf:{path} for a Hugging Face folder, lm:{path} if it has a language model"
    if path.suffix == ".py":
        return f"write pytriton:{path} for a PyTriton script, {path.stem}:CLASS for a class in that file"
    kind = {".onnx": "onnx", ".pt": "torch", ".pt2": "torch", ".pth": "torch"}.get(path.suffix)
    if not kind and path.suffix not in (".yaml", ".yml", ".json") and not path.exists() and hub_model(str(path)):
        return f"write hf:{path} for a model of the Hugging Face hub, lm:{path} if it is a language model"
    return f"write {kind}:{path}" if kind else ""


def is_model_reference(argument: str) -> bool:
    """Whether a command's argument names a model and not a file."""
    return ":" in argument and not Path(argument).exists()


def _name(model: str) -> str:
    """The name under which a single model is served: of its folder, of its file without suffix, or of its class in
    lower case."""
    last = model.rpartition(":")[2]
    kind, path = kind_and_path(model)
    if kind == "hf" or kind_of(model).names_folder:  # a folder; its name may contain a dot
        return Path(last).absolute().name.partition("@")[0]  # without a revision at the hub
    return Path(path).absolute().stem if path else last.lower()


def read_yaml(path: Path) -> Any:
    """The content of a YAML file: mappings, lists and scalars; None if it is empty.

    Raises:
        ConfigError: the file can't be read, is not valid YAML, has a key twice, or has too many aliases of aliases.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text: {error.reason} at byte {error.start}") from error
    return _parse_yaml(text, where=str(path))


def _parse_yaml(text: str, *, where: str) -> Any:
    try:
        content = yaml.load(text, Loader=_UniqueKeys)
        _check_expanded(content, max(EXPANDED_CHARACTERS, len(text)), where)
        return _copy(content)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        reason = "an anchor that contains itself, or too many levels of nesting"
        raise ConfigError(f"{where}: not valid YAML: {reason}") from error


def _check_expanded(content: Any, limit: int, where: str) -> None:
    """Check the size of a YAML document with each alias (``*name``) replaced by the content of its anchor.

    Raises:
        ConfigError: the document has more characters than the limit.
        RecursionError: an anchor contains itself.
    """
    sizes: dict[int, int] = {}
    if _expanded_size(content, sizes) <= limit:
        return
    path: list[str] = []
    while isinstance(content, (dict, list)):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        large = next(((key, item) for key, item in items if _expanded_size(item, sizes) > limit), None)
        if large is None:
            break
        path.append(str(large[0]))
        content = large[1]
    place = f"`{'.'.join(path)}`: " if path else ""
    expected = f"expected at most {limit} characters with every alias expanded"
    got = f"got {_expanded_size(content, sizes)}; write fewer aliases (*name) of aliases"
    raise ConfigError(f"{where}: {place}{expected}, {got}")


def _expanded_size(value: Any, sizes: dict[int, int]) -> int:
    """A lower bound of a value's characters when written without aliases; ``sizes`` caches sizes by identity.

    Raises:
        RecursionError: the value contains itself.
    """
    if isinstance(value, str):
        return 1 + len(value)
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in sizes:
        items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum([_expanded_size(item, sizes) for item in items])
    return sizes[id(value)]


class Unparsed(str):
    """A flag's value as YAML text."""


def read_config(
    content: object, *, source: str, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any]
) -> Config:
    """Check a parsed configuration, overridden by the environment and the flags.

    Args:
        content: the content of the YAML file.
        source: the name of the configuration in messages.
        environment: variables such as ``HEADWATER_SERVER__PORT=9000``: a field's path, in capitals or unchanged. The
            path's parts are joined by two underscores; within a part, a run of characters other than letters and digits
            is written as a single underscore. Values are parsed as YAML. Default: the process's environment.
        flags: values by dotted path, such as ``{"server.port": 9000}``; a name with a dot is put in double quotes.
            `Unparsed` values are parsed as YAML.

    Raises:
        ConfigError: the content is no mapping, or a variable or flag can't be applied.
        InvalidConfig: fields are invalid; the message says each field, the expected and the actual value.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: expected a mapping with `deployments`, got {type(content).__name__}")
    merged: dict[str, Any] = _copy(content)
    overrides: dict[tuple[str, ...], str] = {}
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            where = f"environment variable {name}"
            path = name[len(ENVIRONMENT_PREFIX) :].split("__")
            overrides[_set(merged, path, _parse_yaml(text, where=where), where=where)] = where
    for dotted, value in flags.items():
        where = f"flag {dotted}"
        if not _FLAG.match(dotted):
            names = "names separated by dots, such as server.port, and a name that contains a dot in double quotes"
            raise ConfigError(f'{where}: expected {names}, such as deployments."my.model".timeout_s')
        if isinstance(value, Unparsed):
            value = _parse_yaml(value, where=where)
        overrides[_set(merged, _FLAG_PART.findall(dotted), value, where=where)] = where
    section = merged.pop("cluster", None)
    problems: list[str] = []
    cluster = None
    if section is not None:
        try:
            cluster = Cluster.model_validate(section)
        except ValidationError as error:
            problems += describe(error, Cluster, ("cluster",), overrides=overrides)
    try:
        config = Config.model_validate(merged).with_cluster(cluster)
    except ValidationError as error:
        problems += describe(error, Config, overrides=overrides)
        raise InvalidConfig(source, problems, _without_faults(merged, error)) from None
    if problems or (problems := list(_placement_faults(config))):
        raise InvalidConfig(source, problems, config)
    return config


def _placement_faults(config: Config) -> Iterator[str]:
    """Messages about devices that don't match ``cluster``: nodes without a cluster, or GPUs by number in a cluster; and
    about models that can't run in a cluster."""
    for name, deployment in config.all_deployments().items():
        if config.cluster is None:
            if isinstance(deployment.device, NodePlacement):
                expected = "expected auto, cpu, cuda or cuda:N"
                yield f"`deployments.{name}.device`: {expected}: without the section `cluster` there are no nodes"
            continue
        if not deployment.kind.runs_in_cluster:
            fix = "serve it by a server without the section `cluster`"
            yield f"`deployments.{name}.model`: {deployment.model} can't run in a cluster; {fix}"
            continue
        try:
            _ = deployment.node_placement
        except ValueError as error:
            yield f"deployments.{name}.{error}"


class InvalidConfig(ConfigError):
    """Fields of a configuration are invalid; each problem names its field.

    ``rest`` is the configuration without the invalid deployments and fields, except a ``device`` that doesn't match
    ``cluster``; None if it is still invalid. If no deployment is valid, see `PLACEHOLDER`.
    """

    def __init__(self, source: str, problems: Sequence[str], rest: Config | None) -> None:
        super().__init__(f"{source}: {'; '.join(problems)}")
        self.source = source
        self.problems = problems
        self.rest = rest


def _without_faults(tree: dict[str, Any], error: ValidationError) -> Config | None:
    """The configuration without invalid deployments and without invalid fields of other sections; None if it is still
    invalid. Removes them from ``tree``."""
    for detail in error.errors(include_url=False):
        section, *below = detail["loc"] or ("deployments",)
        fault = detail.get("ctx", {}).get("error")
        for name in below[:1] or (fault.deployments if isinstance(fault, Faults) else ()):
            if isinstance(tree.get(str(section)), dict):
                tree[str(section)].pop(name, None)
        if (not below and detail["loc"]) or not isinstance(tree.get(str(section)), dict):
            tree.pop(str(section), None)
    if not tree.get("deployments"):
        tree["deployments"] = {"none": {"model": PLACEHOLDER}}
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _set(tree: dict[str, Any], path: list[str], value: object, *, where: str) -> tuple[str, ...]:
    """Set a nested field. Returns the field's path, with the keys as the tree spells them.

    Raises:
        ConfigError: a part of the path is ambiguous (`_match`), or names a value that is no section.
    """
    matched = []
    for part in path[:-1]:
        part = _match(tree, part, where=where)
        matched.append(part)
        branch = tree.setdefault(part, {})
        if branch is None:
            branch = tree[part] = {}
        if not isinstance(branch, dict):
            raise ConfigError(f"{where}: `{part}` is not a section")
        tree = branch
    last = _match(tree, path[-1], where=where)
    tree[last] = value
    return (*matched, last)


def _match(tree: Mapping[str, Any], part: str, *, where: str) -> str:
    """The key that a part of a path refers to.

    A quoted part is taken literally. An unquoted part refers to the key that is equal to it, else equal when case is
    ignored, else equal with underscores for all characters except letters and digits. If no key matches, the result is
    the part in lower case.

    Raises:
        ConfigError: several keys match.
    """
    if part.startswith('"'):
        return part[1:-1]
    keys = [key for key in tree if isinstance(key, str)]
    for plain in (str, str.lower, _underscored):
        matches = [key for key in keys if plain(key) == plain(part)]
        if len(matches) > 1:
            either = " or ".join(f"`{key}`" for key in matches)
            raise ConfigError(f"{where}: `{part}` may mean {either}; use --set, with the name in double quotes")
        if matches:
            return matches[0]
    return part.lower()


def _underscored(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
