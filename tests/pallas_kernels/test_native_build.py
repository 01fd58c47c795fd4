"""How native kernels are built and kept."""

import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.native import build as native

PLAIN = native.INSTRUCTION_SETS[-1]
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    try:
        native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.build.cache_clear()
    path = tmp_path / "answer.cc"
    path.write_text(SOURCE)
    return path


def built(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "jpaged" / "native").iterdir())


def test_a_build_is_kept_and_found_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.build(source, PLAIN).answer() == 42
    before = built(tmp_path)
    assert len(before) == 1 and before[0].startswith("answer-plain-")
    native.build.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.build(source, PLAIN).answer() == 42
    assert built(tmp_path) == before


def test_another_source_or_instruction_set_is_another_build(source: Path, tmp_path: Path) -> None:
    native.build(source, PLAIN)
    source.write_text(SOURCE.replace("42", "43"))
    native.build.cache_clear()
    assert native.build(source, PLAIN).answer() == 43
    for instruction_set in native.runnable_instruction_sets():
        assert native.build(source, instruction_set).answer() == 43
    assert len(built(tmp_path)) == 1 + len(native.runnable_instruction_sets())
    source.with_name("beside.h").write_text("// It may be included.")
    native.build.cache_clear()
    native.build(source, PLAIN)
    assert len(built(tmp_path)) == 2 + len(native.runnable_instruction_sets())


def test_processes_that_build_the_same_at_once_all_succeed(source: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pallas_kernels.native.build import INSTRUCTION_SETS, build;"
        "sys.exit(build(Path(sys.argv[1]), INSTRUCTION_SETS[-1]).answer())"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(source)]) for _ in range(3)]
    assert [process.wait() for process in processes] == [42, 42, 42]
    assert len(built(tmp_path)) == 1


def test_a_failed_build_says_what_the_compiler_said_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("int answer() { return undeclared; }\n")
    with pytest.raises(native.BuildError, match=r"cannot compile answer\.cc: .*undeclared"):
        native.build(source, PLAIN)
    assert built(tmp_path) == []


def test_a_compiler_that_is_not_there(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(native.BuildError, match="CXX names, 'no-such-compiler', is not there"):
        native.build(source, PLAIN)


def test_the_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    runnable = native.runnable_instruction_sets()
    monkeypatch.delenv(native.INSTRUCTION_SET_VARIABLE, raising=False)
    assert native.choose_instruction_set() is runnable[0]
    assert runnable[-1] is PLAIN
    monkeypatch.setenv(native.INSTRUCTION_SET_VARIABLE, "plain")
    assert native.choose_instruction_set() is PLAIN
    monkeypatch.setenv(native.INSTRUCTION_SET_VARIABLE, "vax")
    with pytest.raises(native.BuildError, match=r"JPAGED_INSTRUCTION_SET is 'vax', this machine runs .*plain"):
        native.choose_instruction_set()
