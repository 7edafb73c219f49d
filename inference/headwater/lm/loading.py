"""Makes an engine from an ``lm:`` reference and its options. Faults of the options and of the folder's files are found
before weights are read."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta

from headwater.answer_formats import ReasoningName, ToolParser
from headwater.engine import Engine, EngineLimits, Sampling
from headwater.environment import check_installed, install_command, problem_of
from headwater.errors import LoadError, Problem, ReplicaError
from headwater.hf.json_files import checked_json
from headwater.hf.weight_headers import check_kind
from headwater.lm.generation_config import sampling_defaults
from headwater.lm.model_folder import CONFIG, OTHER, Attention, checked_model
from headwater.lm.step_watch import MAX_STEP_S
from headwater.reference import find_folder
from headwater.runtime.capacity import Capacity
from headwater.runtime.device import breaks_device, is_out_of_memory
from headwater.runtime.loader import import_for, wrong_options
from headwater.signature import LanguageModelSpec, Signature, text_signature

__all__ = ["LmPlan", "SlotOptions", "lm_signature", "plan_language_model"]

logger = logging.getLogger(__name__)

Count = Annotated[int, Meta(ge=1)]
StepTime = Annotated[float, Meta(gt=0, le=86_400)]

TOKENIZER: Final = "tokenizer.json"
GRAMMARS: Final = "llguidance"
WITHOUT_GRAMMARS: Final = "requests can't ask for a form of the answer, such as a JSON schema"
GIVEN: Final = ("device", "on_broken")
"""Keyword arguments that a user's engine gets in addition to its options."""
SEE_ENGINE: Final = "see headwater.engine.Engine for what an engine is"


class SlotOptions(msgspec.Struct, frozen=True):
    """Options of the built-in engine, `headwater.lm.slot_engine.SlotEngine`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; ``auto`` for the folder's type."""
    attention: Attention = "auto"
    """``auto``: sdpa, or eager if transformers does not support sdpa for the architecture."""
    max_sequences: Annotated[int, Meta(ge=1, le=4096)] = 32
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 256
    context_length: Annotated[int, Meta(ge=2, le=2**31 - 1)] | None = None
    """Default and maximum: the length in the model's configuration."""
    cache_tokens: Annotated[int, Meta(ge=16, le=2**40)] | None = None
    """The cache's size; by default enough for all sequences. The minimum is enough for a sequence of the warm-up."""
    prefill_chunk: Count = 256
    prefix_cache: bool = True
    batch_invariant: bool = False
    cuda_graphs: bool = True


