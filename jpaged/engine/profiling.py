"""Where a step's time goes: a trace by jax's profiler, and a table made from it.

Device work is told apart by the `jax.named_scope` that an operation was traced under, which compiled programs keep in
their metadata; host work by annotations around the parts of the loop. Containers (loops, conditionals, calls) are left
out, so that nothing is counted twice.
"""

import gzip
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

from jpaged.errors import ConfigError

# Scopes in the compiled step, and what the table calls them; an operation belongs to the innermost one.
DEVICE_SCOPES = {
    "paged_attention": "attention",
    "logits": "head",
    "sampler": "sampler",
    "matmul": "matrix products",
    "layers": "layers, rest",
}
HOST_PARTS: tuple[str, ...] = ("plan", "dispatch", "wait", "commit")  # the last one makes text, too
logger = logging.getLogger(__name__)
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
        overhead_seconds: between operations of a program, in which none of them ran.
        gap_seconds: between programs, in which the device had nothing to do.
        host_seconds: by part of the loop, on the engine's thread; "wait" is for the device.
    """

    directory: Path
    steps: int
    wall_seconds: float
    device_seconds: dict[str, float]
    overhead_seconds: float
    gap_seconds: float
    host_seconds: dict[str, float]

    def describe(self) -> str:
        """A table, as text."""
        lines = [f"{self.steps} steps in {self.wall_seconds:.2f} s; the trace is in {self.directory}"]
        lines += [f"{'':24}{'ms a step':>10}{'share':>8}"]
        lines += [f"{name:24}{milliseconds:10.2f}{share:8.1%}" for name, milliseconds, share in self.rows()]
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, float, float]]:
        """(what, milliseconds a step, share of the wall time), the device's first."""
        steps, wall = max(self.steps, 1), self.wall_seconds or 1.0
        device = sorted(self.device_seconds.items(), key=lambda item: -item[1])
        parts = [(f"device: {name}", seconds) for name, seconds in device]
        parts += [("device: overhead", self.overhead_seconds), ("device: gap", self.gap_seconds)]
        parts += [(f"host: {name}", seconds) for name, seconds in self.host_seconds.items()]
        return [(name, 1e3 * seconds / steps, seconds / wall) for name, seconds in parts]

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "wall_seconds": self.wall_seconds,
            "overhead_seconds": self.overhead_seconds,
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
        """`programs` are the compiled ones that run, as jax.stages.Compiled.

        Raises ConfigError if there can be no such directory.
        """
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write a profile to {directory}: {error}; name another directory") from error
        self._programs = list(programs)

    def __enter__(self) -> Self:
        self._known = set(self._directory.rglob("*.trace.json.gz"))
        jax.profiler.start_trace(str(self._directory), create_perfetto_trace=False)
        return self

    def __exit__(self, *_: object) -> None:
        """End the trace; write what it shows to `profile.json` and `profile.txt` beside it."""
        jax.profiler.stop_trace()
        [trace] = set(self._directory.rglob("*.trace.json.gz")) - self._known
        with gzip.open(trace) as file:
            events = json.load(file)["traceEvents"]
        self.profile = read_trace(events, scopes_of(self._programs), self._directory)
        (self._directory / "profile.json").write_text(json.dumps(self.profile.as_json(), indent=2))
        (self._directory / "profile.txt").write_text(self.profile.describe() + "\n")


class StepsProfiler:
    """Takes one trace of an engine's steps: from its first step on, until there are enough or nothing is left to do."""

    def __init__(self, profiler: Profiler, num_steps: int) -> None:
        self._profiler = profiler
        self._steps_left = num_steps
        self._is_tracing = False
        self.profile: Profile | None = None  # once there is one

    def begin_step(self) -> None:
        if not self._is_tracing and self._steps_left:
            self._profiler.__enter__()
            self._is_tracing = True

    def end_step(self, has_work: bool) -> None:
        if self._is_tracing:
            self._steps_left -= 1
            if not self._steps_left or not has_work:
                self.end()

    def end(self) -> None:
        """Write what was traced and log the table, which takes seconds; without effect when that is done."""
        self._steps_left = 0
        if self._is_tracing:
            self._is_tracing = False
            self._profiler.__exit__()
            self.profile = self._profiler.profile
            logger.info("profile: %s", self.profile.describe())


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
    intervals: list[tuple[float, float, str]] = []
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
            intervals.append((start, start + microseconds, event["args"]["hlo_module"]))
    wall, overhead, gap = (microseconds / 1e6 for microseconds in _measure_holes(intervals))
    return Profile(directory, steps, wall, device, overhead, gap, host)


def kind_of(path: str) -> str:
    """What an operation belongs to: the innermost known scope of its path."""
    scopes = [scope for scope in path.split("/") if scope in DEVICE_SCOPES]
    return DEVICE_SCOPES[scopes[-1]] if scopes else "other"


def _measure_holes(intervals: list[tuple[float, float, str]]) -> tuple[float, float, float]:
    """How long it is from the first interval to the last, and what of it is covered by none: between two of the same
    program, and between those of different ones, as a step and the draw behind it are."""
    if not intervals:
        return 0.0, 0.0, 0.0
    intervals = sorted(intervals)
    overhead = gap = 0.0
    first, end, last_program = intervals[0]
    for start, stop, program in intervals:
        hole = max(start - end, 0.0)
        overhead, gap = (overhead + hole, gap) if program == last_program else (overhead, gap + hole)
        if stop > end:
            end, last_program = stop, program
    return end - first, overhead, gap
