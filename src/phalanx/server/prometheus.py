"""Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]
Value = float | int


class MetricsText:
    """A page in the making. Families must be whole: all samples of a name come in one call.

    Args:
        labels: on every sample.
    """

    def __init__(self, labels: Labels) -> None:
        self._common = _labels(labels)
        self._lines: list[str] = []

    def gauge(self, name: str, text: str, value: Value) -> None:
        """One value that goes up and down."""
        self.samples(name, "gauge", text, [({}, value)])

    def counter(self, name: str, text: str, value: Value) -> None:
        """One total; its name ends in _total."""
        self.samples(name, "counter", text, [({}, value)])

    def samples(self, name: str, kind: str, text: str, samples: Iterable[tuple[Labels, Value]]) -> None:
        """A family of gauges or counters, one for each set of labels."""
        self._head(name, kind, text)
        self._lines += [f"{name}{self._with(labels)} {_number(value)}" for labels, value in samples]

    def histogram(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        samples: Iterable[tuple[Labels, Sequence[Value], float]],
    ) -> None:
        """A family of histograms: (labels, values of each bucket, sum), one bucket more than bounds."""
        self._head(name, "histogram", text)
        for labels, buckets, total in samples:
            count: Value = 0
            for bound, value in zip([*map(_number, bounds), "+Inf"], buckets, strict=True):
                count += value
                self._lines.append(f"{name}_bucket{self._with({**labels, 'le': bound})} {_number(count)}")
            self._lines.append(f"{name}_sum{self._with(labels)} {_number(total)}")
            self._lines.append(f"{name}_count{self._with(labels)} {_number(count)}")

    def text(self) -> str:
        """The page."""
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, kind: str, text: str) -> None:
        escaped = text.replace("\\", r"\\").replace("\n", r"\n")
        self._lines += [f"# HELP {name} {escaped}", f"# TYPE {name} {kind}"]

    def _with(self, labels: Labels) -> str:
        inside = ",".join(part for part in (self._common, _labels(labels)) if part)
        return f"{{{inside}}}" if inside else ""


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: Value) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