class LmPlan(NamedTuple):
    """A language model that has been checked as far as possible without loading it."""

    reference: str
    folder: Path
    options: SlotOptions | Mapping[str, Any]
    """Options of the built-in engine, or the keyword arguments of `make` besides `GIVEN`."""
    make: Callable[..., Engine] | None
    """Makes the user's engine; None for the built-in engine."""
    max_step_s: float
    """The longest that a step may take, in seconds. The host enforces it for any engine."""
    engine: str = ""
    """Reference of `make`, ``module:callable``; empty for the built-in engine."""
    tool_parser: ToolParser | None = None
    """The gateway's tool parser, for any engine."""
    sampling: Sampling = Sampling()
    """Sampling parameters for requests that don't set them, for any engine."""
    notes: tuple[str, ...] = ()
    """Notes for the operator on the choices made."""
    reasoning: ReasoningName | Literal["none"] | None = None
    """The format of the model's reasoning for the gateway, for any engine."""

    def rehearse(self) -> None:
        """Have the built-in engine check itself with a small copy of the architecture; does nothing for a user's
        engine.

        Raises:
            LoadError: the engine can't serve the architecture.
        """
        if not isinstance(self.options, SlotOptions):
            return
        from transformers import AutoConfig

        from headwater.lm.rehearsal import rehearse

        config: Any = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        try:
            rehearse(config, self.options.attention, self.options.context_length)
        except ReplicaError as error:
            reason = f"a small copy of its architecture: {error}"
            raise LoadError(Problem(f"model {self.reference}", reason, OTHER)) from None

    def load(self, device: str, on_broken: Callable[[str], None], capacity: Capacity | None = None) -> Engine:
        """Make an engine, which reads the weights. The built-in engine is checked before it is returned. Later, when a
        step runs out of memory, the built-in engine records in `capacity` how many sequences fit.

        Args:
            device: ``cpu``, ``cuda`` or ``cuda:N``.
            on_broken: the engine calls it with the reason when the device has become unusable.
            capacity: for the built-in engine only.

        Raises:
            LoadError: the built-in engine can't serve the model, or the user's engine can't be made or is no `Engine`.
            ReplicaError: loading failed for another reason.
        """
        for note in self.notes:
            logger.warning("%s: %s", self.reference, note)
        if isinstance(self.options, SlotOptions):
            return _slot_engine(self.reference, self.folder, self.options, device, on_broken, capacity)
        assert self.make is not None
        title = f"model {self.reference}"
        try:
            engine = self.make(self.folder, device=device, on_broken=on_broken, **self.options)
        except (Exception, SystemExit) as error:
            raise LoadError(_engine_problem(error, title, self.engine)) from error
        try:
            limits = engine.limits
        except (Exception, SystemExit) as error:
            if _is_ours(error):
                reason = f"options.engine: expected an engine, which has `limits`, got {engine!r:.200}"
                raise LoadError(Problem(title, reason, SEE_ENGINE)) from error
            raise LoadError(problem_of(_users(error), title, "reading its engine's limits")) from error
        if not isinstance(limits, EngineLimits):
            reason = f"options.engine: expected an engine whose `limits` are EngineLimits, got {limits!r:.200}"
            raise LoadError(Problem(title, reason, SEE_ENGINE))
        for name in ("submit", "cancel", "step", "close"):
            if inspect.iscoroutinefunction(getattr(engine, name, None)):
                reason = f"options.engine: expected a function `{name}`, got a coroutine function, which nothing awaits"
                raise LoadError(
                    Problem(title, reason, f"make it `def {name}`; one thread makes all calls of an engine")
                )
        return engine


def plan_language_model(reference: str, options: Mapping[str, Any], search: Sequence[str] = ()) -> LmPlan:
    """Find a language model's folder, and check it and the options.

    Args:
        reference: ``lm:PATH`` or ``lm:PACKAGE:PATH``.
        options: the engine's options. ``engine`` names a user's engine, ``module:callable``. It gets all other options
            except ``max_step_s``, which is for the host, and ``tool_parser``, ``reasoning`` and ``generation_config``,
            which are for the gateway: ``none`` as ``generation_config`` ignores the sampling defaults of the folder.
        search: folders in which a relative path is looked for, after the working folder.

    Raises:
        LoadError: there is no such folder or file, a file or an option is wrong, a package is not installed, or the
            built-in engine can't serve the model.
    """
    title = f"model {reference}"
    folder = find_folder(reference, search)
    rest = dict(options)
    engine = rest.pop("engine", None)
    max_step_s = _max_step_s(title, rest.pop("max_step_s", MAX_STEP_S))
    tool_parser = _tool_parser(title, rest.pop("tool_parser", None))
    reasoning = _reasoning(title, rest.pop("reasoning", "auto"))
    has_defaults = _has_defaults(title, rest.pop("generation_config", "auto"))
    if engine is None:
        check_kind(title, folder)
        checked_json(title, folder, CONFIG, "the model's configuration")
    checked_json(title, folder, TOKENIZER, "the tokenizer, which the gateway needs")
    sampling, sampling_notes = sampling_defaults(title, folder) if has_defaults else (Sampling(), [])
    if engine is None:
        check_installed(title, "lm", "torch", "transformers")
        slot_options = _slot_options(title, rest)
        attention, notes = checked_model(title, folder, slot_options.context_length, slot_options.attention)
        slot_options = msgspec.structs.replace(slot_options, attention=attention)
        if importlib.util.find_spec(GRAMMARS) is None:
            install = install_command("lm", GRAMMARS)
            notes = *notes, f"{WITHOUT_GRAMMARS}: {GRAMMARS} is not installed; {install}"
        all_notes = (*notes, *sampling_notes)
        return LmPlan(
            reference, folder, slot_options, None, max_step_s, "", tool_parser, sampling, all_notes, reasoning
        )
    engine, make = _engine_maker(title, engine)
    plan = LmPlan(
        reference, folder, rest, make, max_step_s, engine, tool_parser, sampling, tuple(sampling_notes), reasoning
    )
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # a callable not written in Python
        return plan
    try:
        signature.bind_partial(folder, **dict.fromkeys(GIVEN))
    except TypeError as error:
        raise LoadError(_engine_problem(error, title, engine)) from error
    # The first parameter is the folder.
    _, *keywords = [parameter for parameter in signature.parameters.values() if parameter.name not in GIVEN]
    for name in GIVEN:
        if name in rest:
            reason = f"unknown option {name!r}: the engine gets it from Headwater"
            raise LoadError(Problem(title, reason, f"remove `options.{name}`"))
    if (problem := wrong_options(title, keywords, rest)) is not None:
        raise LoadError(problem)
    return plan


