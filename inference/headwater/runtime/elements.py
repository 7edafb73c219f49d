"""A step of a fused pipeline whose rows are the elements of another step's ragged outputs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence

from headwater.errors import BadOutput
from headwater.runtime.step import Given, Made, Step
from headwater.runtime.values import Elements, example_elements, rows_of, settled
from headwater.signature import COUNT, TensorSpec
from headwater.wire.arrays import Array, padded, zeros
from headwater.wire.report import OF_VALUES, RowReport, Status

__all__ = ["ElementStep"]

logger = logging.getLogger(__name__)


class ElementStep(Step):
    """Calls a model with the elements of all rows of a batch. To the batch it is a step with ragged outputs.

    Other inputs than elements have their row's value for each of the row's elements. A failed element fails its row.
    Rows without elements need no call.
    """

    async def run(self, step_input: Given, *, is_retry: bool = False) -> Made:
        """See `Step.run`: the elements in ``step_input.inputs`` are `Elements`, and so are the values in the result.

        In a warm-up without any elements the model is called with an example element for each row, and its results are
        dropped. If the example was invented and the model can't take it, the model is served without a warm-up.
        """
        taken = {name: value for name, value in step_input.inputs.items() if isinstance(value, Elements)}
        counts = next(iter(taken.values())).counts
        if not sum(counts):
            return await self._warmed_up(step_input, taken) if step_input.is_warmup else self._grouped(Made(), counts)
        return self._grouped(await super().run(_of_elements(step_input, taken, counts), is_retry=is_retry), counts)

    async def _warmed_up(self, step_input: Given, taken: Mapping[str, Elements]) -> Made:
        signature, rows = self.planned.signature, step_input.rows
        example = signature.example_row()
        elements = {
            spec.name: example_elements(self.planned.expected[spec.name], example[spec.name], rows)
            for spec in signature.inputs
            if spec.name in taken and spec.name in example
        }
        others = {name: value for name, value in step_input.inputs.items() if name not in taken}
        step_result = await super().run(step_input._replace(inputs={**others, **elements}))
        if step_result.failures:
            report = next(iter(step_result.failures.values()))
            if report.status not in OF_VALUES or not any(spec.name in taken for spec in signature.invented):
                return Made(failures=dict.fromkeys(range(rows), report))
            logger.warning(
                "step `%s` is served without a warm-up, so its first call takes longer: the warm-up's rows have no "
                "elements, and it can't take an invented element (%s); give its model an `example`",
                self.name, report.message,
            )  # fmt: skip
        return self._grouped(Made(), [0] * rows)

    def _grouped(self, step_result: Made, counts: Sequence[int]) -> Made:
        """The elements' result as that of their rows, of which each has a number of elements."""
        starts = [0, *itertools.accumulate(counts)]
        row_of = [row for row, count in enumerate(counts) for _ in range(count)]
        failures: dict[int, RowReport] = {}
        for element, report in sorted(step_result.failures.items()):
            row = row_of[element]
            failures.setdefault(row, report._replace(message=f"element {element - starts[row]}: {report.message}"))
        good = [row for row in range(len(counts)) if row not in failures]
        kept = [place for place, element in enumerate(step_result.good) if row_of[element] not in failures]
        good_counts = [counts[row] for row in good]
        values = {
            name: Elements(value if len(kept) == len(value) else settled(rows_of(value, kept)), good_counts)
            for name, value in step_result.values.items()
        }
        for handover in self._handovers if not step_result.good else ():
            values[handover.output] = Elements(_nothing(handover.expected.shape, handover.expected), good_counts)
        arrays: dict[str, Array] = {}
        try:
            for spec in [spec for spec in self.planned.outputs if spec.ragged] if self._is_head and good else ():
                elements = step_result.arrays[spec.name][kept] if step_result.good else _nothing(spec.shape[1:], spec)
                ends = itertools.accumulate(good_counts)
                pieces = [elements[end - size : end] for end, size in zip(ends, good_counts, strict=True)]
                arrays[spec.name], arrays[COUNT.format(spec.name)] = padded(spec, pieces)
        except BadOutput as error:
            failures.update(dict.fromkeys(good, RowReport(Status.BAD_OUTPUT, str(error))))
            good = []
        step_result.good, step_result.values, step_result.arrays = good, values if good else {}, arrays
        step_result.failures = failures
        return step_result


def _of_elements(step_input: Given, taken: Mapping[str, Elements], counts: Sequence[int]) -> Given:
    """The arguments with elements as rows."""
    row_of = [row for row, count in enumerate(counts) for _ in range(count)]
    return step_input._replace(
        inputs={name: taken[name].values if name in taken else value for name, value in step_input.inputs.items()},
        rows=len(row_of),
        row_parameters={name: [values[row] for row in row_of] for name, values in step_input.row_parameters.items()},
        owners=[step_input.owners[row] for row in row_of] if step_input.owners else (),
        places={name: row_of for name in step_input.inputs if name not in taken},
    )


def _nothing(shape: Sequence[int], spec: TensorSpec) -> Array:
    """An array without elements of this shape, in which a dimension that varies is 0."""
    return zeros(spec, (0, *(max(dim, 0) for dim in shape)))
