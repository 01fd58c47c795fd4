"""Where a step's time goes: a trace by jax's profiler, and a table made from it.

Device work is told apart by the `jax.named_scope` that an operation was traced under, which compiled programs keep in
their metadata; host work by annotations around the parts of the loop. Containers (loops, conditionals, calls) are left
out, so that nothing is counted twice.
"""

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

# Scopes in the compiled step, and what the table calls them; an operation belongs to the innermost one.
DEVICE_SCOPES = {
    "paged_attention": "attention",
    "logits": "head",
    "sampler": "sampler",
    "matmul": "matrix products",
    "layers": "layers, rest",
}
HOST_PARTS = ("plan", "dispatch", "wait", "commit")  # the last one makes text, too
_CONTAINERS = ("while", "cond", "call", "end: ")
_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{[^}]*op_name="([^"]*)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a trace shows.

    Attributes:
        directory: holds the trace, for xprof, TensorBoard or Perfetto.
        steps: steps dispatched.
        wall_seconds: from the first device operation to the end of the last.
        device_seconds: by kind of work; the sum may exceed the wall time where operations ran side by side.
        gap_seconds: time between operations in which the device had nothing to do.
        host_seconds: by part of the loop, on the engine's thread; "wait" is for the device.
    """

    directory: Path
    steps: int
    wall_seconds: float
    device_seconds: dict[str, float]
    gap_seconds: float
    host_seconds: dict[str, float]

    def rows(self) -> list[tuple[str, float, float]]:
        """(what, milliseconds a step, share of the wall time), the device's first."""
        steps, wall = max(self.steps, 1), self.wall_seconds or 1.0
        device = sorted(self.device_seconds.items(), key=lambda item: -item[1])
        parts = [(f"device: {name}", seconds) for name, seconds in device]
        parts += [("device: gap", self.gap_seconds)]
        parts += [(f"host: {name}", seconds) for name, seconds in self.host_seconds.items()]
        return [(name, 1e3 * seconds / steps, seconds / wall) for name, seconds in parts]

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "wall_seconds": self.wall_seconds,
            "gap_seconds": self.gap_seconds,
            "device_seconds": self.device_seconds,
            "host_seconds": self.host_seconds,
        }


def host_part(name: str) -> jax.profiler.TraceAnnotation:
    """Marks a part of the loop in a trace; costs next to nothing while none is taken."""
    return jax.profiler.TraceAnnotation(f"jpaged.{name}")


class Profiler:
    """Takes a trace, from `with` to the end of its block; `profile` is what it shows."""

    profile: Profile

    def __init__(self, directory: str | Path, programs: Iterable[Any]) -> None:
        """`programs` are the compiled ones that run, as jax.stages.Compiled."""
        self._directory = Path(directory)
        self._programs = list(programs)

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._known = set(self._directory.rglob("*.trace.json.gz"))
        jax.profiler.start_trace(str(self._directory), create_perfetto_trace=False)
        return self

    def __exit__(self, *_: object) -> None:
        """End the trace; write what it shows to `profile.json` beside it."""
        jax.profiler.stop_trace()
        [trace] = set(self._directory.rglob("*.trace.json.gz")) - self._known
        with gzip.open(trace) as file:
            events = json.load(file)["traceEvents"]
        self.profile = read_trace(events, scopes_of(self._programs), self._directory)
        (self._directory / "profile.json").write_text(json.dumps(self.profile.as_json(), indent=2))


def scopes_of(programs: Iterable[Any]) -> dict[tuple[str, str], str]:
    """{(program, operation): the path of scopes that it was traced under}.

    Programs from the compilation cache have the scopes of the time when they were compiled.
    """
    paths: dict[tuple[str, str], str] = {}
    for program in programs:
        text = program.as_text()
        module = _MODULE.match(text)
        assert module is not None
        paths |= {(module.group(1), operation): path for operation, path in _INSTRUCTION.findall(text)}
    return paths


def read_trace(events: list[dict[str, Any]], paths: dict[tuple[str, str], str], directory: Path) -> Profile:
    """Sum up a trace's events."""
    device: dict[str, float] = {}
    host: dict[str, float] = dict.fromkeys(HOST_PARTS, 0.0)
    intervals: list[tuple[float, float]] = []
    steps = 0
    for event in events:
        if event.get("ph") != "X":
            continue
        name, start, microseconds = event["name"], float(event["ts"]), float(event.get("dur", 0))
        if name.startswith("jpaged."):
            part = name.removeprefix("jpaged.")
            host[part] = host.get(part, 0.0) + microseconds / 1e6
            steps += part == "dispatch"
        elif "hlo_op" in event.get("args", {}) and not name.startswith(_CONTAINERS):
            kind = kind_of(paths.get((event["args"]["hlo_module"], name), ""))
            device[kind] = device.get(kind, 0.0) + microseconds / 1e6
            intervals.append((start, start + microseconds))
    busy, wall = _covered(intervals)
    return Profile(directory, steps, wall / 1e6, device, (wall - busy) / 1e6, host)


def kind_of(path: str) -> str:
    """What an operation belongs to: the innermost known scope of its path."""
    scopes = [scope for scope in path.split("/") if scope in DEVICE_SCOPES]
    return DEVICE_SCOPES[scopes[-1]] if scopes else "other"


def _covered(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """How much of the line the intervals cover, and how long it is from the first to the last."""
    if not intervals:
        return 0.0, 0.0
    intervals = sorted(intervals)
    covered, end = 0.0, intervals[0][0]
    for start, stop in intervals:
        covered += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return covered, end - intervals[0][0]