def lm_signature(
    name: str,
    folder: Path,
    limits: EngineLimits | None,
    tool_parser: ToolParser | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    reasoning: ReasoningName | Literal["none"] | None = None,
) -> Signature:
    """A language model's signature for the gateway; without `limits`, only the part that is known before loading. Of
    `sampling`, the fields that the engine doesn't support are left out."""
    language_model = None
    if limits is not None:
        defaults = {name: value for name, value in msgspec.to_builtins(sampling).items() if name in limits.sampling}
        language_model = LanguageModelSpec(str(folder), limits, tool_parser, Sampling(**defaults), reasoning)
    return text_signature(name, folder, language_model)


def _slot_engine(
    reference: str,
    folder: Path,
    options: SlotOptions,
    device: str,
    on_broken: Callable[[str], None],
    capacity: Capacity | None,
) -> Engine:
    # Heavy imports, not needed to check a configuration.
    import transformers

    from headwater.lm.causal_lm import load_causal_lm
    from headwater.lm.grammars import Grammars
    from headwater.lm.slot_engine import SlotEngine

    logs: Any = transformers.utils.logging
    logs.disable_progress_bar()  # it would fill the replica's log
    rest = msgspec.structs.asdict(options)
    loaded = load_causal_lm(folder, device=device, dtype=rest.pop("dtype"), attention=rest.pop("attention"))
    grammars = None
    try:
        vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        if importlib.util.find_spec(GRAMMARS) is not None:
            grammars = Grammars(folder / TOKENIZER, vocab_size, loaded.eos_ids)
    except ReplicaError as error:
        logger.warning("%s: %s: %s", folder, WITHOUT_GRAMMARS, error)
    except ChildProcessError as error:
        fix = "install it again, or remove it to serve without grammars"
        raise LoadError(Problem(f"model {reference}", f"{GRAMMARS}: {error}", fix)) from error
    engine = SlotEngine(
        loaded.model, eos_ids=loaded.eos_ids, grammars=grammars, on_broken=on_broken, capacity=capacity, **rest
    )
    try:
        engine.check()
    except ReplicaError as error:
        cause = f"{type(error.__cause__).__name__}: {error.__cause__}"
        if is_out_of_memory(cause) or breaks_device(cause, device):
            raise
        raise LoadError(Problem(f"model {reference}", str(error), OTHER)) from None  # a restart would fail the same way
    return engine


def _slot_options(title: str, options: Mapping[str, Any]) -> SlotOptions:
    fields = {field.name: field for field in msgspec.structs.fields(SlotOptions)}
    for name, value in options.items():
        if name not in fields:
            option_names = ", ".join((*fields, "max_step_s", "engine", "tool_parser", "reasoning", "generation_config"))
            reason = f"unknown option {name!r}; its options are {option_names}"
            raise LoadError(Problem(title, reason, f"correct or remove `options.{name}`"))
        try:
            msgspec.convert(value, fields[name].type)
        except msgspec.ValidationError as error:
            choices = getattr(fields[name].type, "__args__", ()) if isinstance(fields[name].default, str) else ()
            expected = f"expected {' or '.join(choices)}" if choices else str(error).partition(",")[0].lower()
            reason = f"options.{name}: {expected}, got {value!r:.80}"
            raise LoadError(Problem(title, reason, f"correct `options.{name}`")) from error
    return msgspec.convert(dict(options), SlotOptions)


def _max_step_s(title: str, value: object) -> float:
    try:
        return msgspec.convert(value, StepTime)
    except msgspec.ValidationError as error:
        reason = f"options.max_step_s: {str(error).partition(',')[0].lower()}, got {value!r:.80}"
        raise LoadError(Problem(title, reason, "correct `options.max_step_s`; it is in seconds")) from error


def _tool_parser(title: str, value: object) -> ToolParser | None:
    try:
        parser: ToolParser | None = msgspec.convert(value, ToolParser | None)
        return parser
    except msgspec.ValidationError as error:
        reason = f"options.tool_parser: expected {', '.join(get_args(ToolParser))}, got {value!r:.80}"
        raise LoadError(Problem(title, reason, "correct `options.tool_parser`, or leave it out")) from error


def _reasoning(title: str, value: object) -> ReasoningName | Literal["none"] | None:
    names = get_args(ReasoningName)
    if value is None or value == "auto":
        return None
    try:
        name: ReasoningName | Literal["none"] = msgspec.convert(value, ReasoningName | Literal["none"])
        return name
    except msgspec.ValidationError as error:
        reason = f"options.reasoning: expected auto, none, {', '.join(names)}, got {value!r:.80}"
        raise LoadError(Problem(title, reason, "correct `options.reasoning`, or leave it out")) from error


def _has_defaults(title: str, value: object) -> bool:
    if value not in ("auto", "none"):
        reason = f"options.generation_config: expected auto or none, got {value!r:.80}"
        raise LoadError(Problem(title, reason, "correct `options.generation_config`, or leave it out"))
    return value == "auto"


def _engine_maker(title: str, engine: object) -> tuple[str, Callable[..., Engine]]:
    where = "options.engine"
    module_name, colon, name = engine.partition(":") if isinstance(engine, str) else ("", "", "")
    if not (module_name and colon and name):
        reason = f"{where}: expected module:callable, got {engine!r:.80}"
        raise LoadError(Problem(title, reason, "write it such as my_package.engines:make"))
    module = import_for(f"{title}, {where}", module_name)
    maker: Callable[..., Engine] | None = getattr(module, name, None)
    if not callable(maker):
        actual = "found none" if maker is None else f"got {maker!r:.80}"
        reason = f"{where}: expected a callable {name!r} in {module_name}, {actual}"
        raise LoadError(Problem(title, reason, "correct the name; the callable takes the folder and returns an Engine"))
    return f"{module_name}:{name}", maker


def _engine_problem(error: BaseException, title: str, engine: str) -> Problem:
    """The problem for an exception raised while making a user's engine; for a callable with wrong parameters, it names
    the expected parameters."""
    is_ours = _is_ours(error)
    problem = problem_of(_users(error), title, "making its engine")
    if isinstance(error, TypeError) and (
        is_ours or any(f"unexpected keyword argument '{name}'" in str(error) for name in GIVEN)
    ):
        cause = error if is_ours else problem.reason
        reason = f"options.engine {engine}: it must take (folder, *, device, on_broken, **options): {cause}"
        return Problem(title, reason, "correct the callable's parameters, or name another")
    return problem


def _is_ours(error: BaseException) -> bool:
    """Whether an exception was raised here or in `inspect`, and not in the user's code."""
    trace = error.__traceback__
    return trace is None or trace.tb_next is None or trace.tb_next.tb_frame.f_code.co_filename == inspect.__file__


def _users(error: BaseException) -> BaseException:
    """The exception with a traceback that starts in the user's code."""
    trace = error.__traceback__
    return error.with_traceback(trace.tb_next if trace is not None else None)
